"""Everything that lets megatron-core 0.16 run without CUDA (gloo, CPU tensors), in one place.

Inactive when CUDA is there: `install` and `cuda_names` then do nothing. What is adapted, and why:

* `torch.cuda.current_device/synchronize`, called unconditionally all over megatron-core;
* literals `device="cuda"` and `.cuda()` while models and optimizers are built and stepped: a
  TorchFunctionMode that is entered only there (`cuda_names`), since it costs 1.6–1.9× on tiny
  models when it is always on;
* the CUDA RNG tracker, on CPU generators;
* streams of the mixtures' token dispatcher (`_dispatch_without_streams`);
* gathers and scatters of different lengths per rank (`_uneven_collectives`);
* pinned memory for the rotary embedding of context-parallel ranks (`_positions_unpinned`);
* loading Adam's state without TransformerEngine (`_load_without_step`);
* `schedules.py`'s `torch.zeros(..., device="cuda")`, on the hot path: a module-local `torch`.

All of it is needed by releases 0.16–0.19 (read from their sources), verified with 0.16.1.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_cgrpo.policy.context import held_positions

CPU = torch.device("cpu")


class _CudaNames(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizer sorts parameters by names such as "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def cuda_names() -> contextlib.AbstractContextManager[Any]:
    """Inside, CUDA device names mean the CPU. Around model build and optimizer build and step."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaNames()


class _TorchForSchedules(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, **kwargs)


def install() -> None:
    """Adapt megatron-core to this machine; once per process, before anything is built."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = lambda device=None: None

    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as rng

    schedules.torch = _TorchForSchedules("torch")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    class CpuRNGStatesTracker(rng.CudaRNGStatesTracker):
        def add(self, name, seed):
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or its seed {seed} is in use")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name=rng._MODEL_PARALLEL_RNG_TRACKER_NAME):
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    rng.CudaRNGStatesTracker = CpuRNGStatesTracker
    _load_without_step()
    _dispatch_without_streams()
    _uneven_collectives()
    _positions_unpinned()


def _positions_unpinned() -> None:
    """Context-parallel ranks take their positions' embedding through pinned memory."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def of_rank(pos_emb, seq_dim, cp_group):
        held = held_positions(cp_group.rank(), cp_group.size(), [0, pos_emb.size(seq_dim)])
        return pos_emb.index_select(seq_dim, held)

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = of_rank


def _dispatch_without_streams() -> None:
    """The all-to-all dispatcher of mixtures copies its split sizes to the host on a CUDA stream,
    and the router looks up a TransformerEngine function that is not imported without it.
    """
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def to_host(self, point, tokens_per_expert=None):
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name, None)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert

    # Any stream, so that none is made.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = to_host


def _load_without_step() -> None:
    """Loading the distributed optimizer sets every entry of Adam's state from the checkpoint's
    tensors; torch's Adam (used without TransformerEngine and apex) has a `step` there, which is
    saved elsewhere.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def set_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            for name, value in {"param": main, **self.optimizer.state[main]}.items():
                if name != "step":
                    value.copy_(tensors[name])

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def _uneven_collectives() -> None:
    """Tensor-parallel experts gather and scatter different numbers of tokens per rank, which gloo's
    collectives refuse.
    """
    from megatron.core.tensor_parallel import mappings

    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, output_split_sizes)])

    def scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _current_device() -> torch.device:
    return CPU
