"""The critic of a run, with the engines or the endpoint that it asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlparse

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder, chat_renderer, tokenizer_in
from megatron_cgrpo.feedback.chat_models import ChatModel, EndpointChat, EngineChat
from megatron_cgrpo.feedback.critics import MODEL_CRITIQUES, Critic, check_critique, rule_critic
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.model_critic import ModelCritic, critique_template
from megatron_cgrpo.feedback.noise import NoisyCritic
from megatron_cgrpo.rollout.fleet import POLICY, EngineFleet
from megatron_cgrpo.rollout.others import CRITIC, engine_context

CACHE = "critiques.sqlite"
"""File of a run with the critiques of models."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_critic(config: Config, kinds: set[str], context: int) -> None:
    """Refuse a critic that cannot write about problems of these kinds, or has no room to.

    Args:
        context: longest sequence of the policy.

    Raises:
        ConfigError: one sentence with what is wrong and what to do.
    """
    options, critique = config.feedback.critic, config.algorithm.critique
    check_critique(critique, kinds)
    if critique in MODEL_CRITIQUES:
        critique_template(options.prompt)
    if critique == "cot" and options.url is not None:
        api_key(config)
    if critique == "cot" and options.engine is not None:
        _check_room(options.max_tokens, engine_context(options.engine))
        tokenizer_in(Path(options.engine.path))
    if critique == "self":
        _check_room(options.max_tokens, config.model.context_length or context)


def _check_room(max_tokens: int, context: int) -> None:
    if max_tokens >= context:
        raise ConfigError(
            f"feedback.critic.max_tokens={max_tokens} leaves no room for a prompt in the critic's "
            f"context of {context} tokens"
        )


def api_key(config: Config) -> str:
    """The endpoint's key; any text where the endpoint is on this host and none is set.

    Raises:
        ConfigError: when the environment lacks it.
    """
    critic = config.feedback.critic
    key = os.environ.get(critic.api_key_env, "")
    if not key and urlparse(critic.url).hostname not in _LOCAL:
        raise ConfigError(
            f"feedback.critic.url={critic.url} needs a key in the environment variable "
            f"{critic.api_key_env} (feedback.critic.api_key_env)"
        )
    return key or "none"


def critic_of(
    config: Config,
    kinds: set[str],
    fleets: Mapping[str, EngineFleet],
    prompts: PromptBuilder,
    root: Path,
    say: Callable[[str], None],
) -> Critic:
    """The critic that `algorithm.critique` names, disturbed by `feedback.noise`.

    Arguments as of `writer_for`.
    """
    kind, options, noise = config.algorithm.critique, config.feedback.critic, config.feedback.noise
    if kind in MODEL_CRITIQUES:
        cache = CritiqueCache(root / CACHE, say) if options.cache else None
        template = critique_template(options.prompt)
        model = _chat_model(config, fleets, prompts)
        critic: Critic = ModelCritic(kind, model, options, template, cache, say)
    else:
        critic = rule_critic(kind, kinds)
    return NoisyCritic(critic, noise, config.run.seed) if noise.share > 0 else critic


def _chat_model(
    config: Config, fleets: Mapping[str, EngineFleet], prompts: PromptBuilder
) -> ChatModel:
    options = config.feedback.critic
    if config.algorithm.critique == "self":
        policy = fleets[POLICY]
        return EngineChat(
            policy, prompts.render, options, "policy", lambda: policy.version, trained=True
        )
    if options.url is not None:
        return EndpointChat(options, api_key(config))
    path = options.engine.path
    return EngineChat(fleets[CRITIC], chat_renderer(tokenizer_in(Path(path))), options, path)
