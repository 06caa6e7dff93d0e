"""Language models that answer a prompt: behind an endpoint, or in vLLM servers of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_cgrpo.config.feedback import Critic as CriticOptions
from megatron_cgrpo.types import Completion

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """What a model wrote, and the tokens that it took."""

    text: str
    truncated: bool
    tokens_in: int
    tokens_out: int


def estimate_tokens(messages: Messages) -> int:
    """Where nobody counts them: four characters a token."""
    return sum(len(m["content"]) for m in messages) // 4 + 1


class ChatError(Exception):
    """No reply.

    `retry` tells whether asking again may help, `after_s` how long to wait, `of_prompt` that this
    prompt was refused (too long) and others need not be, `busy` that the service is there and asks
    for patience.
    """

    def __init__(
        self,
        message: str,
        retry: bool = True,
        after_s: float | None = None,
        of_prompt: bool = False,
        busy: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry, self.after_s, self.of_prompt, self.busy = retry, after_s, of_prompt, busy


class ChatModel(Protocol):
    def identity(self) -> list[Any]:
        """What a reply depends on beside the prompt and the sampling settings."""

    def fits(self, messages: Messages) -> bool:
        """Whether prompt and reply fit into the model's context, as far as is known."""

    async def write(self, messages: Messages, seed: int) -> Reply:
        """One reply.

        Raises:
            ChatError: when there is none.
        """

    async def close(self) -> None:
        """Leave the connections."""


class EndpointChat:
    """Any OpenAI-compatible chat endpoint.

    Args:
        key: the API key; it is taken out of every error message.
    """

    def __init__(self, options: CriticOptions, key: str) -> None:
        import openai

        self._openai, self._options, self._key = openai, options, key
        # Retries are ours: they are counted, budgeted, and cover broken answers.
        self._client = openai.AsyncOpenAI(
            base_url=options.url, api_key=key, max_retries=0, timeout=options.timeout_s
        )

    def identity(self) -> list[Any]:
        return [self._options.url, self._options.model]

    def fits(self, messages: Messages) -> bool:
        return True

    async def write(self, messages: Messages, seed: int) -> Reply:
        """As `ChatModel.write`; a request is given up after `timeout_s` in all, also when the
        answer comes in drips."""
        o, openai = self._options, self._openai
        try:
            async with asyncio.timeout(o.timeout_s):
                answer = await self._client.chat.completions.create(
                    model=o.model,
                    messages=messages,
                    temperature=o.temperature,
                    max_tokens=o.max_tokens,
                    seed=seed,
                )
            return self._parse(answer, messages)
        except TimeoutError as e:
            raise ChatError(f"no answer within {o.timeout_s:g} s") from e
        except openai.APIStatusError as e:
            retry = e.status_code in (408, 409, 429) or e.status_code >= 500
            message = self._redacted(f"HTTP {e.status_code}: {e.message}")
            of_prompt = e.status_code in (400, 413, 422)
            after_s, busy = _retry_after(e.response), e.status_code == 429
            raise ChatError(message, retry, after_s, of_prompt, busy) from e
        except Exception as e:
            # Dropped connections, cut bodies, JSON of another shape: whatever a bad proxy sends.
            raise ChatError(self._redacted(f"{type(e).__name__}: {e}")) from e

    @staticmethod
    def _parse(answer: Any, prompt: Messages) -> Reply:
        choice, usage = answer.choices[0], answer.usage
        # Empty where a model has thought until its limit: paid for all the same.
        text = choice.message.content or ""
        if not isinstance(text, str):
            raise ValueError("the answer holds no text")
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        sizes = (estimate_tokens(prompt), estimate_tokens([{"content": text}]))
        counted = [int(n) if n is not None else size for n, size in zip(tokens, sizes)]
        return Reply(text, choice.finish_reason == "length", *counted)

    def _redacted(self, text: str) -> str:
        return (text.replace(self._key, "***") if self._key else text)[:500]

    async def close(self) -> None:
        await self._client.close()


def _retry_after(response: Any) -> float | None:
    try:
        return float(response.headers.get("retry-after", ""))
    except ValueError:
        return None


class Generator(Protocol):
    """A fleet of engines; `context` is their longest sequence in tokens."""

    context: int

    async def generate(
        self, prompt_ids: tuple[int, ...], *, n: int, temperature: float, seed: int, max_tokens: int
    ) -> list[Completion]: ...


class EngineChat:
    """Engines of ours: those of the critic's model, or the policy's own.

    Args:
        render: messages → prompt token ids.
        name: of the model.
        version: what the engines' weights are called now.
        trained: they are the policy's: without them the run cannot go on either.
    """

    def __init__(
        self,
        fleet: Generator,
        render: Callable[[Messages], tuple[int, ...]],
        options: CriticOptions,
        name: str,
        version: Callable[[], int] = lambda: 0,
        trained: bool = False,
    ) -> None:
        self._fleet, self._render, self._options = fleet, render, options
        self._name, self._version, self._trained = name, version, trained

    def identity(self) -> list[Any]:
        return [self._name, self._version()]

    def fits(self, messages: Messages) -> bool:
        return len(self._render(messages)) + self._options.max_tokens <= self._fleet.context

    async def write(self, messages: Messages, seed: int) -> Reply:
        """As `ChatModel.write`. The fleet retries and restarts by itself."""
        o, prompt = self._options, self._render(messages)
        try:
            (c,) = await self._fleet.generate(
                prompt, n=1, temperature=o.temperature, seed=seed, max_tokens=o.max_tokens
            )
        except ValueError as e:
            # The response under critique leaves no room in the engine's context.
            raise ChatError(str(e), retry=False, of_prompt=True) from e
        except RuntimeError as e:
            # A fleet that cannot be brought back.
            if self._trained:
                raise
            raise ChatError(str(e), retry=False) from e
        return Reply(c.text, c.truncated, len(prompt), len(c.token_ids))

    async def close(self) -> None:
        """The fleet is not its own."""
