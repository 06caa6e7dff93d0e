"""Run a training job here through NeMo-Run: `python -m launch.local CONFIG [key.path=value …]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.job import local_script
from launch.settings import Cluster
from launch.submitted import SUBMITTED, as_yaml, run_directory, write_submitted
from megatron_cgrpo.config import ConfigError, load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run to the end; the job's outcome is the exit code, 2 for unusable input."""
    parser = argparse.ArgumentParser(prog="python -m launch.local", description=__doc__)
    parser.add_argument("config", type=Path, help="the trainer's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--python", default=Cluster.python, help="the trainer's Python")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        root = run_directory(config)
        script = local_script(root / SUBMITTED, args.python)
        if args.dry_run:
            print(as_yaml(config) + script)
            return 0
        write_submitted(config)
    except (ConfigError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return _run(script, root)


def _run(script: str, root: Path) -> int:
    os.environ["NEMORUN_HOME"] = str(root / "local")
    import nemo_run as run

    executor = run.LocalExecutor(packager=run.Packager())
    with run.Experiment(root.name, enable_goodbye_message=False) as experiment:
        experiment.add(run.Script(inline=script), executor=executor, name=root.name, tail_logs=True)
        experiment.run(detach=False)
    return 0 if all(job.state.name == "SUCCEEDED" for job in experiment.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
