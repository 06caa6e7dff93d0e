"""What a launcher is told about the cluster: a YAML profile, and options that go before it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_cgrpo.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cluster:
    """Settings of a Slurm cluster; the names of the options are those of NVIDIA's launchers.

    `nodes`: default: as many as the ranks need at `gpus_per_node`.
    `signal_s`: seconds before the time limit at which the ranks are asked to stop.
    `python`: the trainer's; `host_python` (3.8 or newer) runs the job's supervisor, outside of
    containers.
    `max_restarts`: failures after which a job is not tried again (configuration errors never are).
    """

    account: str = ""
    partition: str | None = None
    time: str = "04:00:00"
    nodes: int | None = None
    gpus_per_node: int | None = None
    exclusive: bool = False
    mem: str | None = None
    container_image: str | None = None
    mount: tuple[str, ...] = ()
    python: str = str(REPOSITORY / ".venv" / "bin" / "python")
    host_python: str = "python3"
    env: dict[str, str] = field(default_factory=dict)
    signal_s: int = 300
    max_restarts: int = 3
    backoff_s: int = 30
    srun_args: tuple[str, ...] = ()
    sbatch: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each setting; those that can be repeated add to the profile's."""
    parser.add_argument("--cluster", type=Path, help="profile, launch/clusters/*.yaml")
    parser.add_argument("--account")
    parser.add_argument("--partition")
    parser.add_argument("--time", help="time limit of one job, HH:MM:SS")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--exclusive", action="store_const", const=True)
    parser.add_argument("--mem")
    parser.add_argument("--container-image", help="pyxis/enroot image; none: run on the host")
    parser.add_argument("--mount", action="append", metavar="SRC:DST")
    parser.add_argument("--python", help="the trainer's Python on the nodes")
    parser.add_argument("--host-python", help="a plain Python on the first node's host")
    parser.add_argument("--env", action="append", metavar="KEY=VALUE")
    parser.add_argument("--signal-s", type=int, help="seconds between the warning and the limit")
    parser.add_argument("--max-restarts", type=int, help="failures before a job is given up")
    parser.add_argument("--backoff-s", type=int, help="pause before the first retry; it doubles")


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The profile with the given options in place of its settings.

    Raises:
        ConfigError: unknown or missing settings.
    """
    cluster = _profile(args.cluster) if args.cluster else Cluster()
    changes: dict[str, Any] = {}
    for f in fields(Cluster):
        given = getattr(args, f.name, None)
        if given is None:
            continue
        if f.name == "env":
            given = cluster.env | dict(_pair(item) for item in given)
        elif f.name == "mount":
            given = (*cluster.mount, *given)
        changes[f.name] = given
    cluster = replace(cluster, **changes)
    if not cluster.account:
        raise ConfigError("name the account to charge: --account, or account in the profile")
    return cluster


def _profile(path: Path) -> Cluster:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"cannot read {path}: {' '.join(str(e).split())}") from e
    known = {f.name for f in fields(Cluster)}
    unknown = raw.keys() - known
    if unknown:
        raise ConfigError(f"{path}: unknown {sorted(unknown)}; known: {', '.join(sorted(known))}")
    for name in ("mount", "srun_args"):
        raw[name] = tuple(raw.get(name, ()))
    for name in ("env", "sbatch"):
        raw[name] = {k: str(v) for k, v in raw.get(name, {}).items()}
    return Cluster(**raw)


def _pair(item: str) -> tuple[str, str]:
    key, sep, value = item.partition("=")
    if not sep:
        raise ConfigError(f"--env {item!r} is not of the form KEY=VALUE")
    return key, value
