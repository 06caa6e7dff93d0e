"""The actor: scores and trains on batches. It knows nothing of problems or critiques."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_cgrpo.algorithm.batch import Batch
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.kernels.linear_logprob import linear_logprob, linear_logprob_loss
from megatron_cgrpo.kernels.policy_loss import SUMS, LossColumns, policy_loss
from megatron_cgrpo.kernels.token_logprob import token_logprob
from megatron_cgrpo.policy import cpu
from megatron_cgrpo.policy.micro_batches import PARTS, MicroBatch, build_micro_batch, plan_parts
from megatron_cgrpo.policy.model import build_model
from megatron_cgrpo.policy.optimizer import GradientStash, build_optimizer, wrap_model
from megatron_cgrpo.policy.parallel import device
from megatron_cgrpo.policy.results import ScoreResult, UpdateResult
from megatron_cgrpo.policy.weights import load_distributed, load_weights

SCORE_SUMS = (
    "tokens",
    "initial_tokens",
    "refinement_tokens",
    "entropy",
    "engine_gap",
    "context_shift_kl",
)


class NonFiniteGradient(RuntimeError):
    """Too many updates in a row had a NaN or infinite gradient."""


class MegatronActor:
    """Policy weights of this rank with their optimizer. Every method is collective."""

    def __init__(self, config: Config, shape: ModelShape, checkpoint: HFCheckpoint) -> None:
        self.config, self.shape = config, shape
        self.model = build_model(shape, config)
        if config.model.weights is None:
            load_weights(self.model, checkpoint)
        else:
            load_distributed(self.model, Path(config.model.weights), Path(config.model.path))
        self.chunks = wrap_model(self.model, config)
        self.optimizer, self.scheduler = build_optimizer(self.chunks, config)
        packing = config.training.packing
        self.packed = packing == "packed" or (packing == "auto" and torch.cuda.is_available())
        self.updates = self.skipped_in_a_row = 0
        self._reference = (
            [p.detach().clone() for p in self._parameters()] if config.algorithm.kl_coef else None
        )

    # ------------------------------------------------------------------ batches

    def prepare(self, batch: Batch, mini_batches: int) -> list[list[MicroBatch]]:
        """This rank's micro-batches of each mini-batch, on its device."""
        t, p = self.config.training, self.config.parallel
        dp, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        skip = t.skip_zero_advantage and not self._needs_all_tokens()
        out = []
        for m in range(mini_batches):
            plan = plan_parts(
                batch,
                m,
                dp,
                t.micro_batch_tokens * p.context,
                self.packed,
                p.pipeline if p.virtual_pipeline else 1,
                skip,
            )
            out.append(
                [
                    _to(
                        build_micro_batch(
                            batch,
                            part,
                            samples,
                            self.packed,
                            p.tensor if p.sequence_parallel else 1,
                            (ps.get_context_parallel_rank(), p.context),
                        )
                    )
                    for part in PARTS
                    for samples in plan[part][rank]
                ]
            )
        return out

    def _needs_all_tokens(self) -> bool:
        a = self.config.algorithm
        return a.kl_coef > 0 or a.entropy_coef > 0

    # ------------------------------------------------------------------ scoring

    @torch.no_grad()
    def score(self, mini_batches: list[list[MicroBatch]]) -> ScoreResult:
        """Fill in old log-probs (and reference log-probs with kl_coef > 0) of all micro-batches.

        Returns sums over the whole batch, equal on every rank.
        """
        flat = [mb for part in mini_batches for mb in part]
        if self._reference is not None:
            self._swap_reference()
            self._forward(flat, lambda mb, logp, _: _fill(mb, reference_logprob=logp))
            self._swap_reference()
        sums = torch.zeros(len(SCORE_SUMS), dtype=torch.float64, device=device())
        worst = torch.zeros((), dtype=torch.float64, device=device())

        def keep(mb: MicroBatch, logprob: torch.Tensor, entropy: torch.Tensor) -> None:
            nonlocal worst
            _fill(mb, old_logprob=logprob)
            refined = mb.columns.is_refinement
            gap = mb.columns.engine_logprob - logprob
            initial_gap = torch.where(refined, 0.0, gap.abs())
            stats = [
                torch.ones_like(gap),
                ~refined,
                refined,
                entropy,
                initial_gap,
                torch.where(refined, gap, 0.0),
            ]
            sums.add_(torch.stack([s.double().sum() for s in stats]))
            if len(gap):
                worst = torch.maximum(worst, initial_gap.max().double())

        self._forward(flat, keep)
        sums, worst = self._reduce(sums, worst)
        return ScoreResult(dict(zip(SCORE_SUMS, sums.tolist())), worst.item())

    def _forward(self, micro_batches: list[MicroBatch], keep: Callable) -> None:
        def loss(mb: MicroBatch, out: torch.Tensor):
            keep(mb, *self._logprobs(mb, out))
            return out.new_zeros(()), {}

        self._run(micro_batches, loss, forward_only=True)

    # ----------------------------------------------------------------- training

    def train(self, micro_batches: list[MicroBatch]) -> UpdateResult:
        """One optimizer step on a scored mini-batch.

        A NaN or infinite gradient skips the update.

        Raises:
            NonFiniteGradient: after `training.max_skipped_updates` skipped in a row.
        """
        self._zero_grad()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device())
        worst = torch.zeros((), dtype=torch.float64, device=device())

        def loss(
            columns: LossColumns, logprob: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            nonlocal worst
            value, parts, largest = policy_loss(logprob, entropy, columns, self.config.algorithm)
            sums.add_(parts)
            worst = torch.maximum(worst, largest.detach().double())
            return value

        refined = [mb for mb in micro_batches if mb.part == "refinement"]
        others = [mb for mb in micro_batches if mb.part == "initial"]
        refinement_norm = None
        if refined and self.config.training.measure_refinement_gradient:
            self._backward(refined, loss)
            refinement_norm = self._grad_norm()
            if others:
                stash = GradientStash(self.chunks)
                self._zero_grad()
                self._backward(others, loss)
                stash.add_back()
        elif refined or others:
            self._backward(refined + others, loss)
        else:
            # Nothing to learn from: no update, so that the optimizer's moments stay as they are.
            self.scheduler.step(1)
            return UpdateResult(dict.fromkeys(SUMS, 0.0), 0.0, 0.0, None, self._lr(), False)
        grad_norm, applied = self._step()
        sums, worst = self._reduce(sums, worst)
        return UpdateResult(
            dict(zip(SUMS, sums.tolist())),
            worst.item(),
            grad_norm,
            refinement_norm,
            self._lr(),
            applied,
        )

    def train_supervised(self, micro_batches: list[MicroBatch]) -> tuple[float, float]:
        """One optimizer step on −Σ weight · log π; returns (loss, gradient norm)."""
        self._zero_grad()
        total = torch.zeros(1, dtype=torch.float64, device=device())

        def loss(
            columns: LossColumns, logprob: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            value = -(columns.weight * logprob).sum()
            total.add_(value.detach().double())
            return value

        self._backward(micro_batches, loss)
        grad_norm, _ = self._step()
        total, _ = self._reduce(total, total.new_zeros(()))
        return total.item(), grad_norm

    def _backward(self, micro_batches: list[MicroBatch], loss: Callable) -> None:
        # The schedule divides by the number of micro-batches and DDP by the data-parallel size;
        # the weights hold the whole normaliser, so both are undone here. (DDP also divides by the
        # context-parallel size, and the schedule multiplies with it.)
        scale = len(micro_batches) * ps.get_data_parallel_world_size()

        def scaled(mb: MicroBatch, out: torch.Tensor):
            value = self._token_loss(mb, out, loss) if len(mb.rows) else out.sum() * 0.0
            return value * scale, {}

        self._run(micro_batches, scaled, forward_only=False)

    def _step(self) -> tuple[float, bool]:
        self.scheduler.step(1)
        with cpu.cuda_names():
            norm = self._grad_norm()
            if not math.isfinite(norm):
                self.skipped_in_a_row += 1
                if self.skipped_in_a_row >= self.config.training.max_skipped_updates:
                    raise NonFiniteGradient(
                        f"the gradient was {norm} in {self.skipped_in_a_row} updates in a row; the "
                        "weights are those before the first of them"
                    )
                return norm, False
            self.optimizer.step()
        self.skipped_in_a_row = 0
        self.updates += 1
        return norm, True

    def _grad_norm(self) -> float:
        with cpu.cuda_names():
            self.optimizer.prepare_grads()
            return float(self.optimizer.get_grad_norm())

    def _zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # ------------------------------------------------------------------ plumbing

    def _logprobs(self, mb: MicroBatch, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of the micro-batch's loss tokens.

        `out` is what the last stage returns: [b, s, H] (output layer fused with the loss) or
        [b, s, V/TP] logits.
        """
        rows = out.flatten(0, 1)[mb.rows]
        if self.config.model.output_layer == "fused":
            return linear_logprob(rows, self._output_weight(), mb.targets, **self._vocabulary())
        # The selected rows are a copy of ours: their gradient may overwrite them.
        return token_logprob(rows, mb.targets, in_place=True, **self._vocabulary())

    def _token_loss(self, mb: MicroBatch, out: torch.Tensor, loss: Callable) -> torch.Tensor:
        """Σ loss over the micro-batch's tokens; `loss` is called with columns, log-probs and
        entropies of all of them, or of one chunk after the other."""
        if self.config.model.output_layer == "logits":
            return loss(mb.columns, *self._logprobs(mb, out))
        return linear_logprob_loss(
            out.flatten(0, 1)[mb.rows],
            self._output_weight(),
            mb.targets,
            lambda logprob, entropy, rows: loss(mb.columns.cut(rows), logprob, entropy),
            **self._vocabulary(),
        )

    def _output_weight(self) -> torch.Tensor:
        return self.model.chunks[-1].output_layer.loss_weight

    def _vocabulary(self) -> dict:
        return {
            "temperature": self.config.rollout.temperature,
            "vocab_size": self.shape.vocab,
            "group": ps.get_tensor_model_parallel_group(),
        }

    def _run(self, micro_batches: list[MicroBatch], loss: Callable, forward_only: bool) -> None:
        """Megatron's schedule over the micro-batches; `loss` runs on the last stage."""
        if not micro_batches:
            return
        kwargs = {"fp32_output": False} if self.model.config.bf16 else {}

        def forward_step(data: Iterator[MicroBatch], chunk: torch.nn.Module):
            mb = next(data)
            out = chunk(
                mb.input_ids,
                mb.position_ids,
                None,
                packed_seq_params=_packed_params(mb),
                **kwargs,
            )
            return out, lambda last: loss(mb, last)

        several = len(self.chunks) > 1
        iterators = [iter(micro_batches) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].input_ids.size(1),
            micro_batch_size=micro_batches[0].input_ids.size(0),
            forward_only=forward_only,
        )

    def _reduce(self, sums: torch.Tensor, worst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Totals over the last stages of all data- and context-parallel ranks, on every rank."""
        counts = ps.is_pipeline_last_stage(ignore_virtual=True) and (
            ps.get_tensor_model_parallel_rank() == 0
        )
        sums = sums if counts else torch.zeros_like(sums)
        dist.all_reduce(sums)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return sums, worst

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self.model.chunks for p in chunk.parameters()]

    @torch.no_grad()
    def _swap_reference(self) -> None:
        """Exchange the weights with those of the reference (initial) policy."""
        for parameter, kept in zip(self._parameters(), self._reference):
            current = parameter.detach().clone()
            parameter.copy_(kept)
            kept.copy_(current)


def _packed_params(mb: MicroBatch) -> PackedSeqParams | None:
    if mb.cu_seqlens is None:
        return None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=mb.cu_seqlens,
        cu_seqlens_kv=mb.cu_seqlens,
        max_seqlen_q=mb.longest,
        max_seqlen_kv=mb.longest,
    )


def _fill(mb: MicroBatch, **columns: torch.Tensor) -> None:
    mb.columns = replace(mb.columns, **{k: v.detach() for k, v in columns.items()})


def _to(mb: MicroBatch) -> MicroBatch:
    where = device()
    columns = {
        f.name: value.to(where)
        for f in fields(mb.columns)
        if (value := getattr(mb.columns, f.name)) is not None
    }
    return replace(
        mb,
        input_ids=mb.input_ids.to(where),
        position_ids=mb.position_ids.to(where),
        rows=mb.rows.to(where),
        targets=mb.targets.to(where),
        columns=replace(mb.columns, **columns),
        cu_seqlens=None if mb.cu_seqlens is None else mb.cu_seqlens.to(where),
    )
