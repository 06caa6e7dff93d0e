"""Entry point of a trainer rank that a launcher started under torchrun, on any number of nodes:
`python -m megatron_cgrpo.training.cluster CONFIG.yaml`.

Rank 0 checks the configuration and makes the run directory; a job that is started again continues
its run. How the run ended stands in the file `outcome` there, for whoever decides whether to start
the job again: done, stopped (asked to, with a checkpoint), guard (stopped by `training.guards`) or
refused (an error that another attempt will not mend), and why. Without it the job was killed or
crashed.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from megatron_cgrpo.process import die_with_parent
from megatron_cgrpo.training.worker import leave, report_error

OUTCOME = "outcome"
DONE, CONTINUE = 0, 85


def main(file: str) -> int:
    """Train; the exit code of this rank. Non-zero for a run that is not done."""
    die_with_parent()
    logging.getLogger("vllm").setLevel(logging.WARNING)
    from megatron_cgrpo.config import ConfigError, load_config

    try:
        config = load_config(file)
    except ConfigError as e:
        # The same on every rank; without a configuration there is no place to write it down.
        return report_error(e)
    root = Path(config.run.directory) / config.run.name
    try:
        return _train(config, root)
    except Exception as e:
        if isinstance(e, (ConfigError, ValueError)) and _rank() == 0:
            _write(root, "refused", str(e))
        return report_error(e)


def _train(config, root: Path) -> int:
    from megatron_cgrpo.config import load_config
    from megatron_cgrpo.policy.parallel import join
    from megatron_cgrpo.training.exchange import share_error
    from megatron_cgrpo.training.launch import outcome_of, prepare
    from megatron_cgrpo.training.loop import train

    join(config.training.collective_timeout_s)
    error: Exception | None = None
    if _rank() == 0:
        try:
            prepare(config, again=int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0)
        except Exception as e:
            error = e
    share_error(error)
    if _is_finished(config, root):
        # The next job of a chain, or one that was requeued while it ended.
        return _end(root, "done", "it was finished before")
    train(load_config(root / "config.yaml"), root)
    return _end(root, *outcome_of(root))


def _end(root: Path, outcome: str, reason: str) -> int:
    if _rank() == 0:
        _write(root, outcome, reason)
    return DONE if outcome == "done" else CONTINUE


def _is_finished(config, root: Path) -> bool:
    """Whether the last step's checkpoint and export are there: the same on every rank."""
    from megatron_cgrpo.policy.states import STATES, latest_state, read_run_state

    last = latest_state(root / STATES)
    exported = root / "checkpoints" / f"step_{config.training.steps:06d}"
    done = last is not None and read_run_state(last)["step"] >= config.training.steps
    return done and exported.exists()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _write(root: Path, outcome: str, reason: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{OUTCOME}.partial"
    partial.write_text(f"{outcome}\n{reason}\n", encoding="utf-8")
    os.replace(partial, root / OUTCOME)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
