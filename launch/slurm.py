"""Submit a run to Slurm: `python -m launch.slurm CONFIG --account NAME … [key.path=value …]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.job import node_script, setup_lines
from launch.layout import layout_of
from launch.settings import Cluster, add_arguments, cluster_of
from launch.submitted import as_yaml, run_directory, write_submitted
from megatron_cgrpo.config import Config, ConfigError, load_config


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m launch.slurm", description=__doc__)
    p.add_argument("config", type=Path, help="the trainer's YAML file")
    p.add_argument("overrides", nargs="*", metavar="key.path=value")
    add_arguments(p)
    p.add_argument("--dry-run", action="store_true", help="print the sbatch script, submit nothing")
    p.add_argument("--wait", action="store_true", help="until the run has ended; its exit code")
    p.add_argument("--tail-logs", action="store_true", help="with --wait: show the log")
    p.add_argument("--chain", type=int, default=1, metavar="K", help="K jobs that go on in turn")
    p.add_argument(
        "--requeue", action="store_true", help="a job that stopped or failed is requeued"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Submit; 0 when submitted, or with --wait when the run ended well. 2 for unusable input."""
    args = parser().parse_intermixed_args(argv)
    try:
        config, cluster = load_config(args.config, args.overrides), cluster_of(args)
        if args.chain < 1:
            raise ConfigError("--chain takes a number of jobs from 1")
        if args.chain > 1 and args.requeue:
            raise ConfigError("--chain and --requeue both continue a run: choose one")
        layout_of(config, cluster)
        return _submit(args, config, cluster)
    except (ConfigError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def _submit(args: argparse.Namespace, config: Config, cluster: Cluster) -> int:
    root = run_directory(config)
    if args.dry_run:
        print(as_yaml(config))
        with tempfile.TemporaryDirectory() as scratch:
            _experiment(args, config, cluster, Path(scratch)).dryrun(
                log=False, delete_exp_dir=False
            )
            for script in sorted(Path(scratch).rglob("*.sh")):
                print(f"# {script.name}\n{script.read_text()}")
        return 0
    write_submitted(config)
    with _experiment(args, config, cluster, root / "slurm") as experiment:
        experiment.run(detach=not args.wait)
    if not args.wait:
        return 0
    states = {job.id: job.state.name for job in experiment.jobs}
    print(", ".join(f"{name}: {state}" for name, state in states.items()))
    return 0 if list(states.values())[-1] == "SUCCEEDED" else 1


def _experiment(args: argparse.Namespace, config: Config, cluster: Cluster, base: Path):
    """The jobs of the run, not yet submitted; those of a chain follow one another."""
    # Read at import: the launcher's files are the run's, not the user's home's.
    os.environ["NEMORUN_HOME"] = str(base)
    import nemo_run as run

    from launch.nemo import slurm_executor

    root = run_directory(config)
    experiment = run.Experiment(root.name, enable_goodbye_message=False)
    with experiment:
        before: list[str] = []
        for i in range(args.chain):
            setup = setup_lines(config, cluster, args.requeue)
            executor = slurm_executor(cluster, layout_of(config, cluster).nodes, setup)
            script = run.Script(inline=node_script(config, cluster, again=i > 0))
            name = root.name if args.chain == 1 else f"{root.name}-{i}"
            before = [
                experiment.add(
                    script,
                    executor=executor,
                    name=name,
                    tail_logs=args.tail_logs,
                    dependencies=list(before),
                )
            ]
    return experiment


if __name__ == "__main__":
    sys.exit(main())
