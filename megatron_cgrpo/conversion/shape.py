"""Dimensions and switches of a decoder, in one flat form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and switches of a decoder. `family` names its table of tensors."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """`rope_parameters` of transformers (kind under `rope_type`); None: no scaling."""
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Routed experts a layer; 0: a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    normalize_top_k: bool = False
    """The chosen experts' weights sum to one."""

    # What the tables of the families name: see `sizes` and `families/base.py`.

    @property
    def untied(self) -> bool:
        return not self.tied

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    def sizes(self, names: str) -> tuple[int, ...]:
        """The shape that a table writes as names of dimensions: "q hidden"."""
        return tuple(getattr(self, name) for name in names.split())
