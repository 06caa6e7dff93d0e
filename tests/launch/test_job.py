"""The launcher without a cluster: settings, scripts, and when a job is tried again."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from launch.job import check_engines, check_size, node_count, node_script, setup_lines
from launch.settings import Cluster, add_arguments, cluster_of
from launch.trainer_config import LaunchError, resolve, run_directory

CONFIG = {"run": {"directory": "/shared/runs", "name": "mine"}, "parallel": {"world_size": 16}}


def test_the_trainers_yaml(tmp_path):
    (tmp_path / "base.yaml").write_text("run: {directory: /shared, name: a}\nx: {y: 1, z: 2}\n")
    (tmp_path / "mine.yaml").write_text("include: base.yaml\nrun: {name: b}\n")
    config = resolve(tmp_path / "mine.yaml", ["x.y=[3, 4]", "new.key=true"])
    assert config["x"] == {"y": [3, 4], "z": 2} and config["new"] == {"key": True}
    assert run_directory(config) == Path("/shared/b")
    for directory in ("runs", "~/runs", ""):
        with pytest.raises(LaunchError, match="absolute path"):
            run_directory({"run": {"directory": directory}})
    with pytest.raises(LaunchError, match="not of the form"):
        resolve(tmp_path / "mine.yaml", ["x"])
    with pytest.raises(LaunchError, match="cannot read"):
        resolve(tmp_path / "none.yaml")


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
    with pytest.raises(LaunchError, match="name the account"):
        parsed("--nodes", "2")
    profile.write_text("acount: a\n")
    with pytest.raises(LaunchError, match=r"unknown \['acount'\]"):
        parsed("--cluster", str(profile))
    for path in (Path(__file__).parents[2] / "launch" / "clusters").glob("*.yaml"):
        assert parsed("--cluster", str(path)).account == "ACCOUNT"


def test_sizes():
    assert node_count(CONFIG, Cluster(gpus_per_node=8)) == 2
    assert check_size(CONFIG, Cluster(gpus_per_node=8)) == 8
    assert check_size(CONFIG, Cluster(nodes=4)) == 4
    with pytest.raises(LaunchError, match="does not divide over 3 nodes"):
        check_size(CONFIG, Cluster(nodes=3))
    with pytest.raises(LaunchError, match="needs 16 GPUs on each of 1 nodes, which have 8"):
        check_size(CONFIG, Cluster(nodes=1, gpus_per_node=8))
    check_engines(CONFIG, Cluster(nodes=2))
    with pytest.raises(LaunchError, match="colocated on several nodes is not supported"):
        check_engines({**CONFIG, "rollout": {"placement": "colocated"}}, Cluster(nodes=2))


def test_what_a_node_runs():
    script = node_script(CONFIG, Cluster(nodes=2, python="/py", env={"A": "b c"}))
    assert script.startswith("trap '' USR1\n") and "export A='b c'" in script
    assert "export HF_HUB_OFFLINE=1" in script and "--nproc-per-node=8" in script
    assert script.endswith("-m megatron_cgrpo.training.cluster /shared/runs/mine/submitted.yaml")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("outcome", "before", "requeued", "said"),
    [
        ("stopped\nafter step 3\n", 0, True, "stopped with a checkpoint"),
        ("refused\nno such file\n", 0, False, "not tried again: no such file"),
        ("guard\nentropy\n", 0, False, "not tried again: entropy"),
        (None, 0, True, ""),
        (None, 2, True, ""),
        (None, 3, False, "given up after 4 failures"),
    ],
)
def test_when_a_job_is_tried_again(tmp_path, outcome, before, requeued, said):
    root = tmp_path / "mine"
    root.mkdir()
    (root / "failures").write_text("x\n" * before)
    config = {**CONFIG, "run": {"directory": str(tmp_path), "name": "mine"}}
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho $@ > {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    setup = setup_lines(config, Cluster(max_restarts=3, backoff_s=0))
    ends = f"printf '{outcome}' > {root}/outcome" if outcome else ":"
    script = (
        f"head_node_ip=here\n{setup}\n{ends}\nexitcode=1\nscontrol requeue 7\necho $MASTER_PORT"
    )
    env = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="12345")
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert (tmp_path / "asked").exists() == requeued
    assert "22345" in done.stdout
    counted = len((root / "failures").read_text().splitlines())
    assert counted == before + (outcome is None)
