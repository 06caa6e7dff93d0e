"""The shell of a job: what runs on each node, and when the job is tried again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from launch.layout import layout_of
from launch.settings import Cluster
from launch.trainer_config import option, run_directory

SUBMITTED = "submitted.yaml"
"""The configuration as it was when the job was submitted."""
OUTCOME = "outcome"
"""File of the run directory in which the trainer says how it ended: see training/cluster.py."""
FAILURES = "failures"
"""File of the run directory with a line for each attempt that ended without an outcome."""
# Every job has a block of ports below those that the system gives out, by its id: the master's,
# then those of the servers (rollout.port), of a critic's and of a refiner's.
_FIRST_PORT, _PORTS, _BLOCKS = 20_000, 256, 47
_EXIT_CODES = {"stopped": 85, "guard": 3}
# The agent waits this long for ranks that finish their step after the warning.
_SHUTDOWN_S = 24 * 3600
_LONGEST_PAUSE_S = 600


def node_script(config: dict[str, Any], cluster: Cluster, again: bool = False) -> str:
    """What every node runs: torchrun with this node's ranks, or the servers of a node of theirs.

    Its exit code says on the first node how the run ended.

    Args:
        again: the job continues what an earlier one began.
    """
    layout = layout_of(config, cluster)
    root = run_directory(config)
    # Ignored by torchrun's agent and by the servers; the ranks handle it.
    # On SIGTERM this shell waits for the ranks too.
    lines = ["trap '' USR1", "trap : TERM"]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in _environment(config, cluster).items()]
    common = [str(root / SUBMITTED), "--attempt", "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"]
    if option(config, "rollout.port", None) is None:
        common.insert(1, "rollout.port=$((MASTER_PORT + 1))")
    if layout.server_nodes:
        serve = [cluster.python, "-m", "megatron_cgrpo.rollout.host", *common]
        serve += ["--node", f"$((SLURM_NODEID - {layout.trainer_nodes}))"]
        lines += [f"if [ $SLURM_NODEID -ge {layout.trainer_nodes} ]; then"]
        lines += [f"  exec {_joined(serve)}", "fi"]
    command = [cluster.python, "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={layout.ranks}", "--max-restarts=0"]
    command += [f"--shutdown-timeout={_SHUTDOWN_S}", f"--nnodes={layout.trainer_nodes}"]
    command += ["--node-rank=$SLURM_NODEID", "--master-addr=$MASTER_ADDR"]
    command += ["--master-port=$MASTER_PORT", "-m", "megatron_cgrpo.training.cluster", *common]
    command += ["--again"] if again else ["${SLURM_RESTART_COUNT:+--again}"]
    lines += [f"{_joined(command)} || exit $?", "[ $SLURM_NODEID = 0 ] || exit 0"]
    outcome = shlex.quote(str(root / OUTCOME))
    lines.append(f"case $(head -n 1 {outcome}) in")
    lines += [f"  {ended}) exit {code} ;;" for ended, code in _EXIT_CODES.items()]
    lines += ["esac"]
    return "\n".join(lines)


def _joined(command: list[str]) -> str:
    return " ".join(part if "$" in part else shlex.quote(part) for part in command)


def _environment(config: dict[str, Any], cluster: Cluster) -> dict[str, str]:
    env = {
        # Nothing is fetched on compute nodes.
        "HF_HUB_OFFLINE": "1",
        "TORCHELASTIC_ERROR_FILE": "/dev/null",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
        # srun's unbuffered output looks like a terminal: no progress bars into a log.
        "TTY_COMPATIBLE": "0",
    }
    if option(config, "rollout.placement", "cpu") == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return env | cluster.env


def setup_lines(config: dict[str, Any], cluster: Cluster) -> str:
    """What the batch script does before it starts the nodes.

    NeMo-Run's script asks for a requeue whenever a job fails. Which failures are worth it is
    decided here: a run that stopped (warning before the time limit) goes on at once; one that says
    it can never work is not tried again; anything else is, `max_restarts` times, after growing
    pauses.
    """
    root = run_directory(config)
    outcome, failures = (shlex.quote(str(root / name)) for name in (OUTCOME, FAILURES))
    return f"""
export MASTER_ADDR=${{head_node_ip%% *}}
if [[ $MASTER_ADDR == 127.* ]]; then
  # /etc/hosts of the node hides its address; Slurm knows one.
  MASTER_ADDR=$(command scontrol show node -o "$head_node" | sed -E 's/.* NodeAddr=([^ ]+) .*/\\1/')
fi
export MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_BLOCKS} * {_PORTS}))
rm -f {outcome}
scontrol() {{
  if [ "$1" != requeue ]; then command scontrol "$@"; return; fi
  case "$(head -n 1 {outcome} 2>/dev/null)" in
    stopped) echo "stopped with a checkpoint"; command scontrol "$@"; return ;;
    refused|guard) echo "not tried again: $(tail -n +2 {outcome})"; return ;;
  esac
  echo "job $SLURM_JOB_ID attempt ${{SLURM_RESTART_COUNT:-0}} exit code $exitcode" >> {failures}
  local failed=$(wc -l < {failures})
  if [ "$failed" -gt {cluster.max_restarts} ]; then
    echo "given up after $failed failures"; return
  fi
  local pause=$(({cluster.backoff_s} << (failed - 1)))
  sleep $((pause < {_LONGEST_PAUSE_S} ? pause : {_LONGEST_PAUSE_S}))
  command scontrol "$@"
}}
""".strip()


def write_submitted(config: dict[str, Any]) -> Path:
    """Write the configuration into the run directory, as it is when the job is submitted."""
    file = run_directory(config) / SUBMITTED
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def local_script(config_file: Path, cluster_python: str) -> str:
    """`cgrpo train` on this machine: it starts torchrun itself."""
    command = [cluster_python, "-m", "megatron_cgrpo.cli", "train", str(config_file)]
    return "exec " + shlex.join(command)
