"""Critiques written by a language model: step-by-step, with a conclusion that is parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_cgrpo.config.feedback import Critic as CriticOptions
from megatron_cgrpo.config.templates import fill, read_template
from megatron_cgrpo.feedback.critics import Critic, IndicativeCritic
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.labels import END, conclusion
from megatron_cgrpo.feedback.weather import Breaker, Budget, Usage, pause_before_retry
from megatron_cgrpo.feedback.writers import Reply, Writer, WriterError
from megatron_cgrpo.types import Critique, Problem, Sample


class ModelCritic(Critic):
    """Asks a model for a critique, within budgets and whatever the weather.

    An outage never raises: a critique that cannot be had is that of `options.fallback`, or None.

    Args:
        kind: "cot" or "self".
        template: text with {question} and {response}; {answer} shows the gold answer.
        cache: None keeps nothing.
        say: told once per step about outages and spent budgets.
    """

    labels = True

    def __init__(
        self,
        kind: str,
        writer: Writer,
        options: CriticOptions,
        template: str,
        cache: CritiqueCache | None,
        say: Callable[[str], None],
    ) -> None:
        self._kind, self._writer, self._options = kind, writer, options
        self._template, self._cache, self._say = template, cache, say
        self.shows_answer = "{answer}" in template
        self._budget = Budget(options)
        self._breaker = Breaker(options.breaker_failures, options.breaker_pause_s)
        self._fallback = None
        if options.fallback != "skip":
            self._fallback = IndicativeCritic(options.fallback == "indicative_gt")
        self.begin_step()

    def begin_step(self) -> None:
        self.usage, self._said = Usage(), False

    async def __call__(
        self, problem: Problem, sample: Sample, siblings: Sequence[Sample] = ()
    ) -> Critique | None:
        text = fill(
            self._template,
            question=problem.question,
            response=sample.completion.text,
            answer=problem.answer,
        )
        start = time.monotonic()
        reply = await self._reply([{"role": "user", "content": text}])
        if reply is None:
            return await self._fallback(problem, sample) if self._fallback else None
        label = conclusion(reply.text, reply.truncated)
        self.usage.no_label += label is None
        return Critique(
            self._kind,
            reply.text.replace(END, "").strip(),
            label,
            critic=str(self._writer.identity()[-1]) if self._kind == "cot" else "policy",
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
            seconds=time.monotonic() - start,
        )

    async def _reply(self, messages: list[dict[str, str]]) -> Reply | None:
        o = self._options
        key = CritiqueCache.key(self._writer.identity(), messages, o.temperature, o.max_tokens)
        reply = self._cache.get(key) if self._cache else None
        if reply is not None:
            self.usage.cached += 1
            return reply
        start = time.monotonic()
        reply = await self._ask(messages, int(key[:7], 16))
        if reply is not None:
            self.usage.seconds.append(time.monotonic() - start)
            if self._cache:
                self._cache.put(key, reply)
        return reply

    async def _ask(self, messages: list[dict[str, str]], seed: int) -> Reply | None:
        """Send, and send again; None when it is of no use."""
        usage, attempt = self.usage, 0
        while True:
            if self._budget.spent(usage):
                usage.over_budget += 1
                self._say_once("the critic's budget of this step is spent")
                return None
            if not self._breaker.allows():
                usage.refused_by_breaker += 1
                return None
            usage.requests += 1
            try:
                reply = await self._writer.write(messages, seed)
            except WriterError as e:
                if e.retry and attempt < self._options.retries:
                    usage.retries += 1
                    await asyncio.sleep(pause_before_retry(attempt, e.after_s))
                    attempt += 1
                    continue
                usage.failures += 1
                if not e.of_prompt:
                    self._breaker.failed()
                self._say_once(f"no critique: {e}")
                return None
            self._breaker.succeeded()
            usage.tokens_in += reply.tokens_in
            usage.tokens_out += reply.tokens_out
            return reply

    def _say_once(self, message: str) -> None:
        if not self._said:
            self._said = True
            self._say(message)

    def metrics(self) -> dict[str, float]:
        u = self.usage
        return {
            "critic/requests": u.requests,
            "critic/retries": u.retries,
            "critic/failures": u.failures,
            "critic/cached": u.cached,
            "critic/over_budget": u.over_budget,
            "critic/refused_by_breaker": u.refused_by_breaker,
            "critic/no_label": u.no_label,
            "critic/tokens_in": u.tokens_in,
            "critic/tokens_out": u.tokens_out,
            "critic/cost": self._budget.cost(u),
            "critic/seconds": sum(u.seconds) / len(u.seconds) if u.seconds else 0.0,
        }

    async def close(self) -> None:
        await self._writer.close()
        if self._cache:
            self._cache.close()


def critique_template(path: str | None) -> str:
    """The critique prompt of the configuration, or our own.

    Raises:
        ConfigError: unreadable, or without {question} or {response}.
    """
    default = Path(__file__).with_name("prompts") / "critique.txt"
    return read_template(path or default, ("question", "response"))
