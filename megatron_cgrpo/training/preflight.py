"""Everything that can be refused before a process is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cgrpo.config.checks import check_gpu_memory, check_memory, check_model, read_hf_config
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint
from megatron_cgrpo.conversion.model_files import ModelFiles
from megatron_cgrpo.conversion.plan import parameter_count
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.data.endings import end_token_ids
from megatron_cgrpo.data.problems import shown
from megatron_cgrpo.data.prompts import PromptBuilder, load_tokenizer, refine_template
from megatron_cgrpo.feedback.verdicts import check_kinds
from megatron_cgrpo.planning.memory import needed_bytes
from megatron_cgrpo.rollout.nodes import check_nodes
from megatron_cgrpo.rollout.writers import check_writer
from megatron_cgrpo.training.problem_sets import read_sets


@dataclass(frozen=True)
class Checked:
    """What was found while checking: the model's shape, the tokens that end a response, and what
    users should know of their data."""

    shape: ModelShape
    end_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


def preflight(config: Config, nodes: int = 1) -> Checked:
    """Check model, tokenizer, data and feedback settings.

    Args:
        nodes: that the trainer's ranks run on.

    Raises:
        ConfigError, DataError: one sentence with what is wrong, where, and what to do.
    """
    shape = shape_of(read_hf_config(Path(config.model.path)))
    check_model(config)
    _check_weights(config)
    check_nodes(config, nodes)
    check_memory(config, parameter_count(shape), nodes)
    if config.rollout.placement != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory
        check_gpu_memory(needed_bytes(config, shape, gpu), gpu)
    _check_tokenizer(config, shape)
    ends = end_token_ids(config)
    sets = read_sets(config)
    kinds = sets.kinds
    check_kinds(kinds, config.feedback)
    check_count(config, len(sets.train))
    check_writer(config, kinds, shape.context)
    template = refine_template(config.feedback.refine_prompt)
    PromptBuilder(load_tokenizer(config), config.data, template)
    return Checked(shape, ends, sets.notes)


def _check_weights(config: Config) -> None:
    """Files, names, shapes and dtypes, read from headers."""
    try:
        ModelFiles(config.model.path)
        if config.model.weights is not None:
            MegatronCheckpoint(config.model.weights, config.model.path)
    except (ValueError, OSError) as e:
        raise ConfigError(str(e)) from e


def check_count(config: Config, usable: int) -> None:
    """Refuse a step that would need more problems than there are."""
    if usable < config.training.problems_per_step:
        raise ConfigError(
            f"{usable} usable problems in {shown(config.data.path)} are fewer than "
            f"training.problems_per_step={config.training.problems_per_step}"
        )


def _check_tokenizer(config: Config, shape: ModelShape) -> None:
    source = Path(config.model.tokenizer or config.model.path) / "tokenizer.json"
    if not source.exists():
        return
    from tokenizers import Tokenizer

    try:
        size = Tokenizer.from_file(str(source)).get_vocab_size()
    except Exception as e:  # noqa: BLE001 - tokenizers raises bare Exceptions
        raise ConfigError(f"{source} is not a tokenizer: {e}") from e
    if size > shape.vocab:
        raise ConfigError(
            f"the tokenizer in {source.parent} has {size} tokens, more tokens than the model in "
            f"{config.model.path} ({shape.vocab}): it belongs to another model"
        )
