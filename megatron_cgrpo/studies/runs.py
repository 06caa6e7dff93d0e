"""The runs of a study, and what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_cgrpo.config import Config
from megatron_cgrpo.training import launch
from megatron_cgrpo.training.directory import STOPPED

STOPPED_EARLY = 130
"""Exit code of a study whose run was stopped before its end (128 + SIGINT)."""


def run_to_the_end(config: Config) -> int:
    """Train; 0 when all steps are done, STOPPED_EARLY when somebody asked for a stop before, else
    the run's exit code."""
    code = launch.run(config)
    if code == 0 and (Path(config.run.directory) / config.run.name / STOPPED).exists():
        print("stopped before the end: nothing to compare", flush=True)
        return STOPPED_EARLY
    return code


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summarize(run: Path) -> dict[str, Any]:
    """Accuracy before and after, and where the time of a step went."""
    rows = read_metrics(run)
    accuracy = [r["validation/accuracy"] for r in rows if "validation/accuracy" in r]
    steps = [r for r in rows if "time/step_s" in r]

    def mean(key: str) -> float:
        return round(sum(r.get(key, 0.0) for r in steps) / len(steps), 3)

    return {
        "accuracy": accuracy[-1],
        "accuracy_before": accuracy[0],
        "responses_sampled": sum(
            r["samples/initial"] + r["samples/refinements_attempted"] for r in steps
        ),
        "all_failed_first_10_steps": round(
            sum(r["groups/all_failed"] for r in steps[:10]) / len(steps[:10]), 3
        ),
        "max_engine_gap": max(r["policy/engine_gap_max"] for r in steps),
        "seconds_per_step": {
            "rollout": mean("time/rollout_s"),
            "critique_refine_of_a_group": mean("time/refine_group_s"),
            "score": mean("time/score_s"),
            "train": mean("time/train_s"),
            "push": mean("time/push_s"),
            "step": mean("time/step_s"),
        },
        "push_gib_per_s": mean("push/gib_per_s"),
    }
