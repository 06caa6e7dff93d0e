"""Problem files, prompts and the sampler."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.schema import Data, Fields
from megatron_cgrpo.config.templates import OMISSION, fill
from megatron_cgrpo.data.errors import DataError
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.data.prompts import PromptBuilder, refine_template, within_limit
from megatron_cgrpo.data.sampler import ProblemSampler
from megatron_cgrpo.types import Problem
from tests.tiny import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(root)
    return AutoTokenizer.from_pretrained(root)


def problem(text="1+1", **kwargs):
    return Problem("p", ({"role": "user", "content": text},), "2", **kwargs)


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("aime24.jsonl", 30, "204"),
        ("amc23.jsonl", 40, "27"),
        ("gsm8k.jsonl", 1319, "18"),
        ("math500.jsonl", 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("mawps.jsonl", 2065, "43"),
        ("minerva_math.jsonl", 272, "1.6"),
        ("olympiadbench.jsonl", 675, None),
        ("svamp.jsonl", 1000, "145"),
    ],
)
def test_real_benchmarks_load_as_they_are(benchmarks, name, count, first):
    problems = read_problems(benchmarks / name, Fields(), "math", keep_repeated=True).problems
    assert len(problems) == count
    assert all(p.question and p.answer for p in problems)
    if first is not None:
        assert problems[0].answer == first


def test_svamp_joins_body_and_question(benchmarks):
    (p,) = read_problems(benchmarks / "svamp.jsonl", Fields(), "math", limit=1).problems
    assert p.question.startswith("There are 87 oranges") and p.question.endswith("bananas?")
    assert p.id == "chal-777"


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_fields_and_parquet(tmp_path):
    rows = [
        {"q1": "a", "q2": "b", "gold": 2.0, "name": "n1"},
        {"q1": "c", "q2": "d", "gold": 3.5, "name": "n2"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    fields = Fields(question=("q1", "q2"), answer="gold", id="name")
    problems = read_problems(tmp_path / "p.parquet", fields, "choice").problems
    assert [(p.id, p.question, p.answer, p.kind) for p in problems] == [
        ("n1", "a b", "2", "choice"),
        ("n2", "c d", "3.5", "choice"),
    ]


def test_chat_and_plain_prompts(tokenizer, tmp_path):
    template = "{question}|{response}|{critique}"
    chat = PromptBuilder(tokenizer, Data(path="x"), template)
    assert tokenizer.decode(chat.problem(problem("2+2")), skip_special_tokens=False) == "<user>2+2:"
    file = tmp_path / "prompt.txt"
    file.write_text("Q: {question}\nA:")
    plain = PromptBuilder(
        tokenizer, Data(path="x", template="plain", prompt_file=str(file)), template
    )
    assert tokenizer.decode(plain.problem(problem("2+2"))) == "Q: 2+2\nA:"
    ids, shortened = chat.refinement(problem("2+2"), "5", "no", limit=100)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<user>2+2|5|no:" and not shortened


def test_long_responses_lose_their_middle(tokenizer):
    builder = PromptBuilder(tokenizer, Data(path="x"), "{question}|{response}|{critique}")
    response = "start" + "x" * 500 + "end"
    ids, shortened = builder.refinement(problem("q"), response, "the critique", limit=60)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert shortened and len(ids) <= 60
    assert (
        text.endswith("|the critique:") and "start" in text and "end|" in text and OMISSION in text
    )
    with pytest.raises(ValueError, match="limit 10"):
        builder.refinement(problem("q"), response, "the critique", limit=10)


def test_templates_are_not_format_strings():
    assert fill("\\boxed{} {question} {a}", question="{critique} {question}") == (
        "\\boxed{} {critique} {question} {a}"
    )


def test_prompt_mistakes(tokenizer, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_text("nothing")
    with pytest.raises(ConfigError, match="lacks {question}"):
        PromptBuilder(tokenizer, Data(path="x", prompt_file=str(bad)), "")
    with pytest.raises(ConfigError, match="cannot read"):
        refine_template(str(tmp_path / "none.txt"))
    assert "{critique}" in refine_template(None)
    builder = PromptBuilder(tokenizer, Data(path="x"), "")
    short, long = problem("a"), problem("a" * 50)
    kept, dropped = within_limit([short, long], builder, 10)
    assert [p for p, _ in kept] == [short] and dropped == 1
    with pytest.raises(ConfigError, match="all 1 problems"):
        within_limit([long], builder, 10)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 5))
def test_sampler_visits_all_and_resumes(size, count, seed):
    sampler = ProblemSampler(size, seed)
    batches = [sampler.next_batch(count) for _ in range(6)]
    flat = [i for b in batches for i in b]
    if count <= size:
        assert all(len(set(b)) == count for b in batches)
    for epoch in range(len(flat) // size):
        assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))
    other = ProblemSampler(size, seed)
    for _ in range(3):
        other.next_batch(count)
    resumed = ProblemSampler(size, seed)
    resumed.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert [resumed.next_batch(count) for _ in range(3)] == batches[3:]
    with pytest.raises(ValueError, match="saved position"):
        ProblemSampler(size + 1, seed).load_state_dict(sampler.state_dict())


def test_choices_are_lettered_and_shuffled_by_id(tmp_path):
    rows = [
        {"id": i, "question": f"Which {i}?", "options": ["w", "x", "y", "z"], "answer": a}
        for i, a in enumerate(["C", 2, "y"])
    ]
    path = write(tmp_path / "p.jsonl", rows)
    plain = read_problems(path, Fields(), "choice", shuffle_options=False).problems
    assert plain[0].question == "Which 0?\n\nA) w\nB) x\nC) y\nD) z"
    assert [p.answer for p in plain] == ["C", "C", "C"]
    shuffled = read_problems(path, Fields(), "choice").problems
    for p in shuffled:
        order = p.meta["option_order"]
        assert sorted(order) == [0, 1, 2, 3] and order["ABCD".index(p.answer)] == 2
        assert f"{p.answer}) y" in p.question
    # Options say what kind of problem it is.
    assert read_problems(path, Fields(), "math").problems == shuffled
    write(path, [{"question": "Which?", "options": ["w", "x"], "answer": "q"}])
    with pytest.raises(DataError, match="line 1: the answer 'q'"):
        read_problems(path, Fields(), "choice")
