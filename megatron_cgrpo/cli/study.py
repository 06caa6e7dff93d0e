"""`cgrpo study`: questions about the method, in the chain world."""

from __future__ import annotations

import argparse


def add(commands) -> None:
    study = commands.add_parser("study", help="questions about the method, in the chain world")
    study.add_argument("question", choices=("critiques", "noise"))
    study.add_argument("--directory", help="default: runs/study_QUESTION")
    study.add_argument("--seed", type=int, default=0)
    study.add_argument("--steps", type=int, default=None, help="RL steps of each run")
    study.add_argument(
        "--kind", choices=("flip", "swap"), default="flip", help="how noise disturbs a critique"
    )
    study.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    directory = args.directory or f"runs/study_{args.question}"
    if args.question == "noise":
        from megatron_cgrpo.studies.noise import run_noise_study

        return run_noise_study(directory, args.seed, args.steps, args.kind)
    from megatron_cgrpo.studies.critiques import run_critique_study

    return run_critique_study(directory, args.seed, args.steps)
