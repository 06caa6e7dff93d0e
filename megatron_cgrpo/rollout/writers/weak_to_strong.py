"""Weak to strong: another model refines the policy's responses (`feedback.refiner`)."""

from __future__ import annotations

from pathlib import Path

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import load_tokenizer, tokenizer_in
from megatron_cgrpo.rollout.others import engine_context
from megatron_cgrpo.rollout.writers.critiqued import Critiqued


class WeakToStrong(Critiqued):
    """As in the paper, but for the engines that refine: they serve another model, whose token ids
    mean the same."""


def check_refiner(config: Config) -> None:
    """Refuse a refiner that the policy cannot be trained on.

    Raises:
        ConfigError: another tokenizer than the policy's, or too short a context.
    """
    path = config.feedback.refiner.path
    theirs, ours = tokenizer_in(Path(path)).get_vocab(), load_tokenizer(config).get_vocab()
    if theirs != ours:
        raise ConfigError(
            f"feedback.refiner.path={path} has another tokenizer than the policy: its token ids "
            "mean something else"
        )
    need = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if engine_context(config.feedback.refiner) < need:
        raise ConfigError(
            f"feedback.refiner.path={path} has a context shorter than rollout.max_prompt_tokens + "
            f"max_response_tokens = {need}"
        )
