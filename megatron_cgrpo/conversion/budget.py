"""How much memory the threads of a conversion may hold together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Budget:
    """Bytes shared by threads: whoever asks for more than is left waits for the others.

    A request over the whole limit gets all of it, and so runs alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        share = min(nbytes, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            with self._changed:
                self._left += share
                self._changed.notify_all()


def in_threads(action: Callable[[Any], Any], items: Sequence[Any], threads: int) -> list[Any]:
    """`action` of each item, in order; the first error stops those not begun and is raised."""
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(action, item) for item in items]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
