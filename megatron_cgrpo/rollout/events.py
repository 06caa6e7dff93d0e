"""What happens on a group's way through a step, summed by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from megatron_cgrpo.types import Group

# Names of the events. Those that are metrics by themselves are called like the metric.
INITIAL_TOKENS, REFINEMENT_TOKENS = "tokens/initial", "tokens/refinements"
UNJUDGED = "samples/unjudged"
SHORTENED = "samples/shortened_responses"
NOT_FITTING = "samples/refinements_not_fitting"
WITHOUT_CRITIQUE = "samples/without_critique"
RIGHT_WITH_ANSWER, ANSWER_COPIES = "samples/right_with_answer", "samples/answer_copies"
LABELS_FROM_RULE = "critic/labels_from_rule"
REFINED_GROUPS, REFINE_SECONDS = "groups/timed", "time/refine_s"
_LABELS = {True: "right", False: "wrong", None: "nothing"}


def agreement(said: bool | None, rule: bool | None) -> str:
    """The event of a critique that says this of a response of which the verifier says that."""
    return f"critic/says_{_LABELS[said]}_rule_says_{_LABELS[rule]}"


AGREEMENT = {(said, rule): agreement(said, rule) for said in _LABELS for rule in _LABELS}


class Emit(Protocol):
    def __call__(self, name: str, amount: float = 1) -> None:
        """Something happened, once or `amount` times."""


class Collector:
    """Sums events; each group has one, so that its events stay with it however long it waits."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def __call__(self, name: str, amount: float = 1) -> None:
        self.sums[name] += amount


def events_of(groups: Iterable[Group]) -> Mapping[str, float]:
    """The events of all these groups; 0 for what did not happen."""
    total: Counter[str] = Counter()
    for group in groups:
        total.update(group.events)
    return total
