"""The Megatron-core actor: model, scoring, training step, optimizer, export."""
