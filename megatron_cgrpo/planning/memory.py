"""GPU memory of the trainer's ranks and of the engines beside them.

Weights, gradients and optimizer state are counted tensor by tensor (and compared with real shards
on the meta device in tests). Activations are an estimate from above: what flash attention and a
gated MLP keep for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_cgrpo.config.schema import Config, Parallel
from megatron_cgrpo.conversion.plan import Entry, plan_for
from megatron_cgrpo.conversion.shape import ModelShape

GIB = 2**30
# CUDA context, NCCL buffers, allocator fragments; and what a sleeping engine keeps.
RESERVE = 4 * GIB
SLEEPING_ENGINE = 2 * GIB
# Logits of a chunk of tokens in the output layer, float32, with their gradient.
_OUTPUT_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def static(self) -> int:
        """What stays on the GPU while the engines work."""
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> int:
        """Most of a training step."""
        return self.static + self.activations


def stage_of_layer(layer: int, layers: int, p: Parallel) -> int:
    """The pipeline stage that holds a layer; virtual stages take turns."""
    first, last = p.first_stage_layers, p.last_stage_layers
    if first is not None and layer < first:
        return 0
    if last is not None and layer >= layers - last:
        return p.pipeline - 1
    middle = p.pipeline * (p.virtual_pipeline or 1) - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    chunk = (layer - (first or 0)) * middle // rest + (first is not None)
    return chunk % p.pipeline


def parameters_by_stage(shape: ModelShape, p: Parallel) -> list[tuple[int, int]]:
    """(dense, expert) parameters of a rank of each pipeline stage, vocabulary padding included."""
    stages = [[0, 0] for _ in range(p.pipeline)]
    held: dict[str, int] = {}
    for entry in plan_for(shape):
        if entry.key not in held:
            # All layers and experts have the same shapes.
            held[entry.key] = _shard_size(entry, shape, p)
        for stage in _stages(entry, shape, p):
            stages[stage][entry.expert is not None] += held[entry.key]
    # Experts are dealt out evenly over the expert-parallel ranks.
    return [(dense, experts // p.expert) for dense, experts in stages]


def _shard_size(entry: Entry, shape: ModelShape, p: Parallel) -> int:
    tp = p.tensor if entry.expert is None else (p.expert_tensor or p.tensor)
    parts = [torch.empty(dims, device="meta") for dims in entry.hf_shapes]
    return entry.rule.shard(parts, shape, tp, 0).numel()


def _stages(entry: Entry, shape: ModelShape, p: Parallel) -> list[int]:
    if entry.index:
        return [stage_of_layer(entry.index[0], shape.layers, p)]
    last = p.pipeline - 1
    if entry.key.startswith(("output", "decoder.final")):
        return [last]
    # With tied embeddings the last stage holds a copy.
    return [0, last] if shape.tied and last > 0 else [0]


def rank_memory(config: Config, shape: ModelShape) -> list[RankMemory]:
    """One rank of each pipeline stage.

    Gradients are float32 (twice with `measure_refinement_gradient`), Adam keeps a float32 copy of
    the weights and two moments. With `kl_coef` the initial weights stay beside the policy's.
    """
    p, width = config.parallel, 4 if config.model.dtype == "float32" else 2
    copies = 2 if config.algorithm.kl_coef > 0 else 1
    buffers = 2 if _second_buffer(config) else 1
    out = []
    for stage, (dense, experts) in enumerate(parameters_by_stage(shape, p)):
        expert_data = p.world_size // (p.expert * (p.expert_tensor or p.tensor) * p.pipeline)
        shares = (p.data * p.context, expert_data) if config.optimizer.sharded else (1, 1)
        count = dense + experts
        out.append(
            RankMemory(
                stage,
                count,
                weights=count * width * copies,
                gradients=count * 4 * buffers,
                optimizer=12 * (dense // shares[0] + experts // shares[1]),
                activations=_activations(config, shape, stage),
            )
        )
    return out


def _second_buffer(config: Config) -> bool:
    return config.training.measure_refinement_gradient and config.algorithm.refines


def _activations(config: Config, shape: ModelShape, stage: int) -> int:
    """Of one stage while its micro-batches are on their way (1F1B: as many as stages follow)."""
    p, tokens = config.parallel, config.training.micro_batch_tokens
    width = 4 if config.model.dtype == "float32" else 2
    layers = sum(stage_of_layer(i, shape.layers, p) == stage for i in range(shape.layers))
    along = p.tensor if p.sequence_parallel else 1
    ffn = shape.ffn
    if shape.experts:
        ffn = shape.expert_ffn * shape.experts_per_token
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # Inputs of the norms, of the blocks and the residuals; then what is cut over the heads or the
    # width: q, k, v and the attention's output; gate, up and their product.
    hidden = 6 * shape.hidden // along
    cut = (2 * heads + shape.heads * shape.head_dim + 4 * ffn) // p.tensor
    layer = tokens * (hidden + cut) * width
    boundary = tokens * shape.hidden // along * width
    in_flight = min(p.pipeline - stage, p.pipeline) * (p.virtual_pipeline or 1)
    # Selective recomputation leaves out what flash attention never keeps.
    kept = boundary * layers if config.model.recompute == "full" else layer * layers
    working = layer if config.model.recompute == "full" else 0
    return in_flight * kept + working + _OUTPUT_CHUNK_BYTES


def engine_bytes(config: Config, gpu_bytes: int) -> int:
    """Share of a GPU that a colocated engine takes while it is awake."""
    if config.rollout.placement != "colocated":
        return 0
    return int(config.rollout.gpu_memory_utilization * gpu_bytes)


def needed_bytes(config: Config, shape: ModelShape, gpu_bytes: int) -> int:
    """Most memory of any GPU of the trainer: while the engines work, or in a training step."""
    ranks = rank_memory(config, shape)
    engine = engine_bytes(config, gpu_bytes)
    rollout = max(r.static for r in ranks) + engine
    training = max(r.training for r in ranks) + (SLEEPING_ENGINE if engine else 0)
    return max(rollout, training) + RESERVE
