"""Cutting a batch into the forward passes of each data-parallel rank.

Scoring and training share these micro-batches (same shapes, same padding), so that before the
first update of a step the two give bit-equal log-probs. All decisions are a pure function of the
batch, so every rank computes the same plan and takes its own part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_cgrpo.algorithm.batch import Batch
from megatron_cgrpo.kernels.policy_loss import LossColumns
from megatron_cgrpo.policy.context import held_positions

# Order of a pass: refinements first, so that their gradient can be measured by itself.
PARTS = ("refinement", "initial", "idle")


@dataclass
class MicroBatch:
    """One forward pass. Row r of the flattened [b·s] positions predicts `targets[r]`.

    input_ids, position_ids: [b, s]. rows: [L] indices of the positions whose target counts in
    the loss; targets: [L]. columns: the loss columns of these L tokens. cu_seqlens: [n + 1] when
    packed (then b = 1), else None; longest: of its sequences, padding included. Scoring fills in
    the log-probs in `columns`.

    With context parallelism (policy/context.py) positions and rows are those of this rank;
    cu_seqlens and longest count whole sequences.
    """

    part: str
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    columns: LossColumns
    cu_seqlens: torch.Tensor | None
    longest: int


def plan_parts(
    batch: Batch,
    mini_batch: int,
    data_parallel: int,
    max_tokens: int,
    packed: bool,
    multiple_of: int = 1,
    skip_zero_advantage: bool = True,
) -> dict[str, list[list[list[int]]]]:
    """Sample indices per part, data-parallel rank and micro-batch.

    Every rank gets the same number of micro-batches of a part, a multiple of `multiple_of`
    (interleaved schedules need it); missing ones are empty lists. Samples are dealt to the ranks
    in order of length, which balances them.
    """
    lengths = batch.lengths
    part_of = _parts(batch, skip_zero_advantage)
    plan = {}
    for part in PARTS:
        mine = [
            i
            for i in range(batch.samples)
            if part_of[i] == part and int(batch.mini_batch[i]) == mini_batch
        ]
        mine.sort(key=lambda i: (-int(lengths[i]), i))
        ranks = [
            _cut(mine[r::data_parallel], lengths, max_tokens, packed) for r in range(data_parallel)
        ]
        count = max(map(len, ranks))
        count = -(-count // multiple_of) * multiple_of
        plan[part] = [r + [[] for _ in range(count - len(r))] for r in ranks]
    return plan


def _parts(batch: Batch, skip_zero_advantage: bool) -> list[str]:
    parts = []
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens[1:].tolist()):
        if skip_zero_advantage and not bool(batch.advantage[start:end].any()):
            parts.append("idle")
        else:
            parts.append("refinement" if bool(batch.is_refinement[start]) else "initial")
    return parts


def _cut(ids: list[int], lengths: torch.Tensor, max_tokens: int, packed: bool) -> list[list[int]]:
    """Greedy cut of length-sorted samples; padded cost is longest × count, packed cost the sum."""
    out: list[list[int]] = []
    cost = 0
    for i in ids:
        length = int(lengths[i])
        step = length if packed or not out else int(lengths[out[-1][0]])
        if out and cost + step <= max_tokens:
            out[-1].append(i)
            cost += step
        else:
            out.append([i])
            cost = length
    return out


def build_micro_batch(
    batch: Batch,
    part: str,
    samples: list[int],
    packed: bool,
    pad_to: int = 1,
    context: tuple[int, int] = (0, 1),
) -> MicroBatch:
    """Lay out the samples; an empty list gives a pass without any loss token.

    Args:
        pad_to: each rank's part of a pass is padded to a multiple of it (sequence parallelism).
        context: rank and size of context parallelism.
    """
    even = 2 * context[1] if context[1] > 1 else 1
    pad_to = even * pad_to
    spans = [(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in samples]
    # The last token of a sample is only ever a target.
    lengths = [end - start - 1 for start, end in spans] or [1]
    if packed:
        lengths = [-(-n // even) * even for n in lengths]
        total = -(-sum(lengths) // pad_to) * pad_to
        lengths[-1] += total - sum(lengths)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        shape, offset = (1, total), starts
    else:
        width = -(-max(lengths) // pad_to) * pad_to
        shape = (len(lengths), width)
        offset = [i * width for i in range(len(lengths))]
    ids = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    positions = torch.zeros_like(ids)
    rows, source = [], []
    if not samples:
        positions = torch.arange(shape[1])
    for at, (start, end), length in zip(offset, spans, lengths):
        ids[at : at + end - start - 1] = batch.tokens[start : end - 1]
        positions[at : at + length] = torch.arange(length)
        targets = torch.arange(start + 1, end)
        counted = batch.loss_mask[targets]
        rows.append(torch.arange(at, at + end - start - 1)[counted])
        source.append(targets[counted])
    rows = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    source = torch.cat(source) if source else torch.zeros(0, dtype=torch.int64)
    columns = LossColumns(
        old_logprob=torch.zeros(len(source)),
        engine_logprob=batch.engine_logprob[source],
        advantage=batch.advantage[source],
        weight=batch.weight[source],
        is_refinement=batch.is_refinement[source],
        loss_mask=batch.loss_mask[source],
    )
    bounds = None
    if packed:
        bounds = torch.tensor([*offset, shape[1]], dtype=torch.int32)
    whole = MicroBatch(
        part,
        ids.view(shape),
        positions.view(shape) if samples else positions.expand(shape),
        rows,
        batch.tokens[source],
        columns,
        bounds,
        max(lengths) if packed else shape[1],
    )
    return whole if context[1] == 1 else _part_of(whole, *context)


def _part_of(whole: MicroBatch, rank: int, size: int) -> MicroBatch:
    """What a context-parallel rank holds of a pass."""
    count, width = whole.input_ids.shape
    bounds = range(0, count * width + 1, width)
    if whole.cu_seqlens is not None:
        bounds = whole.cu_seqlens.tolist()
    held = held_positions(rank, size, bounds)
    place = torch.full((count * width,), -1)
    place[held] = torch.arange(len(held))
    rows = place[whole.rows]
    mine = rows >= 0
    return replace(
        whole,
        input_ids=whole.input_ids.reshape(-1)[held].view(count, -1),
        position_ids=whole.position_ids.reshape(-1)[held].view(count, -1),
        rows=rows[mine],
        targets=whole.targets[mine],
        columns=whole.columns.cut(mine),
    )
