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
# The agent waits this long for ranks that finish their step after the warning.
_SHUTDOWN_S = 24 * 3600
_LONGEST_PAUSE_S = 600


def node_script(config: dict[str, Any], cluster: Cluster, again: bool = False) -> str:
    """What every node runs: torchrun with this node's ranks, or the servers of a node of theirs.

    Args:
        again: the job continues what an earlier one began.
    """
    layout = layout_of(config, cluster)
    root = run_directory(config)
    # Ignored by torchrun's agent and by the servers; the ranks handle it.
    lines = ["trap '' USR1"]
    lines += [f"export {k}={shlex.quote(v)}" for k, v in _environment(config, cluster).items()]
    attempt = ["--attempt", "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"]
    if layout.server_nodes:
        serve = [cluster.python, "-m", "megatron_cgrpo.rollout.host", str(root), *attempt]
        serve += ["--node", f"$((SLURM_NODEID - {layout.trainer_nodes}))"]
        lines += [f"if [ $SLURM_NODEID -ge {layout.trainer_nodes} ]; then"]
        lines += [f"  exec {_joined(serve)}", "fi"]
    command = [cluster.python, "-m", "torch.distributed.run"]
    command += [f"--nproc-per-node={layout.ranks}", "--max-restarts=0"]
    command += [f"--shutdown-timeout={_SHUTDOWN_S}", f"--nnodes={layout.trainer_nodes}"]
    command += ["--node-rank=$SLURM_NODEID", "--master-addr=$MASTER_ADDR"]
    command += ["--master-port=$MASTER_PORT", "-m", "megatron_cgrpo.training.cluster"]
    command += [str(root / SUBMITTED)]
    if option(config, "rollout.port", None) is None:
        command += ["rollout.port=$((MASTER_PORT + 1))"]
    command += [*attempt, "--again"] if again else [*attempt, "${SLURM_RESTART_COUNT:+--again}"]
    lines.append(f"exec {_joined(command)}")
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
    decided here, by the trainer's outcome, which also makes the job's exit code: a run that stopped
    (85: warning before the time limit) goes on at once; one that says it can never work, or that a
    guard stopped (3), is not tried again, nor by the next job of a chain; anything else is,
    `max_restarts` times, after growing pauses.
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
case "$(head -n 1 {outcome} 2>/dev/null)" in
  done) exit 0 ;;
  guard) echo "not tried again: $(tail -n +2 {outcome})"; exit 3 ;;
  refused) echo "not tried again: $(tail -n +2 {outcome})"; exit 1 ;;
esac
rm -f {outcome}
# Slurm's own code may be that of a task which was ended because another had left.
srun() {{
  command srun "$@"
  local code=$?
  case "$(head -n 1 {outcome} 2>/dev/null)" in
    done) return 0 ;; stopped) return 85 ;; guard) return 3 ;; refused) return 1 ;;
  esac
  return $((code == 0 ? 1 : code))
}}
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
    """Write the configuration into the run directory, as it is when the job is submitted.

    What earlier jobs of the run said of their end is forgotten.
    """
    root = run_directory(config)
    root.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOME, FAILURES):
        (root / name).unlink(missing_ok=True)
    file = root / SUBMITTED
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def local_script(config_file: Path, cluster_python: str) -> str:
    """`cgrpo train` on this machine: it starts torchrun itself."""
    command = [cluster_python, "-m", "megatron_cgrpo.cli", "train", str(config_file)]
    return "exec " + shlex.join(command)
