"""The quickstart's policy: supervised fine-tuning of a random model on the chain world's formats.

It learns to write solutions, the public operations, and to use a critique. Tables of secret
operations are drawn anew for every example, so it learns nothing about any world's own tables:
with m secret steps it is right with probability 10⁻ᵐ.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from megatron_cgrpo.algorithm.batch import supervised_batch
from megatron_cgrpo.config import Config, parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import plan_for
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, write_hf
from megatron_cgrpo.worlds import chain

STEPS = 2500
EXAMPLES_PER_STEP = 48
LEARNING_RATE = 2e-3
RANKS = 2
SHIPPED = Path(__file__).with_name("warm_start_data")
"""The result of `cgrpo warm-start`, weights in bfloat16."""


def example(rng: random.Random, names: str = "fgh") -> tuple[str, str]:
    """A (prompt, response) text pair: a problem and its solution, or a refinement of a wrong
    attempt given a critique of any kind."""
    steps = rng.randint(2, 4)
    start, ops = chain.random_problem(rng, steps, rng.randint(0, steps), names)
    problem = chain.make_problem(start, ops, chain.random_tables(rng, names))
    right = chain.solution(start, ops, [int(c) for c in problem.answer])
    if rng.random() < 0.4:
        return problem.question, right
    attempt = chain.solution(start, ops, _wrong_values(rng, problem))
    kind = rng.choice(["step", "step", "step", "indicative", "indicative_gt"])
    critique = chain.critique_chain(problem, attempt, kind)
    prompt = chain.REFINE_PROMPT.replace("{question}", problem.question)
    return prompt.replace("{response}", attempt).replace("{critique}", critique), right


def _wrong_values(rng: random.Random, problem) -> list[int]:
    """Step results with a first mistake at a random step; the secret steps after it are guesses."""
    ops = problem.meta["ops"]
    right = [int(c) for c in problem.answer]
    first = rng.randrange(len(ops))
    values = right[:first] + [(right[first] + rng.randint(1, 9)) % 10]
    for op in ops[first + 1 :]:
        secret = op[0] not in "+-"
        values.append(rng.randint(0, 9) if secret else chain.apply(values[-1], op, {}))
    return values


def launch_warm_start(out: str, steps: int | None, seed: int) -> int:
    """Train on RANKS data-parallel ranks and write a Hugging Face directory; the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "-m", "megatron_cgrpo.studies.warm_start"]
    env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", PYTHONWARNINGS="ignore")
    return subprocess.run([*command, out, str(steps or STEPS), str(seed)], env=env).returncode


def random_policy(root: Path, seed: int) -> Path:
    """A directory with the world's tokenizer and a randomly initialised policy (std 0.02)."""
    chain.write_tokenizer(root)
    (root / "config.json").write_text(json.dumps(chain.model_config(), indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for entry in plan_for(shape_of(chain.model_config())):
        for name, dims in zip(entry.hf_names, entry.hf_shapes):
            noise = torch.randn(dims, generator=generator) * 0.02
            tensors.append((name, torch.ones(dims) if "norm" in name else noise))
    target = root / "initial"
    return write_hf(target, tensors, [root])


def shipped_policy(root: Path) -> Path:
    """Unpack the shipped warm-started policy into `root` (float32)."""
    stored = HFCheckpoint(SHIPPED)
    chain.write_tokenizer(root)
    (root / "config.json").write_text(json.dumps(chain.model_config(), indent=1))
    tensors = [(name, stored.get(name).float()) for name in stored.shapes()]
    return write_hf(root / "policy", tensors, [root])


def _config(model: Path, steps: int, seed: int) -> Config:
    return parse_config(
        {
            "run": {"seed": seed},
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "generated"},
            "parallel": {"world_size": RANKS},
            "optimizer": {
                "lr": LEARNING_RATE,
                "min_lr": LEARNING_RATE / 20,
                "lr_schedule": "linear",
                "warmup_steps": min(50, steps // 10),
                "weight_decay": 0.01,
            },
            "rollout": {"max_prompt_tokens": 96, "max_response_tokens": 64},
            "training": {
                "steps": steps,
                "problems_per_step": EXAMPLES_PER_STEP,
                "micro_batch_tokens": 4096,
                "skip_zero_advantage": False,
            },
        }
    )


def main(out: Path, steps: int, seed: int) -> None:
    """One rank of the warm start."""
    import torch.distributed as dist
    from tokenizers import Tokenizer

    from megatron_cgrpo.policy.actor import MegatronActor
    from megatron_cgrpo.policy.export import drain, stream_hf
    from megatron_cgrpo.policy.parallel import initialize, shutdown

    scratch = out.with_name(f".{out.name}.scratch-{os.environ['RANK']}")
    model = random_policy(scratch, seed)
    config = _config(model, steps, seed)
    initialize(config.parallel, seed)
    shape = shape_of(chain.model_config())
    actor = MegatronActor(config, shape, HFCheckpoint(model))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    rng, start = random.Random(seed), time.perf_counter()

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    for step in range(1, steps + 1):
        pairs = [example(rng) for _ in range(EXAMPLES_PER_STEP)]
        batch = supervised_batch([(ids(f"<user>{p}<assistant>"), [*ids(r), end]) for p, r in pairs])
        loss, norm = actor.train_supervised(actor.prepare(batch, 1)[0])
        if dist.get_rank() == 0 and (step % 100 == 0 or step == steps):
            seconds = time.perf_counter() - start
            print(
                f"warm start {step}/{steps}  loss {loss:.4f}  |g| {norm:.2f}  {seconds:.0f} s",
                flush=True,
            )
    tensors = ((n, t if t is None else t.bfloat16()) for n, t in stream_hf(actor.model))
    if dist.get_rank() == 0:
        write_hf(out, tensors, [model])
    else:
        drain(tensors)
    shutil.rmtree(scratch, ignore_errors=True)
    shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
