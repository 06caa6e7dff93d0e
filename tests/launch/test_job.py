"""The launcher without a cluster: settings, scripts, and when a job is tried again."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from launch.job import node_script, setup_lines, write_submitted
from launch.layout import Layout, layout_of
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
    with pytest.raises(LaunchError, match="NeMo-Run replaces /nemo_run"):
        run_directory({"run": {"directory": "/data/nemo_runs"}})
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


def rollout(**options) -> dict:
    return {**CONFIG, "rollout": options}


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
        ({"own_nodes": 2}, {"nodes": 2}, "leaves none for the trainer"),
        ({"placement": "split"}, {"nodes": 2}, "needs rollout.own_nodes"),
        ({"placement": "colocated", "servers": 3}, {"nodes": 2}, "servers=3 does not divide over"),
        ({"placement": "colocated", "own_nodes": 1}, {"nodes": 3}, "no use for"),
        ({"gpus": [3, 8]}, {"gpus_per_node": 8}, "rollout.gpus names GPU 8; a node has 0 … 7"),
        (
            {"placement": "split", "servers": 4, "tensor": 8, "own_nodes": 2},
            {"gpus_per_node": 8},
            "2 servers of 8 GPUs on each of 2 nodes do not fit on 8",
        ),
    ],
)
def test_what_does_not_fit_the_nodes_is_refused_at_once(options, cluster, message):
    with pytest.raises(LaunchError, match=message):
        layout_of(rollout(**options), Cluster(**cluster))


def test_what_a_node_runs(tmp_path):
    """The script with the programs replaced by one that shows its arguments."""
    config = {**rollout(servers=4, own_nodes=2), "run": {"directory": str(tmp_path), "name": "r"}}
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


def batch_script(tmp_path, config, *after: str, **cluster) -> subprocess.CompletedProcess:
    """The batch script's setup and what NeMo-Run has after it, with programs that do nothing."""
    for name in ("scontrol", "srun"):
        (tmp_path / name).write_text(
            f"#!/bin/bash\necho {name} $@ >> {tmp_path}/asked\nexit ${{CODE:-0}}\n"
        )
        (tmp_path / name).chmod(0o755)
    setup = setup_lines(config, Cluster(backoff_s=0, **cluster))
    script = "\n".join(["head_node_ip='10.1.2.3 fe80::1'", setup, *after])
    env = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="12345")
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)


def in_directory(tmp_path) -> dict:
    (tmp_path / "mine").mkdir()
    return {**CONFIG, "run": {"directory": str(tmp_path), "name": "mine"}}


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
    config, root = in_directory(tmp_path), tmp_path / "mine"
    (root / "failures").write_text("x\n" * before)
    ends = f"printf '{outcome}' > {root}/outcome" if outcome else ":"
    after = (ends, "exitcode=1", "scontrol requeue 7", "echo $MASTER_ADDR:$MASTER_PORT")
    done = batch_script(tmp_path, config, *after, max_restarts=3)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert (tmp_path / "asked").exists() == requeued
    assert f"10.1.2.3:{20000 + 12345 % 47 * 256}" in done.stdout
    counted = len((root / "failures").read_text().splitlines())
    assert counted == before + (outcome is None)


@pytest.mark.parametrize(
    ("outcome", "of_srun", "expected"),
    [
        ("done", 137, 0),
        ("stopped", 143, 85),
        ("guard", 0, 3),
        ("refused", 1, 1),
        (None, 137, 137),
        (None, 0, 1),
    ],
)
def test_the_exit_code_is_what_the_trainer_says(tmp_path, outcome, of_srun, expected):
    config = in_directory(tmp_path)
    ends = f"echo {outcome} > {tmp_path}/mine/outcome" if outcome else ":"
    done = batch_script(tmp_path, config, ends, f"CODE={of_srun} srun x", "exit $?")
    assert done.returncode == expected
    assert (tmp_path / "asked").read_text() == "srun x\n"


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("guard", 3), ("refused", 1)])
def test_a_later_job_of_a_chain_respects_the_outcome(tmp_path, outcome, code):
    config = in_directory(tmp_path)
    (tmp_path / "mine" / "outcome").write_text(f"{outcome}\nbecause\n")
    done = batch_script(tmp_path, config, "srun x")
    assert done.returncode == code and not (tmp_path / "asked").exists()
    assert ("because" in done.stdout) == bool(code)
    # Submitted by somebody who knows: what was said is forgotten.
    (tmp_path / "mine" / "failures").write_text("x\n" * 9)
    assert write_submitted(config) == tmp_path / "mine" / "submitted.yaml"
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["submitted.yaml"]
    batch_script(tmp_path, config, "srun x")
    assert (tmp_path / "asked").exists()
