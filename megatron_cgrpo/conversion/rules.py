"""How one Megatron parameter is made of Hugging Face tensors, and how it is cut over TP ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron_cgrpo.conversion.shape import ModelShape

# Rows of one rank's vocabulary shard are a multiple of this: kernels load 16 bytes at a time.
VOCAB_ALIGNMENT = 16


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rows of an embedding cut over `tp` ranks, padding included."""
    unit = VOCAB_ALIGNMENT * tp
    return -(-vocab // unit) * unit


@dataclass(frozen=True)
class Rule:
    """Replicated on every TP rank, made of one tensor. Subclasses cut and fuse.

    `fuse` joins whole HF tensors into the whole Megatron tensor, `split` undoes it exactly;
    `dim` is the dimension cut over TP ranks (None: replicated); `pads`: rows may be added.
    """

    dim: int | None = None
    pads: bool = False

    def fuse(self, parts: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
        (only,) = parts
        return only

    def split(self, whole: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
        return [whole]

    def shard(
        self, parts: Sequence[torch.Tensor], shape: ModelShape, tp: int, rank: int
    ) -> torch.Tensor:
        """This TP rank's shard of the parameter made of the HF tensors `parts`."""
        whole = self.fuse(parts, shape)
        return whole if self.dim is None else whole.chunk(tp, self.dim)[rank]

    def unshard(self, shards: Sequence[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
        """The HF tensors, from the shards of all TP ranks in order (one if replicated)."""
        whole = shards[0] if self.dim is None else torch.cat(list(shards), self.dim)
        return self.split(whole, shape)


@dataclass(frozen=True)
class Vocab(Rule):
    """Rows are tokens; padded with zero rows to a multiple of TP, padding dropped on export."""

    dim: int | None = 0
    pads: bool = True

    def shard(self, parts, shape, tp, rank):
        (whole,) = parts
        rows = padded_vocab(shape.vocab, tp)
        return F.pad(whole, (0, 0, 0, rows - whole.size(0))).chunk(tp)[rank]

    def split(self, whole, shape):
        return [whole[: shape.vocab]]


@dataclass(frozen=True)
class FusedQKV(Rule):
    """Rows per KV group: its queries, its key, its value. Works on weights and biases."""

    dim: int | None = 0

    def fuse(self, parts, shape):
        tail = parts[0].shape[1:]
        grouped = [p.view(shape.kv_heads, -1, *tail) for p in parts]
        return torch.cat(grouped, 1).reshape(-1, *tail)

    def split(self, whole, shape):
        tail, d = whole.shape[1:], shape.head_dim
        grouped = whole.view(shape.kv_heads, -1, *tail)
        queries = shape.heads // shape.kv_heads * d
        return [p.reshape(-1, *tail) for p in grouped.split([queries, d, d], 1)]


@dataclass(frozen=True)
class GatedMLP(Rule):
    """gate and up projections; each rank holds its rows of gate, then its rows of up."""

    dim: int | None = 0

    def fuse(self, parts, shape):
        return torch.cat(list(parts))

    def split(self, whole, shape):
        return list(whole.chunk(2))

    def shard(self, parts, shape, tp, rank):
        return torch.cat([p.chunk(tp)[rank] for p in parts])

    def unshard(self, shards, shape):
        halves = [s.chunk(2) for s in shards]
        return [torch.cat([h[i] for h in halves]) for i in (0, 1)]


REPLICATED = Rule()
ROW = Rule(dim=1)
VOCAB = Vocab()
FUSED_QKV = FusedQKV()
GATED_MLP = GatedMLP()
