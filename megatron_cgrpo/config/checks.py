"""Checks that need the model's files: run before any process is started."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config, Parallel


def check_model(config: Config) -> dict[str, Any]:
    """Compare the configuration with the model's config.json; returns the latter.

    Raises:
        ConfigError: files missing, parallel sizes that do not divide the model, or lengths over
            the context.
    """
    root = Path(config.model.path)
    hf = read_hf_config(root)
    if not any(root.glob("*.safetensors")):
        raise ConfigError(f"model.path={root} holds no *.safetensors file")
    tokenizer = Path(config.model.tokenizer or root)
    if not any((tokenizer / f).exists() for f in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigError(
            f"no tokenizer in {tokenizer} (tokenizer.json); set model.tokenizer to its directory"
        )
    if config.model.weights and not (Path(config.model.weights) / "metadata.json").exists():
        raise ConfigError(
            f"model.weights={config.model.weights} is not a distributed checkpoint (it has no "
            "metadata.json)"
        )
    _check_division(config, hf)
    context = context_of(config)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds the model's "
            f"context of {context} tokens"
        )
    return hf


def context_of(config: Config) -> int:
    """Longest sequence of the policy in tokens, for trainer and engines.

    Raises:
        ConfigError: as `read_hf_config`.
    """
    longest = read_hf_config(Path(config.model.path))["max_position_embeddings"]
    return min(config.model.context_length or longest, longest)


def read_hf_config(root: Path) -> dict[str, Any]:
    """The model's config.json as a dict.

    Raises:
        ConfigError: no directory, no config.json, or one that is not JSON.
    """
    path = root / "config.json"
    if not root.is_dir():
        raise ConfigError(f"model.path={root} is not a directory")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"model.path={root} holds no config.json") from e
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path} is not valid JSON (line {e.lineno})") from e
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read as JSON: {type(e).__name__}") from e
    if not isinstance(hf, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return hf


def _check_division(config: Config, hf: dict[str, Any]) -> None:
    tp, heads = config.parallel.tensor, hf["num_attention_heads"]
    kv = hf.get("num_key_value_heads") or heads
    if heads % tp:
        raise ConfigError(
            f"parallel.tensor={tp} does not divide the model's {heads} attention heads"
        )
    if kv % tp and tp % kv:
        raise ConfigError(
            f"parallel.tensor={tp} is neither a divisor nor a multiple of the {kv} KV heads"
        )
    if hf["intermediate_size"] % tp:
        raise ConfigError(f"parallel.tensor={tp} does not divide intermediate_size")
    _check_stages(config.parallel, hf["num_hidden_layers"])
    _check_experts(config.parallel, hf)
    if heads % config.rollout.tensor:
        raise ConfigError(
            f"rollout.tensor={config.rollout.tensor} does not divide the model's {heads} heads"
        )


def _check_stages(p: Parallel, layers: int) -> None:
    """Every pipeline chunk has the same number of layers, but for given first and last ones."""
    given = [n for n in (p.first_stage_layers, p.last_stage_layers) if n]
    chunks = p.pipeline * (p.virtual_pipeline or 1) - len(given)
    rest = layers - sum(given)
    if (chunks and (rest % chunks or rest < chunks)) or (not chunks and rest):
        raise ConfigError(
            f"the model's {layers} layers do not divide into pipeline chunks: {rest} are left for "
            f"{chunks} (parallel.pipeline × virtual_pipeline"
            + (", less first_stage_layers and last_stage_layers)" if given else ")")
        )


def _check_experts(p: Parallel, hf: dict[str, Any]) -> None:
    experts = hf.get("num_experts") or hf.get("num_local_experts")
    if not experts:
        if p.expert > 1 or p.expert_tensor:
            raise ConfigError(
                "parallel.expert and parallel.expert_tensor need a mixture-of-experts model"
            )
        return
    if experts % p.expert:
        raise ConfigError(
            f"parallel.expert={p.expert} does not divide the model's {experts} experts"
        )
    width = p.expert_tensor or p.tensor
    if p.expert == 1 and width != p.tensor:
        # megatron-core 0.16 then reduces the experts' gradients over the wrong ranks.
        raise ConfigError(
            f"parallel.expert_tensor={width} differs from parallel.tensor={p.tensor}, which needs "
            "parallel.expert > 1"
        )
    if hf["moe_intermediate_size"] % width:
        raise ConfigError(f"parallel.expert_tensor={width} does not divide moe_intermediate_size")
    if p.tensor > 1 and not p.sequence_parallel:
        raise ConfigError(
            "a mixture-of-experts model with parallel.tensor > 1 needs "
            "parallel.sequence_parallel=true (megatron-core)"
        )


def check_memory(config: Config, parameters: int, nodes: int = 1) -> None:
    """Weights, gradients, Adam state, the engines' and the exports' weights without a GPU.

    Args:
        nodes: that the trainer's ranks run on, evenly.

    Raises:
        ConfigError: when they cannot fit into this machine's memory.
    """
    if config.rollout.placement != "cpu":
        return
    width = 4 if config.model.dtype == "float32" else 2
    copies = config.parallel.data * config.parallel.context
    replicas = 1 if config.optimizer.sharded else copies
    r = config.rollout
    servers = 0 if r.own_nodes else -(-r.servers // nodes)
    ours = ((width + 4) * copies + 12 * replicas) / nodes
    need = parameters * (ours + width * (servers + 1))
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise ConfigError(
            f"training {parameters / 1e9:.1f}B parameters needs about {need / 2**30:.0f} GiB here "
            f"and the machine has {have / 2**30:.0f} GiB; use a smaller model or GPUs"
        )


def check_gpu_memory(need_bytes: int, gpu_bytes: int) -> None:
    """Refuse a layout whose trainer and engines cannot share the GPUs.

    Raises:
        ConfigError: naming what is needed and what there is.
    """
    if need_bytes > gpu_bytes:
        raise ConfigError(
            f"a GPU needs about {need_bytes / 2**30:.0f} GiB with these settings and has "
            f"{gpu_bytes / 2**30:.0f} GiB; raise parallel.tensor or pipeline, set "
            "model.recompute=full, or lower rollout.gpu_memory_utilization or "
            "training.micro_batch_tokens"
        )


def check_disk(directory: Path, need_bytes: int) -> None:
    """Fail early when the run directory's disk cannot take `need_bytes`.

    Raises:
        ConfigError: naming the free and the needed space.
    """
    free = shutil.disk_usage(directory).free
    if free < need_bytes:
        raise ConfigError(
            f"{directory} has {free / 2**20:.0f} MiB free; this run's exports need "
            f"{need_bytes / 2**20:.0f} MiB"
        )
