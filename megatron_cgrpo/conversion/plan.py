"""The plan of a model: which Megatron parameter is made of which Hugging Face tensors, and how.

A family is a table of `Line`s (`families.py`). `plan_for` expands it over the layers. The same
plan loads checkpoints, exports them and feeds weight sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_cgrpo.conversion.rules import Rule
from megatron_cgrpo.conversion.shape import ModelShape


@dataclass(frozen=True)
class Line:
    """One row of a family's table.

    `megatron` lists the parameter's names in the local and in the TransformerEngine layer spec;
    `{i}` is the layer's global index. `hf` are the tensors it is made of, with their shapes.
    """

    megatron: tuple[str, ...]
    hf: tuple[tuple[str, Callable[[ModelShape], tuple[int, ...]]], ...]
    rule: Rule
    when: Callable[[ModelShape], bool] = lambda shape: True


@dataclass(frozen=True)
class Entry:
    """A `Line` for one layer."""

    megatron: tuple[str, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    rule: Rule


def plan_for(shape: ModelShape) -> list[Entry]:
    """All entries of a model in the order embedding, layers, final norm, output layer."""
    from megatron_cgrpo.conversion.families import TABLES

    table = TABLES[shape.family]
    return [
        *_expand(table.before, shape, None),
        *(e for i in range(shape.layers) for e in _expand(table.layer, shape, i)),
        *_expand(table.after, shape, None),
    ]


def parameter_count(shape: ModelShape) -> int:
    """Number of parameters of the whole model (tied weights counted once)."""
    return sum(math.prod(dims) for e in plan_for(shape) for dims in e.hf_shapes)


def _expand(lines: tuple[Line, ...], shape: ModelShape, layer: int | None) -> list[Entry]:
    return [
        Entry(
            tuple(n.format(i=layer) for n in line.megatron),
            tuple(n.format(i=layer) for n, _ in line.hf),
            tuple(dims(shape) for _, dims in line.hf),
            line.rule,
        )
        for line in lines
        if line.when(shape)
    ]


def check_tensors(
    plan: list[Entry], found: dict[str, tuple[int, ...]], source: str, ignore: tuple[str, ...] = ()
) -> None:
    """Compare a checkpoint's tensors (name → shape) with the plan.

    Raises:
        ValueError: naming the first missing, unexpected or wrongly shaped tensor.
    """
    wanted = {n: s for e in plan for n, s in zip(e.hf_names, e.hf_shapes)}
    for name, dims in wanted.items():
        if name not in found:
            raise ValueError(f"{source} lacks the tensor {name} {dims}")
        if tuple(found[name]) != tuple(dims):
            raise ValueError(f"{source}: {name} has shape {tuple(found[name])}, expected {dims}")
    for name in found:
        if name not in wanted and name not in ignore and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(f"{source} has a tensor that the model has no place for: {name}")


def fill(
    parameter: torch.Tensor,
    entry: Entry,
    parts: list[torch.Tensor],
    shape: ModelShape,
    tp: int,
    rank: int,
) -> None:
    """Copy this TP rank's shard into `parameter`.

    Raises:
        ValueError: if the shard's shape is not the parameter's.
    """
    value = entry.rule.shard(parts, shape, tp, rank)
    if value.shape != parameter.shape:
        raise ValueError(
            f"{entry.megatron[0]}: shard {tuple(value.shape)} does not fit the parameter "
            f"{tuple(parameter.shape)}"
        )
    with torch.no_grad():
        parameter.copy_(value)
