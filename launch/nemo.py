"""NeMo-Run 0.11.1, and what has to be put right in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nemo_run as run
from nemo_run.core.execution.slurm import SlurmJobDetails
from torchx.schedulers.slurm_scheduler import SLURM_STATES
from torchx.specs import AppState

from launch.settings import Cluster

# A preempted job is requeued; torchx 0.7 calls it failed and NeMo-Run stops watching.
SLURM_STATES["PREEMPTED"] = AppState.PENDING


@dataclass(kw_only=True)
class OneLog(SlurmJobDetails):
    """One log for all attempts of a job; by default each has its own and only the first is read."""

    @property
    def srun_stdout(self) -> Path:
        return Path(self.folder) / f"log-{self.job_name}_%j.out"


def slurm_executor(cluster: Cluster, nodes: int, setup: str) -> run.SlurmExecutor:
    """An executor for one torchrun agent on each node."""
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        time=cluster.time,
        nodes=nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node,
        exclusive=cluster.exclusive or None,
        mem=cluster.mem,
        # Not TERM: Slurm sends it to all processes, and only the ranks know what to do.
        signal=f"USR1@{cluster.signal_s}",
        container_image=cluster.container_image,
        container_mounts=list(cluster.mount),
        tunnel=run.LocalTunnel(job_dir=""),
        packager=run.Packager(),
        job_details=OneLog(),
        # NeMo-Run's sbatch has --requeue: after a preemption or a node's failure Slurm starts a job
        # again by itself.
        additional_parameters={"kill_on_invalid_dep": "yes", **cluster.sbatch},
        srun_args=["--open-mode=append", *_container_args(cluster), *cluster.srun_args],
        setup_lines=setup,
        poll_estimated_start_time=False,
        dependency_type="afterany",
        # Its count of restarts includes preemptions; the supervisor decides.
        retries=0,
    )


def _container_args(cluster: Cluster) -> list[str]:
    return ["--no-container-mount-home"] if cluster.container_image else []
