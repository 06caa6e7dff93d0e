"""Hugging Face tensors ⇄ Megatron shards: one declarative table per model family."""
