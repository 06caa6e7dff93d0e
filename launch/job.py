"""The shell of a job: what runs on its first node, and on each."""

from __future__ import annotations

import shlex
from pathlib import Path

from launch import supervisor
from launch.layout import layout_of
from launch.settings import Cluster
from launch.submitted import SUBMITTED, run_directory
from megatron_cgrpo.config import Config

# Every job has a block of ports below those that the system gives out, by its id: the master's,
# then those of the servers (rollout.port), of a critic's and of a refiner's.
_FIRST_PORT, _PORTS, _BLOCKS = 20_000, 256, 47
# The agent waits this long for ranks that finish their step after the warning.
_SHUTDOWN_S = 24 * 3600


def node_script(config: Config, cluster: Cluster, again: bool = False) -> str:
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
    if config.rollout.port is None:
        command += ["rollout.port=$((MASTER_PORT + 1))"]
    command += [*attempt, "--again"] if again else [*attempt, "${SLURM_RESTART_COUNT:+--again}"]
    lines.append(f"exec {_joined(command)}")
    return "\n".join(lines)


def _joined(command: list[str]) -> str:
    return " ".join(part if "$" in part else shlex.quote(part) for part in command)


def _environment(config: Config, cluster: Cluster) -> dict[str, str]:
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
    if config.rollout.placement == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    return env | cluster.env


def setup_lines(config: Config, cluster: Cluster, requeue: bool = False) -> str:
    """What the batch script does before it starts the nodes.

    It runs itself a second time, under the supervisor, which makes the job's exit code and decides
    whether the job is tried again (launch/supervisor.py).

    Args:
        requeue: a job that stopped or failed may be requeued.
    """
    root = run_directory(config)
    command = [cluster.host_python, str(root / Path(supervisor.__file__).name), str(root)]
    command += ["--max-restarts", str(cluster.max_restarts), "--backoff-s", str(cluster.backoff_s)]
    command += ["--requeue"] if requeue else []
    return f"""
if [ "$CGRPO_SUPERVISED" != "$SLURM_JOB_ID" ]; then
  exec {shlex.join(command)} -- bash "$0"
fi
export MASTER_ADDR=${{head_node_ip%% *}}
if [[ $MASTER_ADDR == 127.* ]]; then
  # /etc/hosts of the node hides its address; Slurm knows one.
  MASTER_ADDR=$(scontrol show node -o "$head_node" | sed -E 's/.* NodeAddr=([^ ]+) .*/\\1/')
fi
export MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_BLOCKS} * {_PORTS}))
""".strip()


def local_script(config_file: Path, cluster_python: str) -> str:
    """`cgrpo train` on this machine: it starts torchrun itself."""
    command = [cluster_python, "-m", "megatron_cgrpo.cli", "train", str(config_file)]
    return "exec " + shlex.join(command)
