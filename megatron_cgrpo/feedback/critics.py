"""Rule-based critics: what is said about a response that was judged (paper, section 3)."""

from __future__ import annotations

from typing import Protocol

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.types import Critique, Problem, Sample


class Critic(Protocol):
    async def __call__(self, problem: Problem, sample: Sample) -> Critique: ...


class IndicativeCritic:
    """Says whether the response is right; with `ground_truth` also what the answer is.

    Works for every kind of problem.
    """

    def __init__(self, ground_truth: bool) -> None:
        self._ground_truth = ground_truth

    async def __call__(self, problem: Problem, sample: Sample) -> Critique:
        right = bool(sample.verdict.correct)
        text = "The attempt is correct." if right else "The attempt is wrong."
        if self._ground_truth:
            text += f" The correct final answer is {problem.answer}."
        kind = "indicative_gt" if self._ground_truth else "indicative"
        return Critique(kind, text, says_correct=right)


class ChainCritic:
    """The chain world's own critic, which speaks its small language."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def __call__(self, problem: Problem, sample: Sample) -> Critique:
        from megatron_cgrpo.worlds.chain import critique_chain

        text = critique_chain(problem, sample.completion.text, self._kind)
        return Critique(self._kind, text, bool(sample.verdict.correct), critic="chain")


def make_critic(kind: str, problem_kinds: set[str]) -> Critic | None:
    """The critic of a run; None for critique `none`.

    Raises:
        ConfigError: for a critique that no critic here can write about these problems.
    """
    if kind == "none":
        return None
    if problem_kinds == {"chain"}:
        return ChainCritic(kind)
    if kind == "cot":
        raise ConfigError(
            "algorithm.critique=cot needs a step-by-step critic, which only problems of kind chain "
            f"have; these are {sorted(problem_kinds)}: use indicative or indicative_gt"
        )
    return IndicativeCritic(ground_truth=kind == "indicative_gt")
