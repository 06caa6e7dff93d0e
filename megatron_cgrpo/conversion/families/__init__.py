"""The model families. To add one: a file like `llama.py`, and a place in FAMILIES
(docs/adding_a_family.md walks through it)."""

from megatron_cgrpo.conversion.families.llama import LLAMA
from megatron_cgrpo.conversion.families.qwen2 import QWEN2
from megatron_cgrpo.conversion.families.qwen3 import QWEN3
from megatron_cgrpo.conversion.families.qwen3_moe import QWEN3_MOE

FAMILIES = {f.model_type: f for f in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
