"""Critique-GRPO (arXiv 2506.03106) post-training on Megatron-core and vLLM."""

__version__ = "0.1.0"
