"""Entry point of a trainer rank that a launcher started under torchrun, on any number of nodes:
`python -m megatron_cgrpo.training.cluster CONFIG.yaml --attempt NAME`.

Rank 0 checks the configuration and makes the run directory; a job that is started again continues
its run. How the run ended stands in the file `outcome` there, for whoever decides whether to start
the job again: done, stopped (asked to, with a checkpoint), guard (stopped by `training.guards`) or
refused (an error that another attempt will not mend), and why. Without it the job was killed or
crashed.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_cgrpo.process import die_with_parent
from megatron_cgrpo.training.worker import leave, report_error

OUTCOME = "outcome"
RANK_ZERO_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code of this rank: 0 when the run ended as `outcome` says, 1 for an error."""
    die_with_parent()
    logging.getLogger("vllm").setLevel(logging.WARNING)
    from megatron_cgrpo.config import ConfigError, load_config

    args = _parser().parse_args(argv)
    # The launcher writes the configuration into the run directory.
    root = Path(args.config).absolute().parent
    try:
        config = load_config(args.config, args.overrides)
        _train(config, root, args.attempt, args.again)
    except Exception as e:
        if _rank() == 0:
            if isinstance(e, (ConfigError, ValueError)):
                _write(root, "refused", str(e))
        elif isinstance(e, ConfigError):
            # The same on every rank. Rank 0 tells it and ends the job, not who leaves before.
            time.sleep(RANK_ZERO_S)
            return 1
        return report_error(e)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_cgrpo.training.cluster")
    parser.add_argument("config", help="the job's configuration")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--attempt", required=True, help="name of this attempt of the job")
    parser.add_argument(
        "--again", action="store_true", help="an earlier attempt may have left an unfinished run"
    )
    return parser


def _train(config, root: Path, attempt: str, again: bool) -> None:
    from megatron_cgrpo.policy.parallel import join
    from megatron_cgrpo.rollout.nodes import Meeting, trainer_nodes
    from megatron_cgrpo.rollout.server import EngineError
    from megatron_cgrpo.training.exchange import from_rank_zero
    from megatron_cgrpo.training.launch import outcome_of, prepare
    from megatron_cgrpo.training.loop import train

    join(config.training.collective_timeout_s)
    meeting, nodes = Meeting(root, attempt), trainer_nodes()[1]
    from_rank_zero(lambda: prepare(config, again, nodes))
    # Where another rank looks, a shared file system may show an older state.
    if from_rank_zero(lambda: _is_finished(config, root)):
        # The next job of a chain, or one that was requeued while it ended.
        _end(root, meeting, "done", "it was finished before")
        return
    several = nodes > 1 or config.rollout.own_nodes > 0
    train(config, root, meeting if several else None)
    if _rank() != 0:
        return
    outcome, reason = outcome_of(root)
    if outcome == "stopped" and (death := meeting.first_death()) is not None:
        # The ranks were stopped because a server's node left the job.
        raise EngineError(death)
    _end(root, meeting, outcome, reason)


def _end(root: Path, meeting, outcome: str, reason: str) -> None:
    if _rank() == 0:
        _write(root, outcome, reason)
        meeting.close()


def _is_finished(config, root: Path) -> bool:
    """Whether the last step's checkpoint and export are there."""
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
    leave(main())
