"""Jobs on a real Slurm of two nodes: finished, preempted, crashed, chained, cancelled, refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_cgrpo.policy.states import latest_state, read_run_state
from megatron_cgrpo.studies.runs import read_metrics
from tests.e2e.world import ROOT, write_config
from tests.launch.slurm_cluster import running_cluster, why_not

LAUNCHER = Path(f"{sys.prefix}-launch") / "bin" / "python"
STEPS = 6

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not LAUNCHER.exists(), reason=f"no {LAUNCHER} (make launch-env)"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def submit(cluster, root, name, *arguments, steps=STEPS, wait=False, **sections):
    """`python -m launch.slurm …`; (exit code, output, job ids that it made)."""
    training = {"steps": steps, "checkpoint_every": 2, **sections.pop("training", {})}
    config = write_config(root, name, training=training, **sections)
    command = [str(LAUNCHER), "-m", "launch.slurm", str(config), "--account", "none"]
    command += ["--nodes", "2", "--python", sys.executable, "--backoff-s", "1", *arguments]
    command += ["--wait"] if wait else []
    before = set(cluster.jobs())
    done = subprocess.run(
        command, cwd=ROOT, env=cluster.env, capture_output=True, text=True, timeout=500
    )
    new = [j for j in cluster.jobs() if j not in before]
    assert new, done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr, new


def logs(root, name) -> str:
    return "\n".join(p.read_text() for p in (root / name / "slurm").rglob("*.out"))


def wait_for_step(root, name, step, timeout=200):
    """Until metrics.jsonl holds a training step."""
    deadline = time.monotonic() + timeout
    path = root / name / "metrics.jsonl"
    while not path.exists() or not any(
        r["step"] >= step for r in read_metrics(root / name) if "reward/initial" in r
    ):
        assert time.monotonic() < deadline, logs(root, name)[-3000:]
        time.sleep(0.2)


def steps_of(root, name) -> list[dict]:
    """Rows of training steps without what depends on time."""
    rows = [r for r in read_metrics(root / name) if "reward/initial" in r]
    timed = ("time/", "throughput/", "push/", "elapsed_s", "engine/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in rows]


def ranks() -> list[psutil.Process]:
    """Trainer ranks and engine servers that are alive."""
    found = []
    for p in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(p.info["cmdline"] or [])
        mine = "megatron_cgrpo.training.cluster" in line or "vllm.entrypoints" in line
        if mine and p.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(p)
    return found


def is_server(p: psutil.Process) -> bool:
    return "vllm.entrypoints" in " ".join(p.cmdline())


@pytest.fixture(scope="module")
def straight(cluster, root):
    """A run on two nodes, undisturbed; its rows."""
    code, out, (job,) = submit(cluster, root, "straight", wait=True)
    assert code == 0, out + logs(root, "straight")
    assert cluster.job(job)["JobState"] == "COMPLETED"
    assert (root / "straight" / "outcome").read_text().startswith("done")
    rows = steps_of(root, "straight")
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    assert (root / "straight" / "checkpoints" / f"step_{STEPS:06d}" / "config.json").exists()
    return rows


@pytest.mark.slow
def test_a_preempted_job_goes_on_with_the_same_metrics(cluster, root, straight):
    code, out, (job,) = submit(
        cluster, root, "preempted", "--requeue", logging={"wandb": {"mode": "offline"}}
    )
    assert code == 0, out
    wait_for_step(root, "preempted", 2)
    urgent = cluster.root / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    high = ["-p", "high", "-N2", "--exclusive", f"--output={cluster.root}/urgent.out"]
    other = cluster.run("sbatch", "--parsable", *high, str(urgent)).strip()
    cluster.wait_for(other, "COMPLETED")
    found = until_done(cluster, root, "preempted", job)
    assert int(found["Restarts"]) >= 1
    assert "continuing after step" in logs(root, "preempted")
    assert steps_of(root, "preempted") == straight
    assert not (root / "preempted" / "failures").exists()
    pieces = list((root / "preempted" / "wandb").glob("offline-run-*-*"))
    assert len(pieces) >= 2 and len({p.name.rsplit("-", 1)[1] for p in pieces}) == 1


def until_done(cluster, root, name, job) -> dict[str, str]:
    """The job's fields when it has ended well."""
    found = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    assert found["JobState"] == "COMPLETED", logs(root, name)[-3000:]
    return found


def victim_of(name: str, rank: int) -> psutil.Process:
    """A rank of a run."""
    mine = [p for p in ranks() if name in " ".join(p.cmdline())]
    return next(p for p in mine if p.environ().get("RANK") == str(rank))


