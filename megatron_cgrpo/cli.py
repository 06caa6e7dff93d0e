"""The `cgrpo` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_cgrpo import __version__
from megatron_cgrpo.config import ConfigError, load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for unusable input)."""
    parser = argparse.ArgumentParser(prog="cgrpo", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy")
    train.add_argument("config", help="YAML file")
    train.add_argument("overrides", nargs="*", metavar="key.path=value")
    train.add_argument(
        "--dry-run", action="store_true", help="check everything, print what would be started"
    )
    train.set_defaults(run=_train)

    grade = commands.add_parser("grade", help="verdicts on a file of responses")
    grade.add_argument("file", type=Path, help='JSONL of {"id", "kind", "answer", "response"}')
    grade.add_argument("--out", type=Path, required=True, help="JSONL of verdicts")
    grade.add_argument("--workers", type=int, default=os.cpu_count())
    grade.set_defaults(run=_grade)

    data = commands.add_parser("data", help="look at problem files")
    checks = data.add_subparsers(required=True, metavar="ACTION")
    check = checks.add_parser("check", help="can every gold answer be judged against?")
    check.add_argument("file", type=Path, help="problems, .jsonl or .parquet")
    check.add_argument("--kind", default="math", help="verifier of records that name none")
    check.add_argument("--question", nargs="*", default=[], help="field(s) of the question")
    check.add_argument("--answer", help="field of the gold answer")
    check.add_argument("--id", help="field of the problem's name")
    check.add_argument("--workers", type=int, default=os.cpu_count())
    check.set_defaults(run=_check_data)

    convert = commands.add_parser("convert", help="checkpoints between Hugging Face and Megatron")
    tools = ("hf_to_megatron", "megatron_to_hf", "verify", "inspect")
    convert.add_argument("tool", choices=tools)
    convert.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the tool: see -h")
    convert.set_defaults(run=_convert)

    quick = commands.add_parser("quickstart", help="the paper's effect in small, on any machine")
    quick.add_argument("--directory", default="runs/quickstart")
    quick.add_argument("--seed", type=int, default=0)
    quick.add_argument("--steps", type=int, default=None, help="RL steps of each method")
    quick.set_defaults(run=_quickstart)

    study = commands.add_parser("study", help="questions about the method, in the chain world")
    study.add_argument("question", choices=("critiques", "noise"))
    study.add_argument("--directory", help="default: runs/study_QUESTION")
    study.add_argument("--seed", type=int, default=0)
    study.add_argument("--steps", type=int, default=None, help="RL steps of each run")
    study.add_argument(
        "--kind", choices=("flip", "swap"), default="flip", help="how noise disturbs a critique"
    )
    study.set_defaults(run=_study)

    warm = commands.add_parser("warm-start", help="rebuild the quickstart's warm-started policy")
    warm.add_argument("out", help="directory of the Hugging Face checkpoint to write")
    warm.add_argument("--steps", type=int, default=None)
    warm.add_argument("--seed", type=int, default=0)
    warm.set_defaults(run=_warm_start)

    args = parser.parse_args(argv)
    # Dotted paths of the user's (feedback.verifiers) are found from where the command is run, as
    # with `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        return args.run(args)
    except (ConfigError, ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _train(args: argparse.Namespace) -> int:
    from megatron_cgrpo.training import launch

    config = load_config(args.config, args.overrides)
    if args.dry_run:
        return _dry_run(config)
    return launch.run(config)


def _dry_run(config) -> int:
    from megatron_cgrpo.config.checks import context_of
    from megatron_cgrpo.rollout.server import server_command
    from megatron_cgrpo.training import launch
    from megatron_cgrpo.training.preflight import preflight

    shape, context = preflight(config), context_of(config)
    root = Path(config.run.directory).absolute() / config.run.name
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    if config.rollout.placement != "cpu":
        _print_memory(config, shape)
    print("# trainer:\n" + " ".join(launch.rank_command(config, root)))
    if not config.rollout.urls:
        for i in range(config.rollout.servers):
            port = config.rollout.port + i if config.rollout.port else "<free port>"
            print(f"# engine {i}:\n" + " ".join(server_command(config, context, port)))
    return 0


def _print_memory(config, shape) -> None:
    """The estimate of GPU memory, by pipeline stage."""
    from megatron_cgrpo.planning.memory import GIB, rank_memory

    print("# GiB of a rank: weights, gradients, optimizer, activations (estimate)")
    for r in rank_memory(config, shape):
        parts = (r.weights, r.gradients, r.optimizer, r.activations)
        print(f"# stage {r.stage}: " + ", ".join(f"{b / GIB:.1f}" for b in parts))
    if config.rollout.placement == "colocated":
        share = config.rollout.gpu_memory_utilization
        print(f"# beside it, while responses are sampled: {share:.0%} of the GPU for the engine")


def _grade(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.feedback.grade import grade_file

    counts = grade_file(args.file, args.out, Feedback(workers=args.workers))
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 0


def _check_data(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.config.schema import Fields
    from megatron_cgrpo.data.problems import load_problems
    from megatron_cgrpo.feedback.grade import check_problems

    fields = Fields(question=tuple(args.question), answer=args.answer, id=args.id)
    problems = load_problems(args.file, fields, args.kind)
    return check_problems(problems, Feedback(workers=args.workers))


def _convert(args: argparse.Namespace) -> int:
    from checkpoint_tools.common import run

    tool = importlib.import_module(f"checkpoint_tools.{args.tool}")
    return run(tool, args.arguments, prog=f"cgrpo convert {args.tool}")


def _quickstart(args: argparse.Namespace) -> int:
    from megatron_cgrpo.worlds.quickstart import run_quickstart

    return run_quickstart(args.directory, args.seed, args.steps)


def _study(args: argparse.Namespace) -> int:
    directory = args.directory or f"runs/study_{args.question}"
    if args.question == "noise":
        from megatron_cgrpo.worlds.noise_study import run_noise_study

        return run_noise_study(directory, args.seed, args.steps, args.kind)
    from megatron_cgrpo.worlds.critique_study import run_critique_study

    return run_critique_study(directory, args.seed, args.steps)


def _warm_start(args: argparse.Namespace) -> int:
    from megatron_cgrpo.worlds.warm_start import launch_warm_start

    return launch_warm_start(args.out, args.steps, args.seed)


if __name__ == "__main__":
    sys.exit(main())
