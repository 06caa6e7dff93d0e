"""The quickstart: GRPO and Critique-GRPO on the chain world, from the same warm start.

Real parts throughout: Megatron-core with TP=2, a vLLM server per run, the product's own loop.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from megatron_cgrpo.config import Config, parse_config
from megatron_cgrpo.studies.runs import read_metrics, run_to_the_end, summarize
from megatron_cgrpo.studies.warm_start import shipped_policy
from megatron_cgrpo.worlds import chain

METHODS = ("grpo", "critique_grpo")
STEPS = 70
TRAIN_PROBLEMS, TEST_PROBLEMS = 600, 200
RESPONSES = {"grpo": 16, "critique_grpo": 8}
"""Responses a problem. Critique-GRPO samples up to 8 refinements more for a failed group, so GRPO
gets 16: it never samples less."""


def run_quickstart(directory: str, seed: int = 0, steps: int | None = None) -> int:
    """Train both methods, print a table, write summary.json and accuracy.png.

    Returns:
        0 when both runs finished; the first failing run's exit code otherwise.
    """
    root = Path(directory).absolute()
    for name in ("world", *METHODS):
        # Only what an earlier quickstart made.
        shutil.rmtree(root / name, ignore_errors=True)
    start = time.perf_counter()
    policy = build_world(root / "world", seed)
    results: dict[str, Any] = {}
    with _PeakMemory() as memory:
        for method in METHODS:
            print(f"\n== {method}: {steps or STEPS} steps on {root / method}", flush=True)
            config = quickstart_config(root, policy, method, seed, steps or STEPS)
            code = run_to_the_end(config)
            if code:
                return code
            results[method] = summarize(root / method)
    summary = {
        **results,
        "seed": seed,
        "steps": steps or STEPS,
        "wall_seconds": round(time.perf_counter() - start, 1),
        "peak_memory_gib": round(memory.peak / 2**30, 2),
    }
    (root / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(root)
    print_table(summary, root)
    return 0


def build_world(root: Path, seed: int) -> Path:
    """The world's problem files, prompts and the warm-started policy; returns its directory."""
    root.mkdir(parents=True)
    world = chain.ChainWorld.make(seed, secrets=3, steps=3, secret_steps=2)
    problems = world.problems(seed, TRAIN_PROBLEMS + TEST_PROBLEMS)
    chain.write_problems(root / "train.jsonl", problems[:TRAIN_PROBLEMS])
    chain.write_problems(root / "test.jsonl", problems[TRAIN_PROBLEMS:])
    (root / "refine.txt").write_text(chain.REFINE_PROMPT)
    return shipped_policy(root)


def quickstart_config(root: Path, policy: Path, method: str, seed: int, steps: int) -> Config:
    """The configuration of one run; the same for both methods but for the algorithm."""
    hardware = _hardware()
    algorithm: dict[str, Any] = {"method": method, "responses": RESPONSES[method]}
    if method == "critique_grpo":
        algorithm |= {"critique": "step", "refinements": 1}
    return parse_config(
        {
            "run": {"name": method, "directory": str(root), "seed": seed},
            "model": {"path": str(policy), "dtype": hardware["dtype"]},
            "data": {"path": str(root / "world" / "train.jsonl"), "kind": "chain"},
            "parallel": {"world_size": 2, "tensor": 2, **hardware["parallel"]},
            "optimizer": {"lr": 3e-4},
            "algorithm": algorithm,
            "rollout": {
                "max_prompt_tokens": 32,
                "max_response_tokens": 32,
                **hardware["rollout"],
            },
            "validation": {
                "path": str(root / "world" / "test.jsonl"),
                "every": 10,
                "temperature": 0.6,
            },
            "feedback": {"refine_prompt": str(root / "world" / "refine.txt")},
            "training": {
                "steps": steps,
                "problems_per_step": 16,
                "mini_batch_problems": 8,
                "micro_batch_tokens": 8192,
            },
            "logging": {"wandb": {"mode": "disabled"}},
        }
    )


def _hardware() -> dict[str, Any]:
    """Where the runs take place: on the CPU, or colocated on one or two GPUs."""
    import torch

    gpus = min(torch.cuda.device_count(), 2)
    if gpus == 0:
        return {"dtype": "float32", "parallel": {}, "rollout": {"placement": "cpu"}}
    return {
        # TransformerEngine's attention knows no float32.
        "dtype": "bfloat16",
        "parallel": {"world_size": gpus, "tensor": gpus},
        "rollout": {"placement": "colocated", "tensor": gpus, "gpu_memory_utilization": 0.3},
    }


def plot(root: Path) -> None:
    """Held-out accuracy over steps of both methods."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for method, color in zip(METHODS, ("tab:gray", "tab:blue")):
        rows = [r for r in read_metrics(root / method) if "validation/accuracy" in r]
        axes.plot(
            [r["step"] for r in rows],
            [r["validation/accuracy"] for r in rows],
            marker="o",
            markersize=3,
            color=color,
            label={"grpo": "GRPO", "critique_grpo": "Critique-GRPO"}[method],
        )
    axes.set(xlabel="step", ylabel="accuracy on held-out problems", ylim=(0, 1))
    axes.set_title("Chain world: 3 steps, 2 of them secret")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(root / "accuracy.png", dpi=150)
    plt.close(figure)


def print_table(summary: dict[str, Any], root: Path) -> None:
    """The result on the console."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out accuracy in the chain world")
    for column in ("method", "before", "after", "responses sampled", "seconds a step"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        r = summary[method]
        table.add_row(
            method,
            f"{r['accuracy_before']:.3f}",
            f"{r['accuracy']:.3f}",
            str(r["responses_sampled"]),
            f"{r['seconds_per_step']['step']:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{summary['wall_seconds']:.0f} s, {summary['peak_memory_gib']:.1f} GiB at most; "
        f"{root / 'summary.json'}, {root / 'accuracy.png'}",
        soft_wrap=True,
    )


class _PeakMemory:
    """Peak memory of this process and its children: proportional set sizes, sampled."""

    INTERVAL_S = 2.0

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.INTERVAL_S):
            self.peak = max(self.peak, _tree_memory())


def _tree_memory() -> int:
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
