"""From problems to prompt token ids: chat templates or plain text, and refinement prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config, Data
from megatron_cgrpo.config.templates import fill, read_template, without_middle
from megatron_cgrpo.types import Problem


class PromptBuilder:
    """Renders prompts of one run.

    With the `chat` template a prompt is the tokenizer's rendering of the messages; with `plain`
    it is the text itself (base models). `data.prompt_file` wraps the question either way.

    Args:
        tokenizer: a transformers tokenizer.
        refine_template: text with {question}, {response} and {critique}.
    """

    def __init__(self, tokenizer, data: Data, refine_template: str) -> None:
        self._tokenizer, self._data = tokenizer, data
        self._question = None
        if data.prompt_file:
            self._question = read_template(data.prompt_file, ("question",))
        self._refine = refine_template
        if data.template == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "data.template=chat, but the tokenizer has no chat template; set data.template="
                "plain and data.prompt_file"
            )

    def problem(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the problem's own prompt: what every member of its group is trained on."""
        return self.render(self._messages(problem))

    def text(self, problem: Problem) -> str:
        """The problem's own prompt as text."""
        return self._text(self._messages(problem))

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        messages = [dict(m) for m in problem.messages]
        if self._question is not None:
            messages[-1]["content"] = fill(self._question, question=messages[-1]["content"])
        return messages

    def refinement(
        self, problem: Problem, response: str, critique: str, limit: int
    ) -> tuple[tuple[int, ...], bool]:
        """Token ids of (problem, response, critique), at most `limit` of them.

        A response that is too long loses its middle; the critique never does.

        Returns:
            (ids, shortened).

        Raises:
            ValueError: when problem and critique alone exceed the limit.
        """
        kept = without_middle(
            response, lambda text: len(self._refinement(problem, text, critique)) <= limit
        )
        if kept is None:
            raise ValueError(
                f"problem {problem.id!r} with its critique is too long (limit {limit} tokens)"
            )
        return self._refinement(problem, kept, critique), kept != response

    def _refinement(self, problem: Problem, response: str, critique: str) -> tuple[int, ...]:
        text = fill(self._refine, question=problem.question, response=response, critique=critique)
        messages = [dict(m) for m in problem.messages[:-1]]
        return self.render([*messages, {"role": "user", "content": text}])

    def render(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the answer begins."""
        text = self._text(messages)
        if self._data.template == "plain":
            return tuple(self._tokenizer.encode(text))
        # Tokenised as text: the template already holds the special tokens.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, messages: Sequence[dict[str, str]]) -> str:
        if self._data.template == "plain":
            return "\n\n".join(m["content"] for m in messages)
        if self._data.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )


def refine_template(path: str | None) -> str:
    """The refinement prompt of the configuration, or our own.

    Raises:
        ConfigError: unreadable, or without one of {question}, {response}, {critique}.
    """
    if path is None:
        path = Path(__file__).with_name("refine.txt")
    return read_template(path, ("question", "response", "critique"))


def within_limit(
    problems: Sequence[Problem], builder: PromptBuilder, limit: int
) -> tuple[list[tuple[Problem, tuple[int, ...]]], int]:
    """Problems with their prompt ids, and the number dropped for prompts over `limit` tokens.

    Raises:
        ConfigError: when none is left.
    """
    kept = [(p, ids) for p in problems if len(ids := builder.problem(p)) <= limit]
    if not kept:
        raise ConfigError(
            f"all {len(problems)} problems have prompts longer than rollout.max_prompt_tokens="
            f"{limit}"
        )
    return kept, len(problems) - len(kept)


def chat_renderer(tokenizer) -> Callable[[Sequence[dict[str, str]]], tuple[int, ...]]:
    """Messages → prompt ids of another model, by its chat template or, without one, as text."""
    template = "chat" if getattr(tokenizer, "chat_template", None) else "plain"
    return PromptBuilder(tokenizer, Data(path="", template=template), "").render


def load_tokenizer(config: Config):
    """The run's tokenizer.

    Raises:
        ConfigError: when transformers cannot load it.
    """
    return tokenizer_in(Path(config.model.tokenizer or config.model.path))


def tokenizer_in(source: Path):
    """The tokenizer of a directory.

    Raises:
        ConfigError: when transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as e:
        why = " ".join(str(e).split())
        raise ConfigError(f"cannot load the tokenizer in {source}: {why}") from e
