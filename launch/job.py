"""The shell of a job: what runs on each node, and when the job is tried again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from launch.settings import Cluster
from launch.trainer_config import LaunchError, placement, run_directory, world_size

SUBMITTED = "submitted.yaml"
"""The configuration as it was when the job was submitted."""
OUTCOME = "outcome"
"""File of the run directory in which the trainer says how it ended: see training/cluster.py."""
FAILURES = "failures"
"""File of the run directory with a line for each attempt that ended without an outcome."""
# Master ports of jobs that share a node differ by job id.
_PORTS = 10_000
_FIRST_PORT = 20_000
# The agent waits this long for ranks that finish their step after the warning.
_SHUTDOWN_S = 24 * 3600
_LONGEST_PAUSE_S = 600


def check_size(config: dict[str, Any], cluster: Cluster) -> int:
    """Trainer ranks of one node.

    Raises:
        LaunchError: when the ranks do not divide over the nodes, or exceed the GPUs.
    """
    ranks, nodes = world_size(config), node_count(config, cluster)
    if ranks % nodes:
        raise LaunchError(f"parallel.world_size={ranks} does not divide over {nodes} nodes")
    each = ranks // nodes
    if cluster.gpus_per_node is not None and each > cluster.gpus_per_node:
        raise LaunchError(
            f"parallel.world_size={ranks} needs {each} GPUs on each of {nodes} nodes, which have "
            f"{cluster.gpus_per_node}"
        )
    return each


def node_count(config: dict[str, Any], cluster: Cluster) -> int:
    """Nodes as asked for, else as many as the ranks need."""
    ranks = world_size(config)
    return cluster.nodes or -(-ranks // (cluster.gpus_per_node or ranks))


def check_engines(config: dict[str, Any], cluster: Cluster) -> None:
    """Refuse what the trainer cannot do yet.

    Raises:
        LaunchError: engines on GPUs of several nodes.
    """
    if node_count(config, cluster) > 1 and placement(config) != "cpu":
        raise LaunchError(
            f"rollout.placement={placement(config)} on several nodes is not supported yet: its "
            "engines start on the first node only"
        )


def node_script(config: dict[str, Any], cluster: Cluster) -> str:
    """What every node runs: torchrun with this node's ranks."""
    file = run_directory(config) / SUBMITTED
    # Ignored by torchrun's agent; the ranks handle it.
    lines = ["trap '' USR1"]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in _environment(config, cluster).items()]
    command = [cluster.python, "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={check_size(config, cluster)}", "--max-restarts=0"]
    command += [f"--shutdown-timeout={_SHUTDOWN_S}", "--nnodes=$SLURM_NNODES"]
    command += ["--node-rank=$SLURM_NODEID", "--master-addr=$MASTER_ADDR"]
    command += ["--master-port=$MASTER_PORT", "-m", "megatron_cgrpo.training.cluster", str(file)]
    lines.append("exec " + " ".join(_quoted(part) for part in command))
    return "\n".join(lines)


def _quoted(part: str) -> str:
    return part if "$" in part else shlex.quote(part)


def _environment(config: dict[str, Any], cluster: Cluster) -> dict[str, str]:
    env = {
        # Nothing is fetched on compute nodes.
        "HF_HUB_OFFLINE": "1",
        "TORCHELASTIC_ERROR_FILE": "/dev/null",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }
    if placement(config) == "cpu":
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
export MASTER_ADDR=$head_node_ip
export MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))
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


def local_script(config_file: Path, cluster_python: str) -> str:
    """`cgrpo train` on this machine: it starts torchrun itself."""
    command = [cluster_python, "-m", "megatron_cgrpo.cli", "train", str(config_file)]
    return "exec " + shlex.join(command)
