"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd of our own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# How long a requeued job waits.
AuthInfo=cred_expire=5,socket={root}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
StateSaveLocation={root}/state
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdLogFile={root}/slurmd.%n.log
SlurmdSpoolDir={root}/spool.%n
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SlurmdTimeout=20
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
KillWait=10
# A daemon answers a signal when the step has died. A controller that does not wait that long
# sends the signal once more, later: to the step of that number of the next attempt.
MessageTimeout=40
# A limit of a minute is not much longer than the start: the warning comes long before this.
OverTimeLimit=1
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{p1}-{p2}] CPUs=2 RealMemory=8000
PartitionName=batch Nodes=node[1-2] Default=YES PriorityTier=5 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=node[1-2] PriorityTier=10 PreemptMode=OFF
"""
# NeMo-Run asks sacct, which needs an accounting database: the controller knows the same.
SACCT = """#!/bin/bash
while [ $# -gt 0 ]; do [ "$1" = -j ] && id=$2; shift; done
echo 'JobID|JobName|State'
scontrol show job -o "$id" 2>/dev/null |
  sed -nE 's/^JobId=([0-9]+).* JobName=([^ ]+) .*JobState=([A-Z_]+) .*/\\1|\\2|\\3/p' |
  sed 's/COMPLETING$/RUNNING/;s/CONFIGURING$/PENDING/'
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")


def why_not() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [p for p in PROGRAMS if shutil.which(p, path=path) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "Slurm's daemons need root here"


class SlurmCluster:
    """Commands of a running cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: list[subprocess.Popen] = []
        self.env = dict(os.environ, SLURM_CONF=str(root / "slurm.conf"))
        self.env["PATH"] = f"{root / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self.start("slurmd", "-D", "-N", name)

    def start(self, *command: str) -> None:
        """Start a daemon."""
        self.daemons.append(
            subprocess.Popen(
                command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon and all that runs there, as when its power fails."""
        (daemon,) = (p for p in self.daemons if p.args[-1] == name)
        daemon.kill()
        daemon.wait()
        self.daemons.remove(daemon)
        for p in psutil.process_iter(["environ"]):
            steps = p.name() == "slurmstepd" and f"[{name}]" in " ".join(p.cmdline())
            if steps or (p.info["environ"] or {}).get("SLURMD_NODENAME") == name:
                with contextlib.suppress(psutil.NoSuchProcess):
                    p.kill()

    def run(self, *command: str, timeout: float = 60) -> str:
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        pairs = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(p.split("=", 1) for p in pairs if "=" in p)

    def jobs(self) -> list[str]:
        """Ids of all jobs, oldest first."""
        return sorted(self.run("squeue", "-h", "-t", "all", "-o", "%A").split(), key=int)

    def wait_for(self, job: str, *states: str, timeout: float = 240) -> dict[str, str]:
        """Until the job is in one of the states."""
        deadline = time.monotonic() + timeout
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {found['JobState']}"
            time.sleep(0.5)
        return found


@contextlib.contextmanager
def running_cluster(root: Path) -> Iterator[SlurmCluster]:
    """The cluster's daemons, ended with the block."""
    cluster = SlurmCluster(root)
    for name in ("state", "spool.node1", "spool.node2", "bin"):
        (root / name).mkdir(parents=True)
    (root / "bin" / "sacct").write_text(SACCT)
    (root / "bin" / "sacct").chmod(0o755)
    port, p1 = _free_ports(1)[0], _free_pair()
    host = socket.gethostname().split(".")[0]
    (root / "slurm.conf").write_text(CONF.format(host=host, root=root, port=port, p1=p1, p2=p1 + 1))
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o400)
    # Its checks want directories that only root can write to; a temporary one is not.
    munge = ["munged", "--foreground", "--force", f"--key-file={root / 'munge.key'}"]
    munge += [f"--socket={root / 'munge.socket'}", f"--pid-file={root / 'munged.pid'}"]
    munge += [f"--log-file={root / 'munged.log'}", f"--seed-file={root / 'munged.seed'}"]
    try:
        cluster.start(*munge)
        _until(lambda: (root / "munge.socket").exists(), "munged", root)
        cluster.start("slurmctld", "-D")
        for node in ("node1", "node2"):
            cluster.start_node(node)
        _until(lambda: _idle(cluster) == 2, "slurm", root)
        yield cluster
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            cluster.run("scancel", "--signal=KILL", *cluster.jobs())
        for process in reversed(cluster.daemons):
            process.terminate()
        for process in cluster.daemons:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _idle(cluster: SlurmCluster) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-p", "batch", "-N", "-o", "%T"],
        env=cluster.env,
        capture_output=True,
        text=True,
    )
    return done.stdout.split().count("idle")


def _until(ready, what: str, root: Path) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        logs = "\n".join(p.read_text()[-1000:] for p in root.glob("*.log"))
        assert time.monotonic() < deadline, f"{what} does not start:\n{logs}"
        time.sleep(0.3)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _free_pair() -> int:
    """A port whose successor is free too."""
    while True:
        (port,) = _free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port
