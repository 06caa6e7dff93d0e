"""`cgrpo train` from the outside: real ranks, a real vLLM server, real files."""

from __future__ import annotations

import json
import shutil
import signal
import time

import psutil
import pytest
import torch

from megatron_cgrpo.conversion.megatron_io import MegatronCheckpoint
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.policy.states import complete_states, latest_state, read_run_state
from megatron_cgrpo.studies.runs import read_metrics
from megatron_cgrpo.training.launch import GUARD_STOPPED
from tests.e2e.world import finish, leftovers, start, write_config

TP2_PP2 = {"world_size": 4, "tensor": 2, "pipeline": 2, "sequence_parallel": True}
DP2 = {"world_size": 2, "tensor": 1}
WANDB = {"mode": "offline", "project": "test", "id": None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two steps of the same run at two layouts."""
    root = tmp_path_factory.mktemp("e2e")
    for name, parallel in (("tp2pp2", TP2_PP2), ("dp2", DP2)):
        saving = {"checkpoint_every": 1, "save_every": 1, "background_checkpoints": name == "dp2"}
        config = write_config(
            root,
            name,
            parallel=parallel,
            logging={"wandb": WANDB},
            training=saving,
            validation={"every": 1},
        )
        code, out, err = finish(start(config))
        assert code == 0, out + err
        assert "step    2/2" in out
    return root


@pytest.mark.parametrize("name", ["tp2pp2", "dp2"])
def test_invariants_of_a_run(runs, name):
    steps = [r for r in read_metrics(runs / name) if "reward/initial" in r]
    assert [r["step"] for r in steps] == [1, 2]
    for r in steps:
        # On-policy identity at the first update; the second mini-batch has moved on.
        assert r["policy/first_max_log_ratio"] == 0.0
        assert r["policy/approx_kl"] > 0
        assert r["policy/engine_gap_max"] < 1e-4
        assert r["samples/refinements_kept"] > 0 and 0 < r["policy/rho_mean"] < 1
        assert r["gradient/norm_refinements"] > 0 and r["gradient/norm"] > 0
        assert r["optimizer/updates"] == 2 and r["verifier/killed"] == 0
        assert r["groups/rescue_rate"] > 0 and 0 < r["policy/entropy"] < 3
        for phase in ("rollout_s", "score_s", "train_s", "push_s", "step_s"):
            assert r[f"time/{phase}"] > 0
    assert [r["weight_version"] for r in steps] == [1, 2]


def test_other_models_as_critic_and_refiner_and_a_guard(runs):
    """The policy's first weights again, as a critic with engines of its own and as the refiner; a
    limit that is always passed stops the run with its checkpoint."""
    world = {"path": str(runs / "world" / "policy"), "dtype": "float32", "kv_cache_mib": 16}
    critic = {"engine": world, "max_tokens": 16, "prompt": str(runs / "critique.txt")}
    (runs / "critique.txt").write_text("{question}try{response}")
    config = write_config(
        runs,
        "others",
        algorithm={"critique": "cot", "reward": "critic", "no_label": "rule"},
        feedback={"critic": critic, "refiner": world, "noise": {"share": 0.5, "kind": "swap"}},
        training={"steps": 5, "guards": {"entropy": 1e-6, "patience": 2}},
    )
    code, out, err = finish(start(config))
    assert code == GUARD_STOPPED, out + err
    assert "policy/entropy" in out and "stopping: " in out
    steps = [r for r in read_metrics(runs / "others") if "reward/initial" in r]
    assert [r["step"] for r in steps] == [1, 2]
    for r in steps:
        assert r["critic/requests"] > 0 and r["critic/no_label"] > 0 and r["critic/disturbed"] > 0
        assert r["samples/refinements_kept"] > 0 and r["critic/labels_from_rule"] > 0
        assert r["policy/first_max_log_ratio"] == 0.0
        said = sum(v for k, v in r.items() if k.startswith("critic/says_"))
        # Asked or taken from the cache, each response and each refinement once.
        assert said == r["samples/initial"] + r["samples/refinements_attempted"]
    assert read_run_state(latest_state(runs / "others" / "state"))["step"] == 2
    assert {"critic-0.log", "refiner-0.log", "critiques.sqlite"} <= {
        p.name for p in (runs / "others").iterdir()
    }
    assert not leftovers(runs)


def test_layouts_agree(runs):
    """TP2×PP2 with sequence parallelism and DP2 do the same first step."""
    a, b = (next(r for r in read_metrics(runs / n) if r["step"] == 1) for n in ("tp2pp2", "dp2"))
    for key in ("reward/initial", "groups/rescue_rate", "tokens/trained", "length/initial"):
        assert a[key] == b[key], key
    for key in ("gradient/norm", "gradient/norm_refinements", "policy/entropy", "policy/rho_mean"):
        assert a[key] == pytest.approx(b[key], rel=1e-3), key


def test_samples_tell_whole_lineages(runs):
    rows = [json.loads(x) for x in (runs / "dp2" / "samples.jsonl").read_text().splitlines()]
    refined = next(r for r in rows if r["refinements"])
    assert len(refined["initial"]) == 8 and not any(s["correct"] for s in refined["initial"])
    told = refined["refinements"][0]
    assert told["critique"].count("wrong") == 1 and told["parent"] in range(8)
    assert told["weight_versions"] in ([0], [1])


def test_export_is_complete_and_differs_from_the_start(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = runs / "tp2pp2" / "checkpoints" / "step_000002"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size
    before, after = HFCheckpoint(runs / "world" / "policy"), HFCheckpoint(out)
    assert before.shapes() == after.shapes()
    changed = [n for n in before.shapes() if not torch.equal(before.get(n), after.get(n))]
    assert len(changed) == len(before.shapes())


@pytest.mark.parametrize("name", ["tp2pp2", "dp2"])
def test_every_step_was_saved_and_exported(runs, name):
    states = runs / name / "state"
    assert [p.name for p in complete_states(states)] == ["step_000001", "step_000002"]
    assert latest_state(states).name == "step_000002"
    scores = {r["step"]: r.get("validation/accuracy") for r in read_metrics(runs / name)}
    best = (states / "best").read_text().strip()
    assert scores[int(best.removeprefix("step_"))] == max(scores[1], scores[2])
    for step in (1, 2):
        saved = read_run_state(states / f"step_{step:06d}")
        assert saved["step"] == saved["version"] == step and saved["validation"] == scores[step]
        # The weights of the training checkpoint are those of the export of the same step.
        state = MegatronCheckpoint(states / f"step_{step:06d}")
        export = HFCheckpoint(runs / name / "checkpoints" / f"step_{step:06d}")
        for entry in state.plan:
            for n, tensor in zip(entry.hf_names, state.get(entry), strict=True):
                assert torch.equal(tensor, export.get(n)), n


def test_wandb_is_written_offline(runs):
    assert list((runs / "dp2").glob("wandb/offline-run-*/*.wandb"))


def test_nothing_is_left_running(runs):
    assert leftovers(runs) == []


def wait_for_step(run, step, process):
    wait_for(run, "reward/initial", step, process)


def wait_for(run, metric, step, process):
    """Until metrics.jsonl has this metric of the step, or of a later one."""
    deadline = time.monotonic() + 300
    while True:
        rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        if any(r["step"] >= step and metric in r for r in rows):
            return
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)


def test_a_killed_engine_is_replaced_and_sigterm_stops_cleanly(runs):
    """The engine dies in mid-run: the run goes on. SIGTERM: it stops with a usable state."""
    config = write_config(runs, "stopped", parallel=DP2, training={"steps": 200})
    process = start(config)
    run = runs / "stopped"
    wait_for_step(run, 1, process)
    engines = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "api_server" in " ".join(p.cmdline())
    ]
    for core in engines[0].children(recursive=True):
        core.kill()
    killed_after = max(r["step"] for r in read_metrics(run))
    wait_for_step(run, killed_after + 2, process)
    row = [r for r in read_metrics(run) if "reward/initial" in r][-1]
    assert row["engine/restarts"] == 1
    assert row["policy/engine_gap_max"] < 1e-4
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 0, out + err
    assert "Traceback" not in err
    steps = [r["step"] for r in read_metrics(runs / "stopped") if "reward/initial" in r]
    last = steps[-1]
    assert steps == list(range(1, last + 1)) and last < 200
    export = runs / "stopped" / "checkpoints" / f"step_{last:06d}"
    assert HFCheckpoint(export).shapes()
    assert latest_state(run / "state").name == f"step_{last:06d}"
    assert leftovers(runs) == []


def test_kill_leaves_no_process_behind(runs):
    """SIGKILL of the command alone, when all is up: ranks, engines and verifiers go with it."""
    config = write_config(runs, "killed", parallel=DP2, training={"steps": 200})
    process = start(config)
    # Scored before the first step by engines, verifiers and ranks.
    wait_for(runs / "killed", "validation/accuracy", 0, process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any("/dev/shm" not in x for x in leftovers(runs)):
        assert time.monotonic() < deadline, leftovers(runs)
        time.sleep(0.5)
    for path in leftovers(runs):
        shutil.rmtree(path)  # the next run's first push would do it
