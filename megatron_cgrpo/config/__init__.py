"""Typed configuration: YAML files, dotted overrides, method presets, checks at start."""

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.load import apply_overrides, load_config, parse_config
from megatron_cgrpo.config.schema import Config

__all__ = ["Config", "ConfigError", "apply_overrides", "load_config", "parse_config"]
