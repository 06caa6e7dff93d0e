"""Hugging Face exports of the policy, written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from megatron_cgrpo.conversion.safetensors_io import write_hf


class Exporter:
    """Writes one export at a time in a thread; the tensors are copied first.

    The copy takes the host memory of the whole model, on rank 0.

    Args:
        root: folder of the exports.
        companions: directories with configuration and tokenizer files.
        on_error: told why an export could not be written.
        end_token_ids: of the tokens that the policy's responses end with.
    """

    def __init__(
        self,
        root: Path,
        companions: Sequence[Path],
        on_error: Callable[[str], None],
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self._root, self._companions, self._on_error = root, companions, on_error
        self._ends = end_token_ids
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors and begin to write `root`/step_N; waits for an export under way."""
        self.wait()
        copies = [(n, torch.empty_like(t, device="cpu").copy_(t.detach())) for n, t in tensors]
        self._error = None
        self._thread = threading.Thread(
            target=self._write, args=(step, copies), name=f"export-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait; raises the error of the last export."""
        self.wait()
        if self._error is not None:
            raise self._error

    def _write(self, step: int, copies: list[tuple[str, torch.Tensor]]) -> None:
        try:
            target = self._root / f"step_{step:06d}"
            write_hf(target, copies, self._companions, end_token_ids=self._ends)
        except Exception as e:
            self._error = e
            self._on_error(f"export of step {step} failed: {e}")
