"""The plan of a model: which Megatron parameter is made of which Hugging Face tensors, and how.

A family is a table of `Line`s (`families/`). `plan_for` expands it over layers and experts. The
same plan loads checkpoints, exports them, feeds weight sync and serves the command-line tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cgrpo.conversion.families import FAMILIES
from megatron_cgrpo.conversion.families.base import Line
from megatron_cgrpo.conversion.rules import Rule
from megatron_cgrpo.conversion.shape import ModelShape


@dataclass(frozen=True)
class Entry:
    """A `Line` for one layer and, in mixtures, one expert."""

    megatron: tuple[str, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    key: str
    """Name in a distributed checkpoint, where all layers (and experts) are one tensor."""
    index: tuple[int, ...]
    """This entry's place in that tensor: (), (layer,) or (layer, expert)."""
    outer: tuple[int, ...]
    """Sizes of the dimensions that `index` counts in."""

    @property
    def expert(self) -> int | None:
        return self.index[1] if len(self.index) == 2 else None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the whole fused parameter, vocabulary not padded."""
        return (sum(s[0] for s in self.hf_shapes), *self.hf_shapes[0][1:])


def plan_for(shape: ModelShape) -> list[Entry]:
    """All entries of a model in the order embedding, layers, final norm, output layer."""
    family = FAMILIES[shape.family]
    return [
        *_expand(family.before, shape),
        *(e for i in range(shape.layers) for e in _expand(family.layer, shape, i)),
        *_expand(family.after, shape),
    ]


def parameter_count(shape: ModelShape) -> int:
    """Number of parameters of the whole model (tied weights counted once)."""
    return sum(math.prod(dims) for e in plan_for(shape) for dims in e.hf_shapes)


def _expand(lines: tuple[Line, ...], shape: ModelShape, layer: int | None = None) -> list[Entry]:
    out = []
    for line in lines:
        if line.when is None or getattr(shape, line.when):
            per_expert = "{e}" in line.megatron[0]
            experts = range(shape.experts) if per_expert else (None,)
            out += [_entry(line, shape, layer, e) for e in experts]
    return out


def _entry(line: Line, shape: ModelShape, layer: int | None, expert: int | None) -> Entry:
    places = [(layer, shape.layers), (expert, shape.experts)]
    key = (
        line.megatron[-1].replace("layers.{i}.", "layers.").replace("local_experts.{e}", "experts")
    )
    return Entry(
        megatron=tuple(n.format(i=layer, e=expert) for n in line.megatron),
        hf_names=tuple(n.format(i=layer, e=expert) for n, _ in line.hf),
        hf_shapes=tuple(shape.sizes(dims) for _, dims in line.hf),
        rule=line.rule,
        key=key,
        index=tuple(i for i, _ in places if i is not None),
        outer=tuple(n for i, n in places if i is not None),
    )


def check_tensors(
    plan: list[Entry],
    found: dict[str, tuple[int, ...]],
    source: str | Path,
    shape: ModelShape,
    file_of: Callable[[str], Path | str] | None = None,
) -> None:
    """Compare a Hugging Face checkpoint's tensors (name → shape) with the plan.

    Args:
        source: where they are, for the message.
        file_of: the file of a tensor, for a more exact one.

    Raises:
        ValueError: naming the first missing, unexpected or wrongly shaped tensor.
    """
    file_of = file_of or (lambda name: source)
    wanted = {n: s for e in plan for n, s in zip(e.hf_names, e.hf_shapes)}
    for name, dims in wanted.items():
        if name not in found:
            raise ValueError(f"{source} lacks the tensor {name} {dims}")
        if tuple(found[name]) != tuple(dims):
            raise ValueError(
                f"{file_of(name)}: {name} has shape {tuple(found[name])}, expected {dims} by "
                "config.json"
            )
    # A tied model's checkpoint may hold the embedding twice; old ones hold a rotary table.
    ignored = {"lm_head.weight"} if shape.tied else set()
    for name in found:
        if name not in wanted.keys() | ignored and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(
                f"{file_of(name)} has a tensor that the model has no place for: {name}"
            )


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
