"""The launcher without a cluster: settings, scripts, and when a job is tried again."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from launch import supervisor
from launch.job import node_script, setup_lines
from launch.layout import Layout, layout_of
from launch.settings import Cluster, add_arguments, cluster_of
from launch.submitted import run_directory, write_submitted
from megatron_cgrpo.config import Config, ConfigError, load_config, parse_config
from tests.unit.test_config import BASE

RAW = {
    **BASE,
    "run": {"directory": "/shared/runs", "name": "mine"},
    "parallel": {"world_size": 16},
    "training": {"problems_per_step": 16},
}
CONFIG = parse_config(RAW)


def changed(**sections) -> Config:
    return parse_config({**RAW, **sections})


def test_run_directories_mean_the_same_on_all_nodes(tmp_path):
    assert run_directory(CONFIG) == Path("/shared/runs/mine")
    for directory in ("runs", "~/runs", ""):
        with pytest.raises(ConfigError, match="absolute path"):
            run_directory(changed(run={"directory": directory}))
    with pytest.raises(ConfigError, match="NeMo-Run replaces /nemo_run"):
        run_directory(changed(run={"directory": "/data/nemo_runs"}))


def test_what_is_submitted_is_what_the_trainer_reads(tmp_path):
    config = changed(run={"directory": str(tmp_path), "name": "mine"})
    file = write_submitted(config)
    assert load_config(file) == config
    assert sorted(p.name for p in file.parent.iterdir()) == ["submitted.yaml", "supervisor.py"]


def parsed(*arguments) -> Cluster:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cluster_of(parser.parse_args(arguments))


def test_options_go_before_the_profile(tmp_path):
    profile = tmp_path / "c.yaml"
    profile.write_text("account: a\npartition: p\nenv: {X: 1, Y: 2}\nmount: [/m:/m]\n")
    options = ("--partition", "q", "--env", "Y=3", "--mount", "/n:/n", "--exclusive")
    cluster = parsed("--cluster", str(profile), *options)
    assert (cluster.account, cluster.partition, cluster.exclusive) == ("a", "q", True)
    assert cluster.env == {"X": "1", "Y": "3"} and cluster.mount == ("/m:/m", "/n:/n")
    with pytest.raises(ConfigError, match="name the account"):
        parsed("--nodes", "2")
    profile.write_text("acount: a\n")
    with pytest.raises(ConfigError, match=r"unknown \['acount'\]"):
        parsed("--cluster", str(profile))
    for path in (Path(__file__).parents[2] / "launch" / "clusters").glob("*.yaml"):
        assert parsed("--cluster", str(path)).account == "ACCOUNT"


def rollout(**options) -> Config:
    return changed(rollout=options)


def test_layouts():
    h100 = Cluster(gpus_per_node=8)
    assert layout_of(CONFIG, h100) == Layout(2, 0, 8)
    assert layout_of(CONFIG, Cluster(nodes=4)) == Layout(4, 0, 4)
    split = rollout(placement="split", servers=4, tensor=4, own_nodes=2)
    assert layout_of(split, h100) == layout_of(split, Cluster(nodes=4, gpus_per_node=8))
    assert layout_of(split, h100) == Layout(2, 2, 8) and layout_of(split, h100).nodes == 4
    assert layout_of(rollout(placement="colocated", servers=4, tensor=4), h100) == Layout(2, 0, 8)


@pytest.mark.parametrize(
    ("options", "cluster", "message"),
    [
        ({}, {"nodes": 3}, "does not divide over 3 nodes"),
        ({}, {"nodes": 1, "gpus_per_node": 8}, "needs 16 GPUs on each of 1 nodes, which have 8"),
        ({"own_nodes": 2, "servers": 2}, {"nodes": 2}, "leaves none for the trainer"),
        ({"placement": "split", "gpus": [16]}, {"nodes": 2}, "needs rollout.own_nodes"),
        ({"placement": "colocated", "servers": 3}, {"nodes": 2}, "servers=3 does not divide over"),
        ({"gpus": [3, 8]}, {"gpus_per_node": 8}, "rollout.gpus names GPU 8; a node has 0 … 7"),
        (
            {"placement": "split", "servers": 4, "tensor": 8, "own_nodes": 2},
            {"gpus_per_node": 8},
            "2 servers of 8 GPUs on each of 2 nodes do not fit on 8",
        ),
    ],
)
def test_what_does_not_fit_the_nodes_is_refused_at_once(options, cluster, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(rollout(**options), Cluster(**cluster))


def test_what_a_node_runs(tmp_path):
    """The script with the programs replaced by one that shows its arguments."""
    run_here = {"directory": str(tmp_path), "name": "r"}
    config = changed(rollout={"servers": 4, "own_nodes": 2}, run=run_here)
    (tmp_path / "r").mkdir()
    shows = tmp_path / "python"
    shows.write_text('#!/bin/bash\necho "$A" "$HF_HUB_OFFLINE" "$@"\nexit ${CODE:-0}\n')
    shows.chmod(0o755)
    script = node_script(config, Cluster(gpus_per_node=8, python=str(shows), env={"A": "b c"}))

    def run(node: int, **env) -> tuple[int, str]:
        env = {"SLURM_NODEID": str(node), "SLURM_JOB_ID": "7", "MASTER_PORT": "20000", **env}
        env = dict(os.environ, MASTER_ADDR="n1", **env)
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout

    code, said = run(0)
    assert code == 0 and said.startswith("b c 1 -m torch.distributed.run --nproc-per-node=8 ")
    assert "--nnodes=2 --node-rank=0 --master-addr=n1 --master-port=20000" in said
    assert said.endswith("submitted.yaml rollout.port=20001 --attempt 7-0\n")
    assert run(1, SLURM_RESTART_COUNT="2")[1].endswith("--attempt 7-2 --again\n")
    code, said = run(3)
    assert "-m megatron_cgrpo.rollout.host" in said and said.endswith("--attempt 7-0 --node 1\n")
    assert run(0, CODE="5")[0] == run(1, CODE="5")[0] == run(2, CODE="5")[0] == 5
    again = node_script(CONFIG, Cluster(nodes=2), again=True)
    assert again.endswith("--attempt $SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0} --again")
    assert "own_nodes" not in again and "rollout.host" not in again


class Job:
    """A job's first node: the batch script's setup with what NeMo-Run has around it, and Slurm's
    programs replaced by ones that note what they are asked."""

    def __init__(self, root: Path, requeue: bool = True, **cluster) -> None:
        self.root, self.run = root, root / "mine"
        config = changed(run={"directory": str(root), "name": "mine"})
        write_submitted(config)
        for name in ("scontrol", "srun"):
            (root / name).write_text(
                f"#!/bin/bash\necho {name} $@ >> {root}/asked\n"
                f'[ {name} = srun ] || exit 0\neval "$SRUN"\n'
            )
            (root / name).chmod(0o755)
        setup = setup_lines(config, Cluster(**{"backoff_s": 0, **cluster}), requeue)
        lines = ["head_node_ip='10.1.2.3 fe80::1'", setup, "srun x", "code=$?"]
        lines += ["echo $MASTER_ADDR:$MASTER_PORT", "exit $code"]
        (root / "batch.sh").write_text("\n".join(lines))

    def start(self, srun: str = ":", **options) -> subprocess.Popen:
        """The job with an `srun` that does this."""
        path = f"{self.root}:{os.environ['PATH']}"
        env = dict(os.environ, PATH=path, SLURM_JOB_ID="12345", SRUN=srun, **options)
        command = ["bash", str(self.root / "batch.sh")]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def ends(self, outcome: str | None, code: int = 0) -> tuple[int, str]:
        """(exit code, output) of a job whose ranks leave this outcome and code."""
        says = f"printf '{outcome}' > {self.run}/outcome; " if outcome else ""
        job = self.start(f"{says}exit {code}")
        said = job.communicate(timeout=60)[0]
        return job.returncode, said

    def asked(self, what: str) -> int:
        file = self.root / "asked"
        return file.read_text().splitlines().count(what) if file.exists() else 0

    @property
    def failures(self) -> list[str]:
        file = self.run / "failures"
        return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("outcome", "before", "requeued", "said"),
    [
        ("done\n", 0, False, ""),
        ("stopped\nafter step 3\n", 0, True, "stopped with a checkpoint"),
        ("refused\nno such file\n", 0, False, "not tried again: no such file"),
        ("guard\nentropy\n", 0, False, "not tried again: entropy"),
        (None, 0, True, "tried again in 0 s"),
        (None, 2, True, "tried again in 0 s"),
        (None, 3, False, "given up after 4 failures"),
    ],
)
def test_when_a_job_is_tried_again(tmp_path, outcome, before, requeued, said):
    job = Job(tmp_path, max_restarts=3)
    (job.run / "failures").write_text("x\n" * before)
    _, output = job.ends(outcome, 1)
    assert said in output and job.asked("scontrol requeue 12345") == requeued
    assert f"10.1.2.3:{20000 + 12345 % 47 * 256}" in output
    assert len(job.failures) == before + (outcome is None)
    if outcome is None:
        assert job.failures[-1] == "job 12345 attempt 0 exit code 1"


def test_without_requeue_a_job_is_left_as_it_ended(tmp_path):
    job = Job(tmp_path, requeue=False)
    assert job.ends(None, 7)[0] == 7 and job.ends("stopped\n", 1)[0] == 85
    assert job.asked("scontrol requeue 12345") == 0 and not job.failures


@pytest.mark.parametrize(
    ("outcome", "of_srun", "expected"),
    [
        ("done", 137, 0),
        ("stopped", 143, 85),
        ("guard", 0, 3),
        ("refused", 1, 1),
        (None, 137, 137),
        (None, 0, 1),
        ("half a wo", 9, 9),
    ],
)
def test_the_exit_code_is_what_the_trainer_says(tmp_path, outcome, of_srun, expected):
    job = Job(tmp_path)
    assert job.ends(outcome, of_srun)[0] == expected
    assert job.asked("srun x") == 1


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("guard", 3), ("refused", 1)])
def test_a_later_job_of_a_chain_respects_the_outcome(tmp_path, outcome, code):
    job = Job(tmp_path)
    (job.run / "outcome").write_text(f"{outcome}\nbecause\n")
    ended, said = job.ends("done\n")
    assert ended == code and job.asked("srun x") == 0
    assert ("because" in said) == bool(code)
    # Submitted by somebody who knows: what was said is forgotten.
    (job.run / "failures").write_text("x\n" * 9)
    write_submitted(changed(run={"directory": str(tmp_path), "name": "mine"}))
    assert job.ends("done\n")[0] == 0 and job.asked("srun x") == 1


def test_what_an_earlier_job_left_undone_goes_on(tmp_path):
    job = Job(tmp_path)
    (job.run / "outcome").write_text("stopped\nafter step 3\n")
    # Its own end counts, not what the earlier one said.
    assert job.ends(None, 4)[0] == 4 and len(job.failures) == 1


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("when", ["running", "pausing"])
def test_a_cancelled_job_is_not_tried_again(tmp_path, when):
    """scancel: SIGTERM while the ranks run, and while the job waits to be tried again."""
    job = Job(tmp_path, backoff_s=0 if when == "running" else 600)
    process = job.start("sleep 600 & wait" if when == "running" else "exit 1")
    wait_for(lambda: job.asked("srun x") and (when == "running" or job.failures))
    for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            p.terminate()
    process.wait(30)
    assert job.asked("scontrol requeue 12345") == 0
    assert len(job.failures) == (when == "pausing")


def test_a_warning_is_for_the_ranks(tmp_path):
    job = Job(tmp_path)
    process = job.start(f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 0")
    wait_for(lambda: job.asked("srun x"))
    process.send_signal(signal.SIGUSR1)
    (tmp_path / "go").touch()
    (job.run / "outcome").write_text("stopped\nafter step 1\n")
    assert process.wait(30) == 85 and job.asked("scontrol requeue 12345") == 1


def test_pauses_double_up_to_ten_minutes():
    pauses = [supervisor.pause_s(n, 30) for n in range(1, 8)]
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert (
        supervisor.next_try("", 4, 3, 30) is None and supervisor.next_try("stopped", 0, 0, 9) == 0
    )
