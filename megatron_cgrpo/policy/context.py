"""Context parallelism: which positions of a sequence a rank holds.

A sequence is cut into 2·size chunks; rank r holds chunks r and 2·size − 1 − r, so that causal
attention costs all ranks the same. This is megatron-core's and TransformerEngine's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def held_positions(rank: int, size: int, bounds: Sequence[int]) -> torch.Tensor:
    """Positions that a rank holds, in the order in which it holds them.

    Args:
        rank, size: in the context-parallel group.
        bounds: [n + 1], where the sequences start and the last ends; lengths are multiples of
            2·size.
    """
    parts = []
    for start, end in zip(bounds, bounds[1:]):
        chunk = (end - start) // (2 * size)
        for c in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + c * chunk, start + (c + 1) * chunk))
    return torch.cat(parts)


def sequential_order(size: int, bounds: Sequence[int]) -> torch.Tensor:
    """Indices that put what all ranks hold, rank after rank, into the order of the sequences."""
    return torch.cat([held_positions(r, size, bounds) for r in range(size)]).argsort()
