"""Options of the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_cgrpo.config.base import Positive, Section, Share
from megatron_cgrpo.config.presets import with_preset


class BelowTrigger(Section):
    below: Share
    """Fires when the share of right initial responses is below this."""


class Algorithm(Section):
    method: Literal["grpo", "dr_grpo", "critique_grpo", "resample"] = "critique_grpo"
    """Preset that fills the keys below which are not set here."""
    responses: Annotated[int, Field(ge=2)] = 8
    """n, initial responses a problem."""
    refinements: Positive = 4
    """k < n, refinements kept when the trigger fired."""
    trigger: Literal["all_failed", "always", "never"] | BelowTrigger = "all_failed"
    """When a group is critiqued: no initial response right, share of right ones below x
    (`{below: x}`), always, or never."""
    critique: Literal["none", "indicative", "indicative_gt", "cot", "self", "execution", "step"] = (
        "indicative"
    )
    """Who says what: right or wrong; that and the answer; a step-by-step assessment by
    `feedback.critic` (`cot`) or by the policy itself (`self`); what running the program gave
    (`execution`); the first wrong step, by the chain world's checker (`step`). `none`: the second
    attempt is sampled from the problem's own prompt."""
    reward: Literal["rule", "critic"] = "rule"
    """rule: rewards are the verifier's verdicts; critic: the labels of the critiques (`cot`,
    `self`), of refinements too."""
    no_label: Literal["invalid", "rule"] = "invalid"
    """reward=critic, and a critique without a clear conclusion: the sample is left out and
    counted, or takes the verifier's verdict."""
    drop_truncated_refinements: bool = True
    """Refinements cut by the token limit are not kept."""
    drop_answer_copies: bool = False
    """Right refinements that state the answer without a derivation are not kept."""
    answer_copy_share: Share = 0.2
    """A right refinement with fewer words before its answer than this share of the attempt's is
    counted as a copied answer."""
    gamma: Annotated[float, Field(gt=0.0)] = 0.1
    """γ of the shaped ratio ρ = π/(π+γ) on refinement tokens."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """ε_low: ratios are clipped from below at 1 − ε_low."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """ε_high: ratios are clipped from above at 1 + ε_high."""
    clip_refinements: bool = True
    """Apply the clip of eq. 4 to ρ; it only ever zeroes gradients of negative advantages."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound c of dual-clip PPO for negative advantages: max(min(…), c·Â)."""
    normalize_std: bool = False
    """Divide advantages by the standard deviation of the group's rewards (GRPO)."""
    length_norm: Literal["none", "sequence", "token"] = "none"
    """Weight of a token: 1/longest response allowed; 1/its response's length; 1/all tokens."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the k3 estimate of KL(policy ‖ initial policy)."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy bonus."""
    importance_cap: Annotated[float, Field(ge=1.0)] | None = None
    """Truncated importance weights min(π_old/π_engine, cap) on initial tokens."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        return with_preset(raw) if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _consistent(self) -> Algorithm:
        if self.refines and self.refinements >= self.responses:
            raise ValueError(
                f"algorithm.refinements (k={self.refinements}) must be smaller than "
                f"algorithm.responses (n={self.responses})"
            )
        if self.method in ("grpo", "dr_grpo") and self.refines:
            raise ValueError(
                f"algorithm.method={self.method} has no refinements; set trigger=never or "
                "method=critique_grpo"
            )
        if self.method == "critique_grpo" and self.refines and self.critique == "none":
            raise ValueError("critique_grpo without a critique is method=resample")
        if self.method == "resample" and self.critique != "none":
            raise ValueError("algorithm.method=resample takes critique=none")
        if self.reward == "critic" and self.critique not in ("cot", "self"):
            raise ValueError(
                f"algorithm.reward=critic needs critiques with a label: critique=cot or self, not "
                f"{self.critique}"
            )
        if self.reward == "critic" and not self.refines:
            raise ValueError("algorithm.reward=critic needs a critic: set a trigger")
        return self

    @property
    def refines(self) -> bool:
        return self.trigger != "never"
