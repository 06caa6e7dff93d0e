"""Where a response ends: one decision for engines, loss mask, truncation and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megatron_cgrpo.config.checks import read_hf_config
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import load_tokenizer

_SAID = "ZQX"
"""A response that stands nowhere in a chat template."""


def end_token_ids(config: Config) -> tuple[int, ...]:
    """The ids of the tokens that end a response, in order.

    `rollout.stop_token_ids` where it is set; else all that the model's files name: the tokenizer's
    end-of-sequence token, `eos_token_id` of config.json and of generation_config.json (one or
    several), and, with `data.template: chat`, the token that the chat template writes behind a
    response. (Base models sampled with a chat template, and instruct models whose tokenizer names
    only the end of a text, otherwise run on to the limit.)

    Raises:
        ConfigError: when there is none, or one is no token of the model.
    """
    root = Path(config.model.path)
    hf = read_hf_config(root)
    if config.rollout.stop_token_ids:
        ends = {"rollout.stop_token_ids": set(config.rollout.stop_token_ids)}
    else:
        ends = {
            "config.json": _ids(hf.get("eos_token_id"), f"{root}/config.json: eos_token_id"),
            "generation_config.json": _of_generation(root / "generation_config.json"),
        }
        tokenizer = load_tokenizer(config)
        ends["the tokenizer"] = _ids(tokenizer.eos_token_id, "the tokenizer's eos_token_id")
        if config.data.template == "chat":
            ends["the chat template"] = _of_template(tokenizer)
    vocab = hf.get("vocab_size")
    for source, ids in ends.items():
        for i in ids:
            if isinstance(vocab, int) and not 0 <= i < vocab:
                raise ConfigError(
                    f"{source} names the end token {i}, which is none of the model's {vocab}"
                )
    found = tuple(sorted(set().union(*ends.values())))
    if not found:
        raise ConfigError(
            f"no file of {root} names an end-of-sequence token: set rollout.stop_token_ids"
        )
    return found


def _ids(value: Any, where: str) -> set[int]:
    """One id, several, or none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{where} is {value!r:.60}, not a token id or a list of them")
    return set(ids)


def _of_generation(path: Path) -> set[int]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {type(e).__name__}") from e
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return _ids(settings.get("eos_token_id"), f"{path}: eos_token_id")


def _of_template(tokenizer) -> set[int]:
    """The special token that the chat template writes right behind a response, if it does."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        # A template for prompts alone.
        return set()
    _, said, rest = text.rpartition(_SAID)
    ids = tokenizer.encode(rest, add_special_tokens=False) if said and rest else []
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return {i for i in ids[:1] if i in special | set(tokenizer.all_special_ids)}
