"""The one place that chooses between the Triton kernels and plain torch.

Triton runs on CUDA tensors, and on CPU tensors in a process with TRITON_INTERPRET=1 (tests). The
choice is made per call from the tensor's device.
"""

from __future__ import annotations

import torch

try:
    import triton

    INTERPRETED = bool(triton.knobs.runtime.interpret)
    HAVE_TRITON = True
except ImportError:
    INTERPRETED = HAVE_TRITON = False


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels."""
    return HAVE_TRITON and (tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu"))
