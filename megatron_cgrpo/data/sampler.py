"""The order in which problems are visited, resumable at any point."""

from __future__ import annotations

import random
from typing import Any


class ProblemSampler:
    """Endless batches of indices; each epoch is a new permutation fixed by (seed, epoch).

    A batch may span two epochs but never holds the same problem twice unless there are fewer
    problems than a batch takes.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("a sampler needs at least one problem")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._permutation()

    def next_batch(self, count: int) -> list[int]:
        """The next `count` indices."""
        out: list[int] = []
        while len(out) < count:
            if self._position == self._size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
                if count <= self._size:
                    # Problems of this batch's first part move to the end of the new epoch.
                    taken = set(out)
                    self._order.sort(key=lambda i: i in taken)
            out.append(self._order[self._position])
            self._position += 1
        return out

    def _permutation(self) -> list[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "order": list(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["order"]) != self._size:
            raise ValueError(
                f"the saved position is of {len(state['order'])} problems, not {self._size}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = list(state["order"])
