"""Critics: what is said about a response that was judged (paper, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.types import Critique, Problem, Sample
from megatron_cgrpo.worlds import WORLDS, World

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


class WorldCritic(Critic):
    """The step checker of a world, which speaks the world's language.

    Args:
        kind: of the critique, one of the world's.
        name: of the world.
    """

    def __init__(self, kind: str, name: str, world: World) -> None:
        self._kind, self._name, self._world = kind, name, world

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique:
        world, response = self._world, sample.completion.text
        right = bool(sample.verdict.correct)
        text = world.critique(problem, response, self._kind)
        # A disturbed verdict is spoken of as if it were true.
        if right != (text == world.says(True)):
            text = world.says(right)
        shows = self._kind != "indicative"
        return Critique(self._kind, text, right, self._name, shows_answer=shows)


def check_critique(kind: str, problem_kinds: set[str]) -> None:
    """Refuse a critique that nobody can write about these problems.

    Raises:
        ConfigError: naming the critique and the kinds of problems.
    """
    step_checked = {name for name, world in WORLDS.items() if "step" in world.critiques}
    able = {"execution": {"code"}, "step": step_checked}.get(kind, problem_kinds)
    # Worlds have languages of their own: their problems do not mix with others.
    if not problem_kinds <= able or (kind == "step" and len(problem_kinds) > 1):
        raise ConfigError(
            f"algorithm.critique={kind} is for problems of kind {', '.join(sorted(able))}; these "
            f"are {sorted(problem_kinds)}"
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
    name = next(iter(problem_kinds)) if len(problem_kinds) == 1 else ""
    if name in WORLDS:
        return WorldCritic(kind, name, WORLDS[name])
    return IndicativeCritic(ground_truth=kind == "indicative_gt")
