"""A small configuration around a tiny model, for tests that start real engines."""

from __future__ import annotations

from pathlib import Path

from megatron_cgrpo.config import Config, parse_config


def tiny_config(root: Path, **sections) -> Config:
    base = {
        "model": {"path": str(root), "dtype": "float32"},
        "data": {"path": "unused"},
        "optimizer": {"lr": 0.0},
        "rollout": {
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
            "kv_cache_mib": 32,
            "bucket_mib": 1,
            "start_timeout_s": 300,
            "request_timeout_s": 120,
        },
        "training": {"problems_per_step": 4, "micro_batch_tokens": 256},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return parse_config(base)
