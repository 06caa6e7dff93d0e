"""The chain world: its checker, its critic, its tokenizer, its warm-start examples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.studies.warm_start import example
from megatron_cgrpo.worlds import chain

WORLD = chain.ChainWorld.make(0, secrets=3, steps=3, secret_steps=2)


def problem(seed):
    rng = random.Random(seed)
    start, ops = chain.random_problem(rng, 3, 2, "fgh")
    return chain.make_problem(start, ops, WORLD.tables)


@given(st.integers(0, 10_000), st.integers(0, 2), st.integers(1, 9))
def test_checker_and_critic(seed, at, shift):
    p = problem(seed)
    values = [int(c) for c in p.answer]
    right = chain.solution(p.meta["start"], p.meta["ops"], values)
    assert chain.verify_chain(p, right).correct is True
    assert chain.critique_chain(p, right, "step") == "right"
    values[at] = (values[at] + shift) % 10
    wrong = chain.solution(p.meta["start"], p.meta["ops"], values)
    verdict = chain.verify_chain(p, wrong)
    assert verdict.correct is False and f"step {at + 1}" in verdict.reason
    assert chain.critique_chain(p, wrong, "indicative") == "wrong"
    assert chain.critique_chain(p, wrong, "indicative_gt") == f"wrong;answer\\boxed{{{p.answer}}}"
    told = chain.critique_chain(p, wrong, "step")
    assert told == "ok;" * at + "wrong" + right.split(";")[at]


def test_a_lucky_box_is_not_enough():
    p = problem(1)
    assert chain.verify_chain(p, f"\\boxed{{{p.answer}}}").correct is False
    right = chain.solution(p.meta["start"], p.meta["ops"], [int(c) for c in p.answer])
    assert chain.verify_chain(p, right + ";").correct is False
    assert chain.verify_chain(p, "").correct is False


def test_worlds_are_fixed_by_their_seed():
    assert chain.ChainWorld.make(0, 3, 3, 2) == WORLD
    assert chain.ChainWorld.make(1, 3, 3, 2).tables != WORLD.tables
    a, b = WORLD.problems(1, 100), WORLD.problems(1, 100)
    assert a == b and len({p.id for p in a}) == 100
    assert all(sum(op in "fgh" for op in p.meta["ops"]) == 2 for p in a)


def test_problems_and_tokens_round_trip(tmp_path):
    from transformers import AutoTokenizer

    chain.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(chain.TOKENS)
    problems = WORLD.problems(2, 20)
    chain.write_problems(tmp_path / "p.jsonl", problems)
    assert read_problems(tmp_path / "p.jsonl", Fields(), "chain").problems == problems
    rng = random.Random(0)
    for _ in range(200):
        for text in example(rng):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text


def test_warm_start_examples_say_nothing_about_a_world():
    """The same (value, operation) must lead to every digit: tables are drawn anew each time."""
    rng = random.Random(0)
    seen: dict[str, set[str]] = {}
    for _ in range(4000):
        for step in example(rng)[1].split(";")[:-1]:
            left, right = step.split("=")
            if left[1] in "fgh":
                seen.setdefault(left, set()).add(right)
    assert len(seen) == 30 and all(len(v) == 10 for v in seen.values())


@pytest.mark.parametrize("kind", ["step", "indicative", "indicative_gt"])
def test_critiques_use_only_the_world_language(kind, tmp_path):
    from transformers import AutoTokenizer

    chain.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for response in ("", "nonsense", "3f=7;", "9" * 50):
        text = chain.critique_chain(problem(3), response, kind)
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
