"""Budgets, retries and the circuit breaker of a critic that is somewhere else."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_cgrpo.config.feedback import Critic as CriticOptions

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


@dataclass
class Usage:
    """What the critiques of a step took, and what went wrong."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    cached: int = 0
    over_budget: int = 0
    refused_by_breaker: int = 0
    no_label: int = 0
    not_fitting: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: list[float] = field(default_factory=list)


class Budget:
    """Requests, tokens and money that a step may still spend."""

    def __init__(self, options: CriticOptions) -> None:
        self._options = options
        self._in_flight = [0, 0]

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """In the currency of the prices."""
        return (tokens_in * self._options.price_in + tokens_out * self._options.price_out) / 1e6

    def allows(self, usage: Usage, prompt_tokens: int) -> bool:
        """Whether one more request may be sent, should it and those in flight take the most."""
        o = self._options
        most_in = usage.tokens_in + self._in_flight[0] + prompt_tokens
        most_out = usage.tokens_out + self._in_flight[1] + o.max_tokens
        limits = (
            (usage.requests + 1, o.max_requests_per_step),
            (most_in + most_out, o.max_tokens_per_step),
            (self.cost(most_in, most_out), o.max_cost_per_step),
        )
        return all(limit is None or value <= limit for value, limit in limits)

    @contextlib.contextmanager
    def holding(self, prompt_tokens: int) -> Iterator[None]:
        """While a request of this size is in flight."""
        held = (prompt_tokens, self._options.max_tokens)
        self._in_flight = [a + b for a, b in zip(self._in_flight, held)]
        try:
            yield
        finally:
            self._in_flight = [a - b for a, b in zip(self._in_flight, held)]


class Breaker:
    """Stops asking a critic that has failed several times in a row, for a while.

    After the pause one question goes through; its answer closes the breaker or opens it anew.
    """

    def __init__(self, failures: int, pause_s: float) -> None:
        self._limit, self._pause_s = failures, pause_s
        self._failed = 0
        self._closed_until = 0.0

    def allows(self) -> bool:
        """Whether to send a request now."""
        if self._failed < self._limit:
            return True
        if time.monotonic() < self._closed_until:
            return False
        # Whoever else asks while this one is on its way must not.
        self._closed_until = time.monotonic() + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failed = 0

    def failed(self) -> None:
        self._failed += 1
        if self._failed >= self._limit:
            self._closed_until = time.monotonic() + self._pause_s


def pause_before_retry(attempt: int, asked_for_s: float | None = None) -> float:
    """Seconds to wait before retry number `attempt` (from 0): doubling, jittered, and not less
    than the server asked for."""
    grown = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
    return min(LONGEST_PAUSE_S, max(grown, asked_for_s or 0.0))
