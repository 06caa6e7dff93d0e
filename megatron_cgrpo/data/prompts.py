"""From problems to prompt token ids: chat templates or plain text, and refinement prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config, Data
from megatron_cgrpo.types import Problem

OMISSION = "\n[...]\n"


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
        self._question = _template(data.prompt_file, ("question",)) if data.prompt_file else None
        self._refine = refine_template
        if data.template == "chat" and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "data.template=chat, but the tokenizer has no chat template; set data.template="
                "plain and data.prompt_file"
            )

    def problem(self, problem: Problem) -> tuple[int, ...]:
        """Token ids of the problem's own prompt: what every member of its group is trained on."""
        messages = [dict(m) for m in problem.messages]
        if self._question is not None:
            messages[-1]["content"] = fill(self._question, question=messages[-1]["content"])
        return self._render(messages)

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
        ids = self._refinement(problem, response, critique)
        if len(ids) <= limit:
            return ids, False
        bare = len(self._refinement(problem, OMISSION, critique))
        if bare > limit:
            raise ValueError(
                f"problem {problem.id!r} with its critique needs {bare} tokens, limit {limit}"
            )
        # Keep as many characters as fit; token counts are monotone enough for bisection.
        low, high = 0, len(response) // 2
        while low < high:
            keep = (low + high + 1) // 2
            cut = response[:keep] + OMISSION + response[-keep:]
            if len(self._refinement(problem, cut, critique)) <= limit:
                low = keep
            else:
                high = keep - 1
        cut = response[:low] + OMISSION + (response[-low:] if low else "")
        return self._refinement(problem, cut, critique), True

    def _refinement(self, problem: Problem, response: str, critique: str) -> tuple[int, ...]:
        text = fill(self._refine, question=problem.question, response=response, critique=critique)
        messages = [dict(m) for m in problem.messages[:-1]]
        return self._render([*messages, {"role": "user", "content": text}])

    def _render(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if self._data.template == "plain":
            text = "\n\n".join(m["content"] for m in messages)
            return tuple(self._tokenizer.encode(text))
        if self._data.system is not None:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        # Tokenised as text: the template already holds the special tokens.
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def fill(template: str, **values: str) -> str:
    """Replace {name} literally: neither template nor values are format strings (LaTeX braces)."""
    out, rest = [], template
    while rest:
        hits = [(i, n) for n in values if (i := rest.find("{" + n + "}")) >= 0]
        if not hits:
            break
        at, name = min(hits)
        out += [rest[:at], values[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join(out) + rest


def _template(path: str | Path, names: tuple[str, ...]) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip("\n")
    except OSError as e:
        raise ConfigError(f"cannot read the prompt file {path}: {e.strerror}") from e
    for name in names:
        if "{" + name + "}" not in text:
            raise ConfigError(f"the prompt file {path} lacks {{{name}}}")
    return text


def refine_template(path: str | None) -> str:
    """The refinement prompt of the configuration, or our own.

    Raises:
        ConfigError: unreadable, or without one of {question}, {response}, {critique}.
    """
    if path is None:
        path = Path(__file__).parents[1] / "feedback" / "prompts" / "refine.txt"
    return _template(path, ("question", "response", "critique"))


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


def load_tokenizer(config: Config):
    """The run's tokenizer.

    Raises:
        ConfigError: when transformers cannot load it.
    """
    from transformers import AutoTokenizer

    source = Path(config.model.tokenizer or config.model.path)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as e:
        raise ConfigError(f"cannot load the tokenizer in {source}: {e}") from e
