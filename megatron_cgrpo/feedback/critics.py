"""Critics: what is said about a response that was judged (paper, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.types import Critique, Problem, Sample

MODEL_CRITIQUES = ("cot", "self")
"""Critiques that a language model writes, with a judgement of its own."""


class Critic:
    """Writes a critique of one response."""

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique | None:
        """A critique, or None when none can be had: the response is then not refined.

        Args:
            siblings: all responses of the group, `sample` among them.
        """
        raise NotImplementedError

    def begin_step(self) -> None:
        """A new step: its budgets and counts start at zero."""

    def metrics(self) -> dict[str, float]:
        """Counts of the step."""
        return {}

    async def close(self) -> None:
        """Leave connections and files."""


class IndicativeCritic(Critic):
    """Says whether the response is right; with `ground_truth` also what the answer is.

    Works for every kind of problem.
    """

    def __init__(self, ground_truth: bool) -> None:
        self._shows_answer = ground_truth

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique:
        right = bool(sample.verdict.correct)
        text = "The attempt is correct." if right else "The attempt is wrong."
        if self._shows_answer:
            text += f" The correct final answer is {problem.answer}."
        kind = "indicative_gt" if self._shows_answer else "indicative"
        return Critique(kind, text, right, shows_answer=self._shows_answer)


class ExecutionCritic(Critic):
    """What running the program gave: the verifier's reason is the compiler's or the test's."""

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique:
        right = bool(sample.verdict.correct)
        text = "The program passes all tests."
        if not right:
            text = f"The program is wrong. Running it gave: {sample.verdict.reason}"
        return Critique("execution", text, says_correct=right, critic="execution")


class ChainCritic(Critic):
    """The chain world's own critic, which speaks its small language."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique:
        from megatron_cgrpo.worlds.chain import critique_chain

        # A disturbed verdict is spoken of as if it were true.
        text = critique_chain(problem, sample.completion.text, self._kind)
        right = bool(sample.verdict.correct)
        if right != (text == "right"):
            text = "right" if right else "wrong"
        return Critique(self._kind, text, right, "chain", shows_answer=self._kind != "indicative")


def check_critique(kind: str, problem_kinds: set[str]) -> None:
    """Refuse a critique that nobody can write about these problems.

    Raises:
        ConfigError: naming the critique and the kinds of problems.
    """
    needed = {"execution": {"code"}, "step": {"chain"}}.get(kind)
    if needed is not None and problem_kinds != needed:
        raise ConfigError(
            f"algorithm.critique={kind} is for problems of kind {', '.join(needed)}; these are "
            f"{sorted(problem_kinds)}"
        )


def rule_critic(kind: str, problem_kinds: set[str]) -> Critic | None:
    """The critic of a critique that no model writes; None for `none`.

    Raises:
        ConfigError: for a critique that no rule here can write about these problems.
    """
    check_critique(kind, problem_kinds)
    if kind == "none":
        return None
    if kind == "execution":
        return ExecutionCritic()
    if problem_kinds == {"chain"}:
        return ChainCritic(kind)
    return IndicativeCritic(ground_truth=kind == "indicative_gt")
