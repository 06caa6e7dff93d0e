"""Who writes second attempts, one file each. To add one: a file with a `Writer`, and its place in
`writer_for`; the pipeline asks whoever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.data.prompts import PromptBuilder
from megatron_cgrpo.rollout.critics import check_critic, critic_of
from megatron_cgrpo.rollout.fleet import POLICY, EngineFleet
from megatron_cgrpo.rollout.others import REFINER
from megatron_cgrpo.rollout.writers.base import Attempt, Work, Writer
from megatron_cgrpo.rollout.writers.critiqued import Critiqued
from megatron_cgrpo.rollout.writers.resample import Resample
from megatron_cgrpo.rollout.writers.weak_to_strong import WeakToStrong, check_refiner

__all__ = ["Attempt", "Work", "Writer", "check_writer", "writer_for"]


def check_writer(config: Config, kinds: set[str], context: int) -> None:
    """Refuse settings of critic and refiner that cannot work, before anything is started.

    Args:
        kinds: of the problems.
        context: longest sequence of the policy.

    Raises:
        ConfigError: one sentence with what is wrong and what to do.
    """
    if not config.algorithm.refines:
        return
    check_critic(config, kinds, context)
    if config.feedback.refiner is not None:
        check_refiner(config)


def writer_for(
    config: Config,
    kinds: set[str],
    fleets: Mapping[str, EngineFleet],
    prompts: PromptBuilder,
    root: Path,
    say: Callable[[str], None],
) -> Writer:
    """The writer that the configuration asks for.

    Args:
        kinds: of the problems.
        fleets: by name; the policy's, and those of `other_fleets`.
        root: where critiques are kept.
        say: told about outages and spent budgets.
    """
    if not config.algorithm.refines:
        return Writer()
    refiner = fleets.get(REFINER, fleets[POLICY])
    if config.algorithm.critique == "none":
        return Resample(config.rollout, refiner)
    critic = critic_of(config, kinds, fleets, prompts, root, say)
    kind = WeakToStrong if REFINER in fleets else Critiqued
    return kind(config, critic, refiner, prompts)
