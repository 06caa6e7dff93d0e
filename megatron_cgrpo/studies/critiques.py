"""The paper's first table in small: what does each kind of critique give a stuck policy?

A policy that GRPO has brought to its plateau is asked problems; those that it fails in 4 of 4
samples are critiqued and refined once per response, with every kind of critique, without training.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from megatron_cgrpo.config import Config, parse_config
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.data.prompts import PromptBuilder, load_tokenizer
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.events import Collector
from megatron_cgrpo.rollout.fleet import POLICY, EngineFleet
from megatron_cgrpo.rollout.pipeline import RolloutPipeline
from megatron_cgrpo.rollout.writers import Work, Writer, writer_for
from megatron_cgrpo.studies.quickstart import STEPS, build_world, quickstart_config
from megatron_cgrpo.studies.report import plot_bars, print_rows, write_csv
from megatron_cgrpo.studies.runs import run_to_the_end
from megatron_cgrpo.types import Problem, Sample
from megatron_cgrpo.worlds import chain

ARMS = ("resample", "indicative", "indicative_gt", "step", "self")
SAMPLES = 4
PROBLEMS = 150
"""Failed problems that are enough."""
_RULES = ("indicative", "indicative_gt", "step")
_COLUMNS = ("valid critiques %", "valid refinements %", "problems rescued %")

Failed = list[tuple[Work, list[Sample]]]


def run_critique_study(directory: str, seed: int = 0, steps: int | None = None) -> int:
    """Train GRPO to its plateau, then compare the critiques; writes critiques.csv and .png.

    Returns:
        0, or the exit code of the training.
    """
    root = Path(directory).absolute()
    for name in ("world", "grpo", "engines"):
        shutil.rmtree(root / name, ignore_errors=True)
    policy = build_world(root / "world", seed)
    config = quickstart_config(root, policy, "grpo", seed, steps or STEPS)
    print(f"== GRPO to its plateau: {steps or STEPS} steps", flush=True)
    code = run_to_the_end(config)
    if code:
        return code
    stuck = root / "grpo" / "checkpoints" / f"step_{steps or STEPS:06d}"
    (root / "engines").mkdir()
    rows = asyncio.run(_study(root, stuck, seed))
    write_csv(root / "critiques.csv", rows)
    title = f"{rows[0]['problems']} problems failed in {SAMPLES} of {SAMPLES} samples"
    plot_bars(root / "critiques.png", title, rows, "critique", _COLUMNS)
    print_rows(title, rows)
    print(f"{root / 'critiques.csv'}, {root / 'critiques.png'}")
    return 0


def _config(root: Path, policy: Path, arm: str, seed: int) -> Config:
    raw = quickstart_config(root, policy, "critique_grpo", seed, 1).model_dump(mode="json")
    method = "resample" if arm == "resample" else "critique_grpo"
    critique = "none" if arm == "resample" else arm
    raw["algorithm"] |= {"method": method, "critique": critique, "responses": SAMPLES}
    template = root / "world" / "critique.txt"
    template.write_text("{question}try{response}")
    raw["feedback"]["critic"] |= {"prompt": str(template), "max_tokens": 32, "cache": False}
    return parse_config(raw)


async def _study(root: Path, policy: Path, seed: int) -> list[dict[str, Any]]:
    config = _config(root, policy, "step", seed)
    prompts = PromptBuilder(load_tokenizer(config), config.data, chain.REFINE_PROMPT)
    fleet = EngineFleet(config, chain.CONTEXT, root / "engines")
    pool = VerifierPool(config.feedback, {"chain"})
    fleet.start()
    try:
        await asyncio.to_thread(fleet.wait_ready)
        problems = [
            p
            for file in ("train", "test")
            for p in read_problems(
                root / "world" / f"{file}.jsonl", config.data.fields, "chain"
            ).problems
        ]
        pipeline = RolloutPipeline(config, fleet, pool, Writer())
        failed = await _failed(pipeline, prompts, problems, seed)
        rows = []
        for arm in ARMS:
            own = _config(root, policy, arm, seed)
            writer = writer_for(own, {"chain"}, {POLICY: fleet}, prompts, root / "engines", print)
            rows.append(await _arm(arm, RolloutPipeline(own, fleet, pool, writer), failed))
            await writer.close()
        return rows
    finally:
        await pool.close()
        await fleet.close()
        fleet.stop()


async def _failed(
    pipeline: RolloutPipeline, prompts: PromptBuilder, problems: list[Problem], seed: int
) -> Failed:
    """Problems without a right response, with their responses."""

    async def one(problem: Problem) -> tuple[Work, list[Sample]]:
        work = Work(problem, prompts.problem(problem), (seed, 0, problem.id), Collector())
        return work, await pipeline.respond(work)

    answered = await asyncio.gather(*map(one, problems))
    failed = [a for a in answered if not any(s.verdict.correct for s in a[1])]
    print(f"{len(failed)} of {len(problems)} problems failed {SAMPLES} times", flush=True)
    return failed[:PROBLEMS]


async def _arm(arm: str, pipeline: RolloutPipeline, failed: Failed) -> dict[str, Any]:
    """One row of the table; per cent."""
    refined = await asyncio.gather(
        *(pipeline.refine(work, responses) for work, responses in failed)
    )
    samples = [s for group in refined for s in group]
    asked = [
        (work.problem, responses[s.parent].completion.text, s.critique.text)
        for (work, responses), group in zip(failed, refined)
        for s in group
        if s.critique is not None
    ]
    valid = sum(_is_valid(*a) for a in asked)
    rescued = sum(any(s.verdict.correct for s in group) for group in refined)
    return {
        "critique": arm,
        "problems": len(failed),
        _COLUMNS[0]: _percent(valid, len(asked)) if asked else None,
        _COLUMNS[1]: _percent(sum(s.verdict.correct is True for s in samples), len(samples)),
        _COLUMNS[2]: _percent(rescued, len(failed)),
    }


def _is_valid(problem: Problem, response: str, critique: str) -> bool:
    """Whether the world's checker, asked for any kind of critique, would say this."""
    return critique in {chain.critique_chain(problem, response, kind) for kind in _RULES}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0
