"""`cgrpo train`: train a policy, or only check what would be trained."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from megatron_cgrpo.config import Config, load_config


def add(commands) -> None:
    train = commands.add_parser("train", help="train a policy")
    train.add_argument("config", help="YAML file")
    train.add_argument("overrides", nargs="*", metavar="key.path=value")
    train.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would be started"
    )
    train.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_cgrpo.training import launch

    config = load_config(args.config, args.overrides)
    return _dry_run(config) if args.dry_run else launch.run(config)


def _dry_run(config: Config) -> int:
    from megatron_cgrpo.config.checks import context_of
    from megatron_cgrpo.rollout.server import server_command
    from megatron_cgrpo.training import launch
    from megatron_cgrpo.training.preflight import preflight

    checked, context = preflight(config), context_of(config)
    root = Path(config.run.directory).absolute() / config.run.name
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    if config.rollout.placement != "cpu":
        _print_memory(config, checked.shape)
    for note in checked.notes:
        print(f"# {note}")
    print(f"# responses end with the tokens {', '.join(map(str, checked.end_token_ids))}")
    print("# trainer:\n" + " ".join(launch.rank_command(config, root)))
    if not config.rollout.urls:
        for i in range(config.rollout.servers):
            port = config.rollout.port + i if config.rollout.port else "<free port>"
            print(f"# engine {i}:\n" + " ".join(server_command(config, context, port)))
    return 0


def _print_memory(config: Config, shape) -> None:
    """The estimate of GPU memory, by pipeline stage."""
    from megatron_cgrpo.planning.memory import GIB, rank_memory

    print("# GiB of a rank: weights, gradients, optimizer, activations (estimate)")
    for r in rank_memory(config, shape):
        parts = (r.weights, r.gradients, r.optimizer, r.activations)
        print(f"# stage {r.stage}: " + ", ".join(f"{b / GIB:.1f}" for b in parts))
    if config.rollout.placement == "colocated":
        share = config.rollout.gpu_memory_utilization
        print(f"# beside it, while responses are sampled: {share:.0%} of the GPU for the engine")
