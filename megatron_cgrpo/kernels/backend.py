"""The one place that chooses between the Triton kernels and plain torch.

Triton runs on CUDA tensors, and on CPU tensors in a process with TRITON_INTERPRET=1 (tests). The
choice is made per call from the tensor's device; `force` overrides it in tests and benchmarks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

try:
    import triton

    INTERPRETED = bool(triton.knobs.runtime.interpret)
    HAVE_TRITON = True
except ImportError:
    INTERPRETED = HAVE_TRITON = False

_forced: str | None = None


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels."""
    if _forced is not None:
        return _forced == "triton"
    return HAVE_TRITON and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))


@contextlib.contextmanager
def force(backend: str) -> Iterator[None]:
    """Inside, every operation runs on `backend` ("triton" or "torch").

    Raises:
        ValueError: for another name, or "triton" where Triton is not installed.
    """
    global _forced
    if backend not in ("triton", "torch") or (backend == "triton" and not HAVE_TRITON):
        raise ValueError(f"kernel backend {backend!r} is not available")
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before
