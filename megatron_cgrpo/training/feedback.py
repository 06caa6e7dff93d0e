"""Who gives feedback in a run: critic, refiner, and the engines that they need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder, chat_renderer, load_tokenizer, tokenizer_in
from megatron_cgrpo.feedback.critics import MODEL_CRITIQUES, Critic, check_critique, rule_critic
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.model_critic import ModelCritic, critique_template
from megatron_cgrpo.feedback.noise import NoisyCritic
from megatron_cgrpo.feedback.writers import EndpointWriter, EngineWriter, Writer
from megatron_cgrpo.rollout.fleet import EngineFleet
from megatron_cgrpo.rollout.others import CRITIC, REFINER, engine_context, fleet_of

CACHE = "critiques.sqlite"
"""File of a run with the critiques of models."""
_LOCAL = ("localhost", "127.0.0.1", "::1")


def check_feedback(config: Config, kinds: set[str], context: int) -> None:
    """Refuse settings of critic and refiner that cannot work, before anything is started.

    Args:
        context: longest sequence of the policy.

    Raises:
        ConfigError: one sentence with what is wrong and what to do.
    """
    f, critique = config.feedback, config.algorithm.critique
    if not config.algorithm.refines:
        return
    check_critique(critique, kinds)
    if critique in MODEL_CRITIQUES:
        critique_template(f.critic.prompt)
    if critique == "cot" and f.critic.url is not None:
        api_key(config)
    if critique == "cot" and f.critic.engine is not None:
        _check_room(f.critic.max_tokens, engine_context(f.critic.engine))
        tokenizer_in(Path(f.critic.engine.path))
    if critique == "self":
        _check_room(f.critic.max_tokens, config.model.context_length or context)
    if f.refiner is not None:
        _check_refiner(config)


def _check_room(max_tokens: int, context: int) -> None:
    if max_tokens >= context:
        raise ConfigError(
            f"feedback.critic.max_tokens={max_tokens} leaves no room for a prompt in the critic's "
            f"context of {context} tokens"
        )


def _check_refiner(config: Config) -> None:
    """The policy is trained on the ids that the refiner samples."""
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


class FeedbackStaff:
    """The critic and the refiner of a run, and the fleets that were made for them.

    Args:
        policy: the policy's fleet, which writes the critiques of `self`.
        say: for outages and spent budgets.
    """

    def __init__(
        self,
        config: Config,
        kinds: set[str],
        policy: EngineFleet,
        prompts: PromptBuilder,
        root: Path,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._policy, self._prompts, self._root = config, policy, prompts, root
        self._say = say
        self.fleets: list[EngineFleet] = []
        self.critic: Critic | None = None
        self.refiner: EngineFleet | None = None
        if not config.algorithm.refines:
            return
        f = config.feedback
        if f.refiner is not None:
            self.refiner = self._fleet(f.refiner, REFINER)
        self.critic = self._critic(kinds)
        if self.critic is not None and f.noise.share > 0:
            self.critic = NoisyCritic(self.critic, f.noise, config.run.seed)

    def _fleet(self, engine, name: str) -> EngineFleet:
        fleet = fleet_of(self._config, engine, self._root, name)
        self.fleets.append(fleet)
        return fleet

    def _critic(self, kinds: set[str]) -> Critic | None:
        kind, options = self._config.algorithm.critique, self._config.feedback.critic
        if kind not in MODEL_CRITIQUES:
            return rule_critic(kind, kinds)
        cache = CritiqueCache(self._root / CACHE, self._say) if options.cache else None
        template = critique_template(options.prompt)
        return ModelCritic(kind, self._writer(kind), options, template, cache, self._say)

    def _writer(self, kind: str) -> Writer:
        options = self._config.feedback.critic
        if kind == "self":
            fleet = self._policy
            return EngineWriter(
                fleet, self._prompts.render, options, "policy", lambda: fleet.version, True
            )
        if options.url is not None:
            return EndpointWriter(options, api_key(self._config))
        engine = options.engine
        render = chat_renderer(tokenizer_in(Path(engine.path)))
        fleet = self._fleet(engine, CRITIC)
        return EngineWriter(fleet, render, options, engine.path)

    async def close(self) -> None:
        """Leave connections and files; the fleets are the controller's to stop."""
        if self.critic is not None:
            await self.critic.close()
