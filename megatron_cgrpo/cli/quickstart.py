"""`cgrpo quickstart`: the paper's effect in small, on any machine."""

from __future__ import annotations

import argparse


def add(commands) -> None:
    quick = commands.add_parser("quickstart", help="the paper's effect in small, on any machine")
    quick.add_argument("--directory", default="runs/quickstart")
    quick.add_argument("--seed", type=int, default=0)
    quick.add_argument("--steps", type=int, default=None, help="RL steps of each method")
    quick.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_cgrpo.studies.quickstart import run_quickstart

    return run_quickstart(args.directory, args.seed, args.steps)
