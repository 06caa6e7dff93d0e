"""What a warm-started policy can do, measured with the product's own loop at learning rate 0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf
from megatron_cgrpo.studies.quickstart import quickstart_config
from megatron_cgrpo.studies.runs import read_metrics
from megatron_cgrpo.worlds import chain


def report(policy: Path, root: Path, start, finish) -> dict[str, float]:
    """Share of right solutions with none and two secret steps, and of right refinements of wrong
    ones per kind of critique."""
    shutil.copytree(policy, root / "policy32", dirs_exist_ok=True)
    stored = HFCheckpoint(policy)
    tensors = [(n, stored.get(n).float()) for n in stored.shapes()]
    model = write_hf(root / "model", tensors, [policy])
    (root / "world").mkdir()
    (root / "world" / "refine.txt").write_text(chain.REFINE_PROMPT)
    out = {}
    for name, secret, kind in (
        ("no secrets", 0, "indicative"),
        ("step", 2, "step"),
        ("indicative_gt", 2, "indicative_gt"),
        ("indicative", 2, "indicative"),
    ):
        world = chain.ChainWorld.make(7, secrets=3, steps=3, secret_steps=secret)
        problems = world.problems(1, 100)
        chain.write_problems(root / "world" / "train.jsonl", problems)
        chain.write_problems(root / "world" / "test.jsonl", problems)
        raw = quickstart_config(root, model, "critique_grpo", 0, 1).model_dump(mode="json")
        raw["run"]["name"] = name.replace(" ", "_")
        raw["optimizer"]["lr"] = 0.0
        raw["algorithm"] |= {"critique": kind, "refinements": 7}
        raw["validation"]["path"] = None
        raw["training"] |= {"problems_per_step": 64, "mini_batch_problems": 64}
        path = root / f"{raw['run']['name']}.yaml"
        path.write_text(yaml.safe_dump(raw))
        code, stdout, stderr = finish(start(path))
        assert code == 0, stdout + stderr
        row = next(r for r in read_metrics(root / raw["run"]["name"]) if r["step"] == 1)
        if secret:
            out["two secrets"] = row["reward/initial"]
            out[name] = row["reward/refined"]
        else:
            out[name] = row["reward/initial"]
    print(json.dumps(out))
    return out