@pytest.mark.long
def test_a_crash_ends_the_job_and_it_is_tried_again(cluster, root, straight):
    _, _, (job,) = submit(cluster, root, "crashed", "--requeue")
    wait_for_step(root, "crashed", 3)
    victim_of("crashed", 1).kill()
    until_done(cluster, root, "crashed", job)
    assert len((root / "crashed" / "failures").read_text().splitlines()) == 1
    assert steps_of(root, "crashed") == straight


@pytest.mark.long
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(cluster, root, straight):
    _, _, (job,) = submit(cluster, root, "lost", "--requeue")
    wait_for_step(root, "lost", 3)
    cluster.lose_node("node2")
    cluster.wait_for(job, "PENDING", "COMPLETING", timeout=120)
    cluster.start_node("node2")
    found = until_done(cluster, root, "lost", job)
    assert int(found["Restarts"]) >= 1 and steps_of(root, "lost") == straight


@pytest.mark.slow
@pytest.mark.parametrize("own_nodes", [0, 1])
def test_servers_on_several_nodes(cluster, root, own_nodes):
    """One beside the ranks of each node, and all on a node of their own, where one is killed."""
    name = f"servers-{own_nodes}"
    _, _, (job,) = submit(
        cluster,
        root,
        name,
        "--requeue",
        rollout={"servers": 2, "own_nodes": own_nodes, "max_restarts": 0},
        parallel={"world_size": 2},
    )
    wait_for_step(root, name, 3)
    there = {p.environ()["SLURM_NODEID"] for p in ranks() if is_server(p)}
    assert there == ({"1"} if own_nodes else {"0", "1"})
    assert len(list((root / name / "engines").glob("*/*.url"))) == 2 - (not own_nodes)
    if own_nodes:
        next(p for p in ranks() if is_server(p)).kill()
    until_done(cluster, root, name, job)
    rows = steps_of(root, name)
    assert [r["step"] for r in rows] == list(range(1, STEPS + 1))
    # A server without the pushed weights would be far off.
    assert max(r["policy/engine_gap_max"] for r in rows) < 1e-4
    assert not ranks()
    failures = root / name / "failures"
    assert failures.exists() == bool(own_nodes)
    if own_nodes:
        first = next(x for x in logs(root, name).splitlines() if x.startswith("error: "))
        assert first.startswith("error: http://") and "engine-" in first


@pytest.mark.slow
def test_scancel_leaves_no_process(cluster, root):
    _, _, (job,) = submit(cluster, root, "cancelled", "--requeue", steps=200)
    deadline = time.monotonic() + 120
    # Both agents, both ranks, and the server.
    while len([p for p in ranks() if is_server(p)]) < 1 or len(ranks()) < 5:
        assert time.monotonic() < deadline, logs(root, "cancelled")[-3000:]
        time.sleep(0.5)
    cluster.run("scancel", job)
    cluster.wait_for(job, "CANCELLED")
    deadline = time.monotonic() + 60
    while ranks():
        assert time.monotonic() < deadline, [p.cmdline() for p in ranks()]
        time.sleep(0.5)


@pytest.mark.slow
def test_a_configuration_error_is_said_once_and_not_tried_again(cluster, root):
    code, out, (job,) = submit(
        cluster, root, "refused", "--requeue", wait=True, data={"path": "/nowhere/x.jsonl"}
    )
    assert code == 1, out
    assert cluster.job(job)["Restarts"] == "0"
    assert (root / "refused" / "outcome").read_text().startswith("refused\ndata file /nowhere")
    assert logs(root, "refused").count("error: data file /nowhere/x.jsonl does not exist") == 1


@pytest.mark.slow
def test_a_chain_of_short_jobs_is_one_run(cluster, root, straight):
    """Each job is warned before its limit of a minute; the next goes on."""
    arguments = ("--chain", "2", "--time", "00:01:00", "--signal-s", "10")
    _, _, jobs = submit(
        cluster, root, "chain", *arguments, steps=99, training={"checkpoint_every": 1}
    )
    assert len(jobs) == 2
    for job in jobs:
        cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    said = logs(root, "chain")
    assert said.count("continuing after step") == 1
    # Said by the ranks, who were warned in time.
    assert [cluster.job(job)["ExitCode"] for job in jobs] == ["85:0"] * 2, said[-3000:]
    rows = steps_of(root, "chain")
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 2
    same = min(len(rows), STEPS)
    assert rows[:same] == straight[:same]
    assert read_run_state(latest_state(root / "chain" / "state"))["step"] == len(rows)
