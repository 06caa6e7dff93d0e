"""The chain world: digits sent through a chain of operations, some of them secret.

A problem such as `3f+4g` starts at 3 and applies `f`, `+4`, `g`. Its solution writes every step
and boxes all step results: `3f=7;7+4=1;1g=5;\\boxed{715}`. Public operations add or subtract
modulo 10. Secret ones are unary tables over digits, fixed per world and never shown, so a policy
that does not know them solves a problem with m secret steps with probability 10⁻ᵐ. The step
checker plays the critic.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from megatron_cgrpo.types import Problem, Verdict
from megatron_cgrpo.worlds.base import World

Tables = dict[str, list[int]]
Steps = list[str]

SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
WORDS = ("\\boxed{", "}", "=", ";", "wrong", "right", "ok", "answer", "try", "critique")
SECRET_NAMES = "fghjkq"
TOKENS = (*SPECIAL, *WORDS, *"0123456789", *"+-", *SECRET_NAMES)
REFINE_PROMPT = "{question}try{response}critique{critique}"
CONTEXT = 256


@dataclass(frozen=True)
class ChainWorld:
    """`tables` maps each secret operation to its ten results; problems have `steps` operations,
    `secret_steps` of them secret."""

    tables: Tables
    steps: int
    secret_steps: int

    @classmethod
    def make(cls, seed: int, secrets: int, steps: int, secret_steps: int) -> ChainWorld:
        rng = random.Random(f"chain world {seed}")
        return cls(random_tables(rng, SECRET_NAMES[:secrets]), steps, secret_steps)

    def problems(self, seed: int, count: int) -> list[Problem]:
        """`count` different problems; fewer where the world has fewer."""
        rng = random.Random(f"chain problems {seed}")
        found: dict[str, Problem] = {}
        for _ in range(50 * count):
            start, ops = random_problem(rng, self.steps, self.secret_steps, "".join(self.tables))
            problem = make_problem(start, ops, self.tables)
            found.setdefault(problem.id, problem)
            if len(found) == count:
                break
        return list(found.values())


def random_tables(rng: random.Random, names: str) -> Tables:
    return {name: [rng.randint(0, 9) for _ in range(10)] for name in names}


def random_problem(
    rng: random.Random, steps: int, secret_steps: int, names: str
) -> tuple[int, Steps]:
    """A start digit and operations with exactly `secret_steps` secret ones, in random order."""
    kinds = ["secret"] * secret_steps + ["public"] * (steps - secret_steps)
    rng.shuffle(kinds)
    ops = [
        rng.choice(names) if k == "secret" else rng.choice("+-") + str(rng.randint(1, 9))
        for k in kinds
    ]
    return rng.randint(0, 9), ops


def apply(value: int, op: str, tables: Tables) -> int:
    """One step."""
    if op[0] in "+-":
        return (value + int(op)) % 10
    return tables[op][value]


def results(start: int, ops: Steps, tables: Tables) -> list[int]:
    """The value after each step."""
    out, value = [], start
    for op in ops:
        value = apply(value, op, tables)
        out.append(value)
    return out


def written_steps(start: int, ops: Steps, values: list[int]) -> Steps:
    """`["3f=7", "7+4=1", …]` for these step results."""
    return [f"{x}{op}={y}" for x, op, y in zip([start, *values], ops, values)]


def solution(start: int, ops: Steps, values: list[int]) -> str:
    """The full solution text with these step results."""
    boxed = "\\boxed{" + "".join(map(str, values)) + "}"
    return ";".join([*written_steps(start, ops, values), boxed])


def make_problem(start: int, ops: Steps, tables: Tables) -> Problem:
    question = f"{start}{''.join(ops)}"
    values = results(start, ops, tables)
    return Problem(
        id=question,
        messages=({"role": "user", "content": question},),
        answer="".join(map(str, values)),
        kind="chain",
        meta={"start": start, "ops": ops},
    )


def verify_chain(problem: Problem, response: str) -> Verdict:
    """Right only if every step and the box are: a lucky last digit does not count."""
    right = solution(problem.meta["start"], problem.meta["ops"], _digits(problem))
    boxed = response.rpartition("\\boxed{")[2].partition("}")[0] if "\\boxed{" in response else None
    wrong_at = _first_difference(right, response)
    reason = "every step is right" if wrong_at is None else f"differs at step {wrong_at + 1}"
    return Verdict(response == right, boxed, reason)


def critique_chain(problem: Problem, response: str, kind: str) -> str:
    """What the step checker says, for the critiques indicative, indicative_gt and step.

    `step` walks the steps and names the first wrong one with its right value:
    `ok;wrong7g=5`.
    """
    values = _digits(problem)
    start, ops = problem.meta["start"], problem.meta["ops"]
    right = solution(start, ops, values)
    if response == right or kind == "indicative":
        return says(response == right)
    if kind == "indicative_gt":
        return f"wrong;answer\\boxed{{{problem.answer}}}"
    wrong_at = _first_difference(right, response)
    return "ok;" * wrong_at + "wrong" + right.split(";")[wrong_at]


def says(right: bool) -> str:
    """The verdict in the world's language."""
    return "right" if right else "wrong"


CHAIN = World(verify_chain, critique_chain, ("indicative", "indicative_gt", "step"), says)


def _digits(problem: Problem) -> list[int]:
    return [int(c) for c in problem.answer]


def _first_difference(right: str, response: str) -> int | None:
    """Index of the first part (steps, then the box) that differs; None if none does."""
    wanted, got = right.split(";"), response.split(";")
    for i, part in enumerate(wanted):
        if i >= len(got) or got[i] != part:
            return i
    return None if len(got) == len(wanted) else len(wanted) - 1


def write_problems(path: Path, problems: list[Problem]) -> None:
    """A JSONL file that `read_problems` reads."""
    rows = [
        {
            "id": p.id,
            "messages": list(p.messages),
            "answer": p.answer,
            "kind": p.kind,
            "meta": p.meta,
        }
        for p in problems
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def write_tokenizer(root: Path) -> None:
    """The world's tokenizer: one token per symbol, blanks dropped."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {t: i for i, t in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    words = "|".join(w.replace("\\", "\\\\").replace("{", r"\{").replace("}", r"\}") for w in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{words}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (root / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def model_config() -> dict:
    """config.json of the world's policy: Qwen3-shaped, 1.1M parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(TOKENS),
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "eos_token_id": TOKENS.index("<end>"),
        "bos_token_id": None,
        "pad_token_id": TOKENS.index("<pad>"),
    }
