"""vLLM plugin (entry point `vllm.general_plugins`): registers our CPU weight-transfer backend."""

BACKEND = "cgrpo_shm"


def register() -> None:
    """Called by vLLM in every process it starts; lazy, so it costs nothing where unused."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    module = "megatron_cgrpo.rollout.shm_transfer"
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, module, "ShmWeightTransferEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            BACKEND, module, "ShmTrainerWeightTransferEngine"
        )
