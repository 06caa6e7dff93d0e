"""Ranks that save over and over and are killed at random moments; a parent that starts them anew.

Run as `python -m tests.distributed.crash_worker JOB.json OUT.json`. The parent imports Megatron
once
and forks every pair of ranks, so that a life takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path


def life(job: dict, rank: int, port: int, background: bool, alive: Path) -> None:
    """One rank: load the latest checkpoint, check it against what was saved, train and save."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch.distributed as dist

    from megatron_cgrpo.policy.checkpoint import StateSaver, load_state
    from megatron_cgrpo.policy.states import latest_state, read_run_state
    from tests.distributed.checkpoint_worker import build, run

    actor = build(job["model"], {"tensor": 2})
    states = Path(job["states"])

    def digests() -> list[float]:
        mine = sum(p.detach().double().sum().item() for p in actor.model.chunks[0].parameters())
        out = [None, None]
        dist.all_gather_object(out, mine)
        return out

    first = 1
    latest = latest_state(states)
    if latest is not None:
        load_state(actor, latest)
        saved = read_run_state(latest)
        assert digests() == saved["digests"], "the weights are not those that were saved"
        first = saved["step"] + 1
    saver = StateSaver(actor, states, keep=2, background=background)
    for step in range(first, first + 1000):
        run(actor, step % 8, step % 8 + 1)
        saver.poll()
        saver.save(step, {"step": step, "digests": digests()})
        if rank == 0:
            alive.write_text(str(step))


def start(job: dict, port: int, background: bool, alive: Path) -> list[int]:
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            try:
                life(job, rank, port, background, alive)
            except BaseException:
                traceback.print_exc()
            os._exit(3)
        pids.append(pid)
    return pids


def main(job: dict, out: str) -> None:
    from megatron.core.dist_checkpointing.strategies import async_utils  # noqa: F401

    import megatron_cgrpo.policy.checkpoint  # noqa: F401

    rng, partial, steps = random.Random(0), 0, []
    for trial in range(job["kills"]):
        alive = Path(job["tmp"]) / f"alive-{trial}"
        pids = start(job, 29600 + trial, trial % 2 == 1, alive)
        deadline = time.monotonic() + 60
        while not alive.exists():
            ended = [p for p in pids if os.waitpid(p, os.WNOHANG)[0]]
            assert not ended and time.monotonic() < deadline, f"life {trial} did not start"
            time.sleep(0.01)
        time.sleep(rng.random())
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        partial += any(Path(job["states"]).glob(".step_*"))
        steps.append(int(alive.read_text()))
    Path(out).write_text(json.dumps({"steps": steps, "killed_while_saving": partial}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
