"""`cgrpo warm-start`: rebuild the quickstart's warm-started policy."""

from __future__ import annotations

import argparse


def add(commands) -> None:
    warm = commands.add_parser("warm-start", help="rebuild the quickstart's warm-started policy")
    warm.add_argument("out", help="directory of the Hugging Face checkpoint to write")
    warm.add_argument("--steps", type=int, default=None)
    warm.add_argument("--seed", type=int, default=0)
    warm.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_cgrpo.studies.warm_start import launch_warm_start

    return launch_warm_start(args.out, args.steps, args.seed)
