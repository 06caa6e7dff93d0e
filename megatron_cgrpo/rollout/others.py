"""Fleets of models that are not trained: a critic's, a refiner's."""

from __future__ import annotations

from pathlib import Path

from megatron_cgrpo.config.checks import read_hf_config
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.feedback import Engine
from megatron_cgrpo.config.schema import Config, Model
from megatron_cgrpo.data.endings import end_token_ids
from megatron_cgrpo.rollout.fleet import EngineFleet

CRITIC, REFINER = "critic", "refiner"
# With a first port for the policy's servers, those of other fleets follow at a distance.
_PORTS_AFTER = {CRITIC: 192, REFINER: 224}


def other_fleets(config: Config, log_dir: Path) -> dict[str, EngineFleet]:
    """The fleets that the run needs beside the policy's, by name; not started.

    Raises:
        ConfigError: when the directory of one of their models is unusable.
    """
    a, f = config.algorithm, config.feedback
    wanted = {
        REFINER: f.refiner if a.refines else None,
        CRITIC: f.critic.engine if a.refines and a.critique == "cot" else None,
    }
    return {n: fleet_of(config, engine, log_dir, n) for n, engine in wanted.items() if engine}


def fleet_of(config: Config, engine: Engine, log_dir: Path, name: str) -> EngineFleet:
    """Servers of another model, with the timeouts and retries of the policy's.

    Raises:
        ConfigError: when the model's directory is unusable.
    """
    context = engine_context(engine)
    # The policy is trained on what the refiner writes: its responses end where the policy's do.
    ends = end_token_ids(config) if name == REFINER else ()
    rollout = config.rollout.model_copy(
        update={
            "placement": "cpu" if config.rollout.placement == "cpu" else "split",
            "servers": engine.servers,
            "tensor": engine.tensor,
            "gpus": engine.gpus,
            "urls": (),
            "own_nodes": 0,
            "port": config.rollout.port and config.rollout.port + _PORTS_AFTER[name],
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "kv_cache_mib": engine.kv_cache_mib,
            "extra_args": engine.extra_args,
            # The refiner continues the policy's prompts; a critic has a language of its own.
            "stop": config.rollout.stop if name == REFINER else (),
            "stop_token_ids": ends,
        }
    )
    model = Model(path=engine.path, dtype=engine.dtype, context_length=context)
    # A critic is asked by its own chat template, where it has one.
    data = config.data.model_copy(update={} if name == REFINER else {"template": "chat"})
    other = config.model_copy(update={"model": model, "rollout": rollout, "data": data})
    return EngineFleet(other, context, log_dir, name)


def engine_context(engine: Engine) -> int:
    """Longest sequence of a model, as configured.

    Raises:
        ConfigError: no usable config.json, or more than the model has.
    """
    longest = read_hf_config(Path(engine.path)).get("max_position_embeddings")
    if longest is None:
        raise ConfigError(f"{engine.path}/config.json names no max_position_embeddings")
    if engine.context_length is not None and engine.context_length > longest:
        raise ConfigError(
            f"context_length={engine.context_length} is more than the {longest} tokens of "
            f"{engine.path}"
        )
    return engine.context_length or longest
