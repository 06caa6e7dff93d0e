"""Critiques written by a language model: step-by-step, with a conclusion that is parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_cgrpo.config.feedback import Critic as CriticOptions
from megatron_cgrpo.config.templates import fill, read_template, without_middle
from megatron_cgrpo.feedback.chat_models import (
    ChatError,
    ChatModel,
    Messages,
    Reply,
    estimate_tokens,
)
from megatron_cgrpo.feedback.critics import Critic, IndicativeCritic
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.labels import END, conclusion
from megatron_cgrpo.feedback.weather import Breaker, Budget, Usage, pause_before_retry
from megatron_cgrpo.types import Critique, Problem, Sample

_ENGINE_REQUESTS = 10_000


class ModelCritic(Critic):
    """Asks a model for a critique, within budgets and whatever the weather.

    An outage never raises: a critique that cannot be had is that of `options.fallback`, or None.

    Args:
        kind: "cot" or "self".
        template: text with {question} and {response}; {answer} shows the gold answer.
        cache: None keeps nothing.
        say: told once per step about outages and spent budgets.
    """

    def __init__(
        self,
        kind: str,
        model: ChatModel,
        options: CriticOptions,
        template: str,
        cache: CritiqueCache | None,
        say: Callable[[str], None],
    ) -> None:
        self._kind, self._model, self._options = kind, model, options
        self._template, self._cache, self._say = template, cache, say
        self._shows_answer = "{answer}" in template
        self._name = str(options.model or options.engine and options.engine.path)
        # Engines of ours take what they can; an endpoint gets no more than it is said to bear.
        at_once = options.concurrency if options.url is not None else _ENGINE_REQUESTS
        self._slots = asyncio.Semaphore(at_once)
        self._asking: dict[str, asyncio.Future[Reply | None]] = {}
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
        start = time.monotonic()
        messages = self._messages(problem, sample)
        reply = await self._cached(messages) if messages else None
        if reply is None or not reply.text.strip():
            return await self._fallback(problem, sample) if self._fallback else None
        label = conclusion(reply.text, reply.truncated)
        self.usage.no_label += label is None
        return Critique(
            self._kind,
            reply.text.replace(END, "").strip(),
            label,
            critic="policy" if self._kind == "self" else self._name,
            shows_answer=self._shows_answer,
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
            seconds=time.monotonic() - start,
        )

    def _messages(self, problem: Problem, sample: Sample) -> Messages | None:
        """The prompt; a response that is too long for the model loses its middle. None where even
        the problem alone is."""

        def around(response: str) -> Messages:
            known = {"question": problem.question, "answer": problem.answer}
            return [{"role": "user", "content": fill(self._template, response=response, **known)}]

        text = sample.completion.text
        kept = without_middle(text, lambda part: self._model.fits(around(part)))
        self.usage.not_fitting += kept is None
        return None if kept is None else around(kept)

    async def _cached(self, messages: Messages) -> Reply | None:
        """The reply from the cache, from whoever asks the same just now, or from the model."""
        o = self._options
        key = CritiqueCache.key(self._model.identity(), messages, o.temperature, o.max_tokens)
        reply = self._cache.get(key) if self._cache else None
        if reply is not None:
            self.usage.cached += 1
            return reply
        if key in self._asking:
            self.usage.cached += 1
            return await asyncio.shield(self._asking[key])
        self._asking[key] = asyncio.ensure_future(self._ask(messages, int(key[:7], 16)))
        try:
            reply = await self._asking[key]
        finally:
            del self._asking[key]
        if reply is not None and self._cache:
            self._cache.put(key, reply)
        return reply

    async def _ask(self, messages: Messages, seed: int) -> Reply | None:
        """Send, and send again; None when it is of no use."""
        usage, size, attempt = self.usage, estimate_tokens(messages), 0
        while True:
            async with self._slots:
                # Checked when it is this request's turn: others may have failed or spent meanwhile.
                if not self._may_send(size):
                    return None
                usage.requests += 1
                start = time.monotonic()
                try:
                    with self._budget.holding(size):
                        reply = await self._model.write(messages, seed)
                except ChatError as e:
                    error = e
                else:
                    self._breaker.succeeded()
                    usage.tokens_in += reply.tokens_in
                    usage.tokens_out += reply.tokens_out
                    usage.seconds.append(time.monotonic() - start)
                    return reply
            again = error.retry and attempt < self._options.retries
            if not error.of_prompt and not (error.busy and again):
                self._breaker.failed()
            if not again:
                usage.failures += 1
                self._say_once(f"no critique: {error}")
                return None
            usage.retries += 1
            await asyncio.sleep(pause_before_retry(attempt, error.after_s))
            attempt += 1

    def _may_send(self, size: int) -> bool:
        if not self._budget.allows(self.usage, size):
            self.usage.over_budget += 1
            self._say_once("the critic's budget of this step is spent")
            return False
        if not self._breaker.allows():
            self.usage.refused_by_breaker += 1
            return False
        return True

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
            "critic/not_fitting": u.not_fitting,
            "critic/tokens_in": u.tokens_in,
            "critic/tokens_out": u.tokens_out,
            "critic/cost": self._budget.cost(u.tokens_in, u.tokens_out),
            "critic/seconds": sum(u.seconds) / len(u.seconds) if u.seconds else 0.0,
        }

    async def close(self) -> None:
        await self._model.close()
        if self._cache:
            self._cache.close()


def critique_template(path: str | None) -> str:
    """The critique prompt of the configuration, or our own.

    Raises:
        ConfigError: unreadable, or without {question} or {response}.
    """
    default = Path(__file__).with_name("critique.txt")
    return read_template(path or default, ("question", "response"))
