"""Options of the training loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_cgrpo.config.base import Natural, Positive, Section, Share


class Guards(Section):
    """Signs of the collapse that training on refinements can bring. Over a limit a step warns;
    `patience` steps over it in a row stop the run with a checkpoint."""

    context_shift_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Limit of `policy/context_shift_kl`: mean of log π(y'|q,y,c) − log π(y'|q) on refinements."""
    entropy: Annotated[float, Field(gt=0.0)] | None = None
    """Ceiling of `policy/entropy`, nats per token."""
    refinement_share: Share | None = None
    """Limit of `gradient/refinement_share`: gradient norm of the refinements by that of all."""
    patience: Positive = 3
    """Steps in a row over a limit before the run stops."""


class Training(Section):
    steps: Positive = 100
    """Rollout steps."""
    problems_per_step: Positive = 128
    """Problems sampled per rollout step."""
    mini_batch_problems: Positive | None = None
    """Problems per optimizer step; default: all of a step."""
    micro_batch_tokens: Positive = 16384
    """Most tokens (padding included) in one forward pass of one rank."""
    packing: Literal["auto", "packed", "padded"] = "auto"
    """packed: sequences joined without padding; auto: packed on CUDA, padded on the CPU."""
    measure_refinement_gradient: bool = True
    """Also report the gradient norm that comes from refinements (a second gradient buffer)."""
    skip_zero_advantage: bool = True
    """Samples without a learning signal are scored but take no part in the backward pass."""
    max_skipped_updates: Positive = 3
    """Updates with a NaN or infinite gradient are skipped; the run stops after this many in a
    row."""
    resume: str = "auto"
    """auto: continue the run directory's last complete checkpoint where there is one; never; or the
    path of a checkpoint (`…/state/step_000010`) of any run."""
    checkpoint_every: Natural = 0
    """Steps between training checkpoints (weights, optimizer, schedule, data position); the last
    step always writes one. 0: only the last."""
    keep_checkpoints: Positive = 2
    """Newest training checkpoints that stay, beside the one with the best validation score."""
    background_checkpoints: bool = False
    """Write training checkpoints in forked processes while training goes on (megatron-core's async
    save); one is complete, and named by `latest`, some steps later."""
    save_every: Natural = 0
    """Steps between exports of the policy as a Hugging Face directory; the last is always
    written."""
    guards: Guards = Guards()
    log_samples: Natural = 2
    """Problems a step whose whole lineage goes to samples.jsonl."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 7200.0
    """How long ranks wait for each other (rollouts happen in between)."""

    @model_validator(mode="after")
    def _divides(self) -> Training:
        mini = self.mini_batch_problems
        if mini is not None and self.problems_per_step % mini:
            raise ValueError(
                f"training.problems_per_step={self.problems_per_step} is not a multiple of "
                f"training.mini_batch_problems={mini}"
            )
        return self

    @property
    def mini_batches(self) -> int:
        return self.problems_per_step // (self.mini_batch_problems or self.problems_per_step)
