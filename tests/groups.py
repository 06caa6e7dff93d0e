"""Random but valid groups for tests of batches, losses and the actor."""

from __future__ import annotations

import random

from megatron_cgrpo.algorithm.advantages import with_advantages
from megatron_cgrpo.types import Completion, Group, Problem, Sample, Verdict


def sample(rng: random.Random, role: str, prompt, vocab: int, correct: bool, parent=None, length=0):
    length = length or rng.choice([1, 2, 7, 13, 33])
    ids = tuple(rng.randrange(3, vocab) for _ in range(length))
    logprobs = tuple(-rng.random() * 3 for _ in ids)
    completion = Completion(prompt, ids, logprobs, "", "stop", (0,))
    return Sample("p", role, completion, Verdict(correct), None, parent)


def groups(seed: int, count: int, vocab: int = 151, n: int = 4, k: int = 2) -> list[Group]:
    """`count` groups; every other one failed altogether and was refined."""
    rng = random.Random(seed)
    out = []
    for g in range(count):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.choice([1, 5, 11])))
        failed = g % 2 == 1
        initial = tuple(
            sample(rng, "initial", prompt, vocab, not failed and i == 0) for i in range(n)
        )
        refined = tuple(
            sample(rng, "refinement", prompt, vocab, i == 0, parent=i)
            for i in range(k if failed else 0)
        )
        problem = Problem(f"p{g}", ({"role": "user", "content": "q"},), "a")
        out.append(with_advantages(Group(problem, prompt, initial, refined)))
    return out
