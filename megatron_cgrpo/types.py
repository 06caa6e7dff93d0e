"""The data types that cross packages. All are immutable; none imports torch, Megatron or vLLM.

A *group* is everything sampled for one problem in one step: n initial responses and, where the
critique trigger fired, the k refinements that were kept. Members of a group share one baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["initial", "refinement"]


@dataclass(frozen=True)
class Problem:
    """One task. `kind` picks the verifier; `messages` are chat messages (role, content)."""

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    kind: str = "math"
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return next(m["content"] for m in reversed(self.messages) if m["role"] == "user")


@dataclass(frozen=True)
class Completion:
    """Exactly what the engine sampled.

    `logprobs[i]` is the log-probability (natural log) of `token_ids[i]` under the distribution it
    was sampled from: log_softmax(logits / temperature). `finish_reason` is "stop" or "length";
    with "length" the sequence was cut and carries no end-of-sequence token.
    `weight_versions` are the versions of the policy weights that produced it, oldest first.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    weight_versions: tuple[int, ...]

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Verdict:
    """`correct is None` means "could not be judged": such a sample is never trained on."""

    correct: bool | None
    extracted: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Critique:
    """Natural-language feedback on one response.

    `says_correct` is the label that it ends in (None: no clear one); `shows_answer` tells whether
    it may carry the gold answer. A model's critique took
    `tokens_in` prompt tokens, `tokens_out` of its own, and `seconds` in all.
    """

    kind: str
    text: str
    says_correct: bool | None = None
    critic: str = "rule"
    shows_answer: bool = False
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One member of a group. `parent` is the index of the initial response that it refines.

    `critique` is what a refinement was given; of an initial response, what was said about it, where
    rewards are the critic's.
    """

    problem_id: str
    role: Role
    completion: Completion
    verdict: Verdict
    critique: Critique | None = None
    parent: int | None = None

    @property
    def reward(self) -> float:
        """1.0 for a right response, 0.0 for a wrong one.

        Raises:
            ValueError: if the response could not be judged.
        """
        if self.verdict.correct is None:
            raise ValueError(f"a sample of problem {self.problem_id!r} has no verdict")
        return float(self.verdict.correct)

    def rebase(self, prompt_ids: tuple[int, ...]) -> Sample:
        """The same sampled token ids behind another prompt (the problem's own, for training)."""
        return replace(self, completion=replace(self.completion, prompt_ids=prompt_ids))


@dataclass(frozen=True)
class Group:
    """A problem with its judged samples.

    `prompt_ids` is the problem's own prompt: what every member is trained on. `advantages` has
    one value per member in the order initial, refinements (empty until they are computed).
    `attempted` is the number of refinements sampled before k were kept, `rescued` whether a
    kept one was right, `dropped` the number of samples that could not be judged. `events` counts
    what happened on the way, by name (rollout/events.py).
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    initial: tuple[Sample, ...]
    refinements: tuple[Sample, ...] = ()
    advantages: tuple[float, ...] = ()
    attempted: int = 0
    rescued: bool = False
    dropped: int = 0
    events: Mapping[str, float] = field(default_factory=dict)

    @property
    def members(self) -> tuple[Sample, ...]:
        return self.initial + self.refinements
