"""Entry point of a trainer rank: `python -m megatron_cgrpo.training.worker RUN_DIRECTORY`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from megatron_cgrpo.process import die_with_parent

USER_ERRORS = ("ConfigError", "DataError", "EngineError", "NonFiniteGradient", "RankZeroFailed")


def main() -> int:
    """Train; returns the exit code. Errors that a user can act on are told without a traceback."""
    # torchrun gives every rank a session of its own: a killed agent would leave them running.
    die_with_parent()
    warnings.filterwarnings("ignore")
    logging.getLogger("vllm").setLevel(logging.WARNING)
    root = Path(sys.argv[1])
    try:
        from megatron_cgrpo.config import load_config
        from megatron_cgrpo.training.loop import train

        train(load_config(root / "config.yaml"), root)
    except Exception as e:
        return report_error(e)
    return 0


def report_error(error: Exception) -> int:
    """Say once, on rank 0 where it is everybody's, what went wrong; the exit code of a rank."""
    kind = type(error).__name__
    if kind == "RankZeroFailed":
        return 1
    if kind in USER_ERRORS or isinstance(error, (OSError, ValueError)):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return 1


def leave(code: int) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    # megatron-core's checkpoint writer keeps a spawned process, which exit handlers would end.
    for child in multiprocessing.active_children():
        child.kill()
    # After an error the other ranks may be gone: do not wait for them in destructors.
    os._exit(code)


if __name__ == "__main__":
    leave(main())
