"""What a launcher leaves in the run directory before a job starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from launch import supervisor
from megatron_cgrpo.config import Config, ConfigError

SUBMITTED = "submitted.yaml"
"""The configuration as it was when the job was submitted."""


def run_directory(config: Config) -> Path:
    """Where the run's files go: the same for every job that continues it.

    Raises:
        ConfigError: for a path that means something else on other nodes.
    """
    directory, name = config.run.directory, config.run.name
    if not directory.startswith("/"):
        raise ConfigError(
            f"run.directory={directory!r} must be an absolute path that all nodes share "
            "(no ~: homes differ inside containers)"
        )
    if "/nemo_run" in f"{directory}/{name}":
        raise ConfigError(
            f"run.directory={directory!r}: NeMo-Run replaces /nemo_run wherever it stands in a "
            "job's script; choose another path"
        )
    return Path(directory) / name


def as_yaml(config: Config) -> str:
    """The configuration with every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_submitted(config: Config) -> Path:
    """Write the configuration, as it is when the job is submitted, and the job's supervisor.

    What earlier jobs of the run said of their end is forgotten.
    """
    root = run_directory(config)
    root.mkdir(parents=True, exist_ok=True)
    for name in (supervisor.OUTCOME, supervisor.FAILURES):
        (root / name).unlink(missing_ok=True)
    shutil.copyfile(supervisor.__file__, root / Path(supervisor.__file__).name)
    file = root / SUBMITTED
    file.write_text(as_yaml(config), encoding="utf-8")
    return file
