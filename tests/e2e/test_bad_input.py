"""Bad input: exit code 2, one clear sentence, no traceback, nothing started."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from megatron_cgrpo.cli import main
from tests.e2e.world import finish, leftovers, start, write_config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    write_config(root, "good")
    return root


@pytest.fixture
def refuse(root, capsys):
    """The command in this process (its imports take seconds): its one sentence."""

    def run(*overrides) -> str:
        before = sorted(root.rglob("*"))
        code = main(["train", str(root / "good.yaml"), *overrides])
        said = capsys.readouterr()
        assert code == 2 and said.err.count("error: ") == 1, said.out + said.err
        assert said.err.startswith("error: ") and said.err.count("\n") == 1
        assert sorted(root.rglob("*")) == before
        return said.err

    return run


def test_model_directories(root, refuse, tmp_path):
    assert "is not a directory" in refuse("model.path=/no/such")
    (tmp_path / "m").mkdir()
    assert "no config.json" in refuse(f"model.path={tmp_path / 'm'}")
    shutil.copytree(root / "world" / "policy", tmp_path / "p")
    (tmp_path / "p" / "config.json").write_text("{")
    assert "not valid JSON" in refuse(f"model.path={tmp_path / 'p'}")
    shutil.copy(root / "world" / "policy" / "config.json", tmp_path / "p" / "config.json")
    (tmp_path / "p" / "tokenizer.json").unlink()
    (tmp_path / "p" / "tokenizer_config.json").unlink()
    assert "no tokenizer" in refuse(f"model.path={tmp_path / 'p'}")
    for f in (tmp_path / "p").glob("*.safetensors"):
        f.unlink()
    assert "no *.safetensors" in refuse(f"model.path={tmp_path / 'p'}")


def test_data_files(refuse, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": "1", "answer": 1}\n{oops\n')
    assert "line 2 is not valid JSON" in refuse(f"data.path={bad}")
    bad.write_text(json.dumps({"problem": "1", "answer": 1}) + "\n")
    assert "fewer than training.problems_per_step" in refuse(f"data.path={bad}")
    assert "no verifier for problems of kind" in refuse(
        "data.kind=poetry", f"data.path={_many(tmp_path)}"
    )


def _many(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i}", "answer": 1}) + "\n" for i in range(40)))
    return path


def test_layouts_and_lengths(refuse):
    assert "not a multiple of tensor" in refuse("parallel.world_size=3")
    assert "does not divide" in refuse("parallel.tensor=3", "parallel.world_size=3")
    assert "context" in refuse(
        "rollout.max_response_tokens=4000", "training.micro_batch_tokens=8000"
    )
    assert "did you mean 'training.steps'" in refuse("training.step=3")


def test_an_earlier_run_is_not_overwritten(root, refuse):
    done = root / "good"
    done.mkdir(exist_ok=True)
    (done / "metrics.jsonl").write_text("{}\n")
    assert "holds an earlier run" in refuse()
    assert (done / "metrics.jsonl").read_text() == "{}\n"
    shutil.rmtree(done)


def test_dry_run_prints_what_would_be_started(root):
    code, out, err = finish(start(root / "good.yaml", "--dry-run"), timeout_s=120)
    assert code == 0, err
    resolved = yaml.safe_load(out.split("# trainer:")[0])
    assert resolved["algorithm"]["gamma"] == 0.1 and resolved["optimizer"]["lr"] == 3e-4
    assert "# responses end with the tokens 1\n" in out
    assert "--nproc-per-node=2" in out and "vllm.entrypoints.openai.api_server" in out
    assert not (root / "good").exists()


def test_a_tokenizer_that_does_not_fit_the_model(root, refuse, tmp_path):
    tokenizer = tmp_path / "t"
    shutil.copytree(root / "world" / "policy", tokenizer)
    data = json.loads((tokenizer / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    vocab.update({f"extra{i}": len(vocab) + i for i in range(9)})
    (tokenizer / "tokenizer.json").write_text(json.dumps(data))
    assert "more tokens than the model" in refuse(f"model.tokenizer={tokenizer}")


def test_a_refused_command_from_the_outside(root):
    code, out, err = finish(start(root / "good.yaml", "training.step=3"), timeout_s=120)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_an_engine_that_does_not_start_shows_its_last_words(root):
    """Found while the run starts: exit code 1, the engine's own lines, nothing left behind."""
    overrides = ["run.name=noengine", "rollout.extra_args=[--no-such-option]"]
    code, out, err = finish(start(root / "good.yaml", *overrides), timeout_s=200)
    assert code == 1, out + err
    assert "error: the vLLM server exited with code" in err and "no-such-option" in err
    assert err.count("error: the vLLM server") == 1 and "Traceback" not in err
    assert leftovers(root) == []
