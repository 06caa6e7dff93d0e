"""Starting the trainer's ranks on this machine through torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO

from megatron_cgrpo.config.checks import check_disk
from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.plan import parameter_count
from megatron_cgrpo.process import die_with_parent
from megatron_cgrpo.training.directory import STOPPED, prepare_run_directory
from megatron_cgrpo.training.preflight import preflight

# A step may take long, and a stop waits for its end; a second signal does not.
SHUTDOWN_TIMEOUT_S = 24 * 3600
RELAY_GRACE_S = 5.0
GUARD_STOPPED = 3
"""Exit code: nothing failed, but going on would waste time."""


def rank_command(config: Config, root: Path) -> list[str]:
    """The torchrun command of a run."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={config.parallel.world_size}",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT_S}",
        "-m",
        "megatron_cgrpo.training.worker",
        str(root),
    ]


def rank_environment(config: Config) -> dict[str, str]:
    """Environment of the ranks."""
    env = dict(os.environ)
    if config.rollout.placement == "cpu":
        # Engines and trainer are built for the CPU, also on a machine that has GPUs.
        env["CUDA_VISIBLE_DEVICES"] = ""
        cores = os.cpu_count() or 1
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.parallel.world_size)))
        # megatron-core compiles fused helpers at import, which costs more than it gives here.
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
    env.setdefault("TORCHELASTIC_ERROR_FILE", os.devnull)
    env.setdefault("PYTHONWARNINGS", "ignore")
    # torchrun's agent logs tracebacks of its own about workers that have told their error.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return env


def prepare(config: Config, again: bool = False, nodes: int = 1) -> Path:
    """Check everything that can be checked and make the run directory; returns it.

    Args:
        again: as for `prepare_run_directory`.
        nodes: that the trainer's ranks run on.

    Raises:
        ConfigError, DataError: one sentence with what is wrong, where, and what to do.
    """
    shape = preflight(config, nodes).shape
    root = prepare_run_directory(config, again)
    width = 4 if config.model.dtype == "float32" else 2
    check_disk(root, parameter_count(shape) * width + (16 << 20))
    return root


def outcome_of(root: Path) -> tuple[str, str]:
    """How a run that ended without an error ended, and why: done; stopped, because it was asked to;
    guard, because of `training.guards`."""
    if not (root / STOPPED).exists():
        return "done", ""
    step, _, guard = (root / STOPPED).read_text().partition("\n")
    return ("guard", guard) if guard else ("stopped", f"after step {step}")


def run(config: Config) -> int:
    """Train in child processes; returns their exit code (0: all steps done or stopped cleanly;
    GUARD_STOPPED: stopped, with a checkpoint, by `training.guards`).

    The first Ctrl-C or SIGTERM asks for a stop after the current step, the second kills.

    Raises:
        ConfigError: before anything is started.
    """
    if config.rollout.own_nodes:
        raise ConfigError(
            f"rollout.own_nodes={config.rollout.own_nodes} needs a job of several nodes: start it "
            "with launch.slurm (docs/cluster.md)"
        )
    root = prepare(config)
    log = open(root / "stderr.log", "w", encoding="utf-8")
    child = subprocess.Popen(
        rank_command(config, root),
        env=rank_environment(config),
        start_new_session=True,
        preexec_fn=die_with_parent,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    signals = 0

    def forward(signum, frame) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            print("stopping after this step (again: at once)", file=sys.stderr, flush=True)
            # The agent passes it to every rank and waits for them.
            child.send_signal(signal.SIGTERM)
        else:
            child.kill()  # the ranks die with their agent

    previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        relay = threading.Thread(target=_relay, args=(child, log), daemon=True)
        relay.start()
        code = child.wait()
        # What the ranks left running must not keep the pipe, and with it this command, open.
        relay.join(RELAY_GRACE_S)
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
        if child.poll() is None:
            child.kill()
    # torchrun's agent reports the signal that it was sent as a failure.
    outcome, _ = outcome_of(root)
    if outcome != "done":
        return GUARD_STOPPED if outcome == "guard" else 0
    if code:
        print(f"all that the ranks said: {root / 'stderr.log'}", file=sys.stderr, flush=True)
    return code


def _relay(child: subprocess.Popen, log: TextIO) -> None:
    """Keep the ranks' standard error in the run directory; show what users can act on.

    torchrun's own tracebacks repeat what a rank has said: they start at its module's entry.
    """
    show, pending = False, ""
    with log:
        for line in child.stderr:
            with contextlib.suppress(OSError):
                log.write(line)
                log.flush()
            if line.startswith("Traceback (most recent call last)"):
                pending = line
                continue
            if pending:
                show = "<frozen runpy>" not in line
            elif line.startswith("error: "):
                show = True
            elif "torch/distributed/elastic" in line:
                show = False
            if show:
                with contextlib.suppress(OSError):
                    sys.stderr.write(pending + line)
                    sys.stderr.flush()
            pending = ""
