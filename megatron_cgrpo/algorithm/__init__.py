"""The algorithm's decisions and tensor maths: no I/O, no Megatron, no vLLM."""
