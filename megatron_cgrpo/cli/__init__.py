"""The `cgrpo` command: one file a subcommand.

Each has `add(commands)`, which declares its arguments, and imports what it needs when it runs, so
that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_cgrpo import __version__
from megatron_cgrpo.cli import convert, data, grade, quickstart, study, train, warm_start
from megatron_cgrpo.config import ConfigError

COMMANDS = (train, grade, data, convert, quickstart, study, warm_start)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code (2 for unusable input)."""
    parser = argparse.ArgumentParser(prog="cgrpo", description="Critique-GRPO post-training")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    args = parser.parse_args(argv)
    # Dotted paths of the user's (feedback.verifiers) are found from where the command is run, as
    # with `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        return args.run(args)
    except (ConfigError, ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
