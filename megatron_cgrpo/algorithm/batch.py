"""From groups to the packed token columns that the trainer sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.types import Group


@dataclass(frozen=True)
class Batch:
    """Samples of whole groups joined without padding, T tokens and N samples in all.

    Column entry t speaks of token t as a *target*: the token predicted at position t − 1 of its
    sample. Prompt tokens have loss_mask False.

    tokens [T] int64; loss_mask [T] bool; advantage, weight, engine_logprob [T] float32;
    is_refinement [T] bool; cu_seqlens [N + 1] int64, start of each sample and the end;
    mini_batch [N] int64, the optimizer step of this batch that a sample belongs to.

    `weight` holds every normaliser of the objective (global over the mini-batch), so that the
    loss is a plain sum: however the batch is cut, the gradient is the same.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    is_refinement: torch.Tensor
    engine_logprob: torch.Tensor
    cu_seqlens: torch.Tensor
    mini_batch: torch.Tensor

    @property
    def samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> torch.Tensor:
        return self.cu_seqlens.diff()


def build_batch(
    groups: Sequence[Group], options: Algorithm, mini_batches: int, max_response_tokens: int
) -> Batch:
    """Pack `groups` (with advantages) into `mini_batches` equal parts in their order.

    The weight of a token of mini-batch B with G groups (J = J_init + J_refi, docs/algorithm.md):
    initial 1/(G n_g) · w, refinement 1/(G k_g) · w, where w = 1/max_response_tokens (`none`) or
    1/|y| (`sequence`); with `token` every loss token of B weighs 1/(number of them).

    Args:
        groups: judged groups, `advantages` set; prompts already rebased to the problem's own.
        mini_batches: number of optimizer steps; must divide the number of groups.

    Raises:
        ValueError: when the groups do not divide, one has no advantages, or there is no sample.
    """
    if len(groups) % mini_batches:
        raise ValueError(f"{len(groups)} groups do not divide into {mini_batches} mini-batches")
    size = len(groups) // mini_batches
    rows: list[dict[str, torch.Tensor]] = []
    index: list[int] = []
    for m in range(mini_batches):
        part = groups[m * size : (m + 1) * size]
        total = sum(len(s.completion.token_ids) for g in part for s in g.members)
        for group in part:
            if len(group.advantages) != len(group.members):
                raise ValueError(f"group of problem {group.problem.id!r} has no advantages")
            for sample, advantage in zip(group.members, group.advantages):
                n = len(group.initial if sample.role == "initial" else group.refinements)
                length = len(sample.completion.token_ids)
                weight = {
                    "none": 1.0 / (size * n * max_response_tokens),
                    "sequence": 1.0 / (size * n * max(length, 1)),
                    "token": 1.0 / max(total, 1),
                }[options.length_norm]
                rows.append(_columns(sample, advantage, weight))
                index.append(m)
    if not rows:
        raise ValueError("no response of this step could be judged: check the verifier")
    return _join(rows, index)


def supervised_batch(examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    """One mini-batch of (prompt ids, response ids) pairs whose loss is the mean token NLL.

    Raises:
        ValueError: without any response token.
    """
    total = sum(len(response) for _, response in examples)
    if total == 0:
        raise ValueError("supervised examples without a response token")
    rows = []
    for prompt, response in examples:
        length, start = len(prompt) + len(response), len(prompt)
        mask = torch.arange(length) >= start
        rows.append(
            {
                "tokens": torch.tensor([*prompt, *response]),
                "loss_mask": mask,
                "advantage": mask.float(),
                "weight": mask / total,
                "is_refinement": torch.zeros(length, dtype=torch.bool),
                "engine_logprob": torch.zeros(length),
            }
        )
    return _join(rows, [0] * len(rows))


def _columns(sample, advantage: float, weight: float) -> dict[str, torch.Tensor]:
    c = sample.completion
    prompt, length = len(c.prompt_ids), len(c.prompt_ids) + len(c.token_ids)
    mask = torch.arange(length) >= prompt
    engine = torch.zeros(length)
    engine[prompt:] = torch.tensor(c.logprobs)
    return {
        "tokens": torch.tensor(c.prompt_ids + c.token_ids),
        "loss_mask": mask,
        "advantage": mask * advantage,
        "weight": mask * weight,
        "is_refinement": torch.full((length,), sample.role == "refinement"),
        "engine_logprob": engine,
    }


def _join(rows: list[dict[str, torch.Tensor]], index: list[int]) -> Batch:
    lengths = torch.tensor([0] + [len(r["tokens"]) for r in rows])
    columns = {k: torch.cat([r[k] for r in rows]) for k in rows[0]}
    return Batch(
        cu_seqlens=lengths.cumsum(0), mini_batch=torch.tensor(index, dtype=torch.int64), **columns
    )
