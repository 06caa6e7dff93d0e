"""Problem files as people have them: read as meant, or refused in one sentence."""

from __future__ import annotations

import gzip
import json
import random
import string

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config.schema import Fields
from megatron_cgrpo.data.choices import LETTERS
from megatron_cgrpo.data.errors import DataError
from megatron_cgrpo.data.problems import read_problems
from megatron_cgrpo.data.records import lookup

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def one(tmp_path, row, kind="math", **fields):
    (problem,) = read_problems(write(tmp_path / "p.jsonl", row), Fields(**fields), kind).problems
    return problem


def refusal(tmp_path, row, kind="math", **fields) -> str:
    with pytest.raises(DataError) as e:
        one(tmp_path, row, kind, **fields)
    message = str(e.value)
    assert message.startswith(f"{tmp_path / 'p.jsonl'}, line 1") and "\n" not in message
    return message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": CHAT, "answer": "2"},
        {"messages": CHAT, "expected_answer": 2},
        {"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "data_source": "x"},
        {"prompt": CHAT, "solution": "So \\boxed{2}."},
        {
            "prompt": [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}],
            "answer": 2.0,
        },
        # A set for fine-tuning has the whole conversation beside the question.
        {
            "problem": "1+1?",
            "messages": [CHAT[1], {"role": "assistant", "content": "2"}],
            "answer": "2",
        },
    ],
)
def test_chats_are_taken_as_chats(tmp_path, row):
    problem = one(tmp_path, row)
    assert problem.question == "1+1?" and problem.answer == "2"
    assert [m["role"] for m in problem.messages] in (["system", "user"], ["user"])
    assert "problem" in row or problem.messages[0] == CHAT[0]


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"problem": "a", "answer": 27.0}, "a", "27"),
        # Left out with the golds that cannot be judged against.
        ({"problem": "a", "answer": ""}, "a", ""),
        ({"problem": "a", "answer": "x #### "}, "a", ""),
        ({"problem": "a", "answer": "so \\boxed{}"}, "a", ""),
        ({"problem": "a", "answer": 1.5}, "a", "1.5"),
        ({"problem": "a", "answer": 7}, "a", "7"),
        ({"problem": "a", "answer": True}, "a", "True"),
        ({"question": "a", "answer": "b\n#### 1,018"}, "a", "1018"),
        ({"question": "a", "answer": "b\n#### (3, 4)"}, "a", "(3, 4)"),
        ({"question": "a", "final_answer": ["x"]}, "a", "x"),
        ({"Body": "a", "Question": "b", "Answer": 1.0}, "a b", "1"),
        (
            {"prompt": "a", "solution": "Since $\\boxed{1}$, it is \\boxed{\\frac{1}{2}}."},
            "a",
            "\\frac{1}{2}",
        ),
        ({"problem": "a", "expected_answer": "3"}, "a", "3"),
        ({"problem": "a", "answer": None, "solution": "4"}, "a", "4"),
        ({"problem": "a", "answer": "2", "kind": None}, "a", "2"),
        ({"input": "a", "target": 43.0, "type": "singleeq"}, "a", "43"),
    ],
)
def test_questions_and_answers_by_their_usual_names(tmp_path, row, question, answer):
    problem = one(tmp_path, row)
    assert (problem.question, problem.answer, problem.kind) == (question, answer, "math")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": "1+1?", "answer": 2}, "messages is text, not a list of messages"),
        ({"messages": [], "answer": 2}, "messages is an empty list of messages"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "2"}], "answer": 2},
            "ends with a message of the assistant",
        ),
        (
            {"prompt": [{"role": "user", "content": None}], "answer": 2},
            "content of prompt[0] is null",
        ),
        (
            {"prompt": [{"role": "user", "content": " "}], "answer": 2},
            "content of prompt[0] is empty",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": 2},
            "part that is not text",
        ),
        ({"prompt": [{"role": "tool", "content": "x"}], "answer": 2}, "the role 'tool'"),
        ({"prompt": [{"from": "human", "value": "x"}], "answer": 2}, "the role None"),
        ({"prompt": ["x"], "answer": 2}, "prompt is a list, not text"),
        ({"problem": "", "answer": 2}, "has no question"),
        ({"problem": "  ", "answer": 2}, "problem is empty"),
        ({"problem": 5, "answer": 2}, "problem is a number, not text"),
        ({"problem": {"text": "x"}, "answer": 2}, "problem is a mapping, not text"),
        ({"problem": "a", "answer": {"value": 2}}, "answer is a mapping, not text"),
        ({"problem": "a", "answer": [1, 2]}, "answer is a list of 2"),
        ({"problem": "a", "answer": []}, "answer is a list of 0"),
        ({"problem": "a", "answer": float("nan")}, "answer is nan, not a number"),
        ({"problem": "a", "answer": " "}, "answer is empty"),
        ({"problem": "a", "answer": None}, "has no answer"),
        ({"problem": "a", "gold": 1}, "name one with data.fields.answer"),
        ({"text": "a", "answer": 1}, "name them with data.fields.question"),
        ({"problem": "a", "answer": 1, "kind": 3}, "kind is a number, not text"),
        ({"problem": "a", "answer": 1, "meta": "x"}, "meta is no mapping"),
        ({"problem": "a", "answer": 1, "id": [1]}, "id is a list, not a name"),
        ({"problem": "\ud800", "answer": 1}, "half of a character"),
        (
            {
                "question": "a",
                "choices": {"text": ["x", "y"], "label": ["A", "B"]},
                "answerKey": "C",
            },
            "none of the labels",
        ),
        ({"question": "a", "choices": "x", "answer": "A"}, "choices is no list of options"),
        ({"question": "a", "options": ["x", None], "answer": "A"}, "options[1] is no text"),
        ({"question": "a", "options": ["x", "y", "x"], "answer": "A"}, "two options have the text"),
        ({"question": "a", "options": ["1", "2", "3"], "answer": 2}, "counts another"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, row, said):
    assert said in refusal(tmp_path, row)


def test_fields_by_dotted_paths(tmp_path):
    row = {"turns": [{"q": "1+1?"}], "gold": {"value": [2]}, "who": {"name": "n"}}
    names = {"question": "turns.0.q", "answer": "gold.value", "id": "who.name"}
    problem = one(tmp_path, row, **names)
    assert (problem.question, problem.answer, problem.id) == ("1+1?", "2", "n")
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": [1]}, "a.1") is lookup({"a": 1}, "a.b") is None
    assert "has no answer" in refusal(tmp_path, row, question="turns.0.q", answer="gold.x")
    assert one(tmp_path, {"p": CHAT, "answer": 2}, question="p").messages[0] == CHAT[0]


GPQA = {
    "Record ID": "rec1",
    "Question": "Which?",
    "Correct Answer": "right",
    "Incorrect Answer 1": "w1",
    "Incorrect Answer 2": "w2",
    "Incorrect Answer 3": "w3",
}


def test_gpqa_never_shows_the_right_option_first_by_rule(tmp_path):
    rows = [{**GPQA, "Question": f"{i}?", "Record ID": f"rec{i}"} for i in range(40)]
    path = write(tmp_path / "p.jsonl", *rows)
    problems = read_problems(path, Fields(), "math", shuffle_options=False).problems
    assert all(f"{p.answer}) right" in p.question and p.kind == "choice" for p in problems)
    assert {p.answer for p in problems} == set("ABCD") and problems[0].id == "rec0"
    assert problems == read_problems(path, Fields(), "math").problems


@pytest.mark.parametrize("labels", ["ABCD", "1234"])
def test_arc(tmp_path, labels):
    choices = {"text": ["w", "x", "y", "z"], "label": list(labels)}
    row = {"id": "Mercury_1", "question": "Which?", "choices": choices, "answerKey": labels[2]}
    problem = one(tmp_path, row)
    assert problem.kind == "choice" and f"{problem.answer}) y" in problem.question


def test_code_records_of_other_types_are_refused(tmp_path):
    row = {"text": "Square.", "test_list": "assert True", "code": "x"}
    assert "test_list is not a list of texts" in refusal(tmp_path, row, "code")
    assert "prompt is not text" in refusal(tmp_path, {"prompt": CHAT, "test": "x"}, "code")


# ---------------------------------------------------------------------- files

ROWS = [{"problem": f"{i}+1", "answer": str(i + 1), "id": f"n{i}"} for i in range(5)]


def as_jsonl(rows) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


def write_arrow(path, rows, stream=True):
    table = pyarrow.Table.from_pylist(rows)
    make = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table)


def save_dataset(root, rows):
    """As `datasets.Dataset.save_to_disk` writes it, in two files."""
    root.mkdir(parents=True)
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:])):
        write_arrow(root / name, part)
    state = {"_data_files": [{"filename": n} for n in names], "_indices_data_files": None}
    (root / "state.json").write_text(json.dumps(state))
    (root / "dataset_info.json").write_text("{}")


def make_files(root):
    text = as_jsonl(ROWS)
    (root / "a.jsonl").write_bytes(text)
    (root / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    (root / "crlf.ndjson").write_bytes(text.replace(b"\n", b"\r\n"))
    (root / "a.json").write_text(json.dumps(ROWS, indent=1))
    (root / "a.jsonl.gz").write_bytes(gzip.compress(text))
    lines = [
        "id,problem,answer,kind",
        *(f'{r["id"]},"{r["problem"]}",{r["answer"]},' for r in ROWS),
    ]
    (root / "a.csv").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), root / "a.parquet")
    write_arrow(root / "stream.arrow", ROWS)
    write_arrow(root / "file.arrow", ROWS, stream=False)
    save_dataset(root / "saved", ROWS)
    save_dataset(root / "splits" / "train", ROWS)
    (root / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


def test_every_form_of_file_holds_the_same(tmp_path):
    make_files(tmp_path)
    expected = read_problems(tmp_path / "a.jsonl", Fields(), "math").problems
    assert [p.id for p in expected] == [r["id"] for r in ROWS]
    for path in sorted(tmp_path.iterdir()):
        assert read_problems(path, Fields(), "math").problems == expected, path.name


def test_the_datasets_library_saves_what_we_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "whole", num_shards=2)
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "dict")
    whole.select([3, 1]).save_to_disk(tmp_path / "some")
    expected = [r["id"] for r in ROWS]
    for path in (tmp_path / "whole", tmp_path / "dict" / "train"):
        assert [p.id for p in read_problems(path, Fields(), "math").problems] == expected
    with pytest.raises(DataError, match=r"holds the splits \['train', 'test'\]: name one"):
        read_problems(tmp_path / "dict", Fields(), "math")
    some = read_problems(tmp_path / "some", Fields(), "math").problems
    assert [p.id for p in some] == ["n3", "n1"]


def test_verls_parquet(tmp_path):
    rows = [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "v.parquet")
    reading = read_problems(tmp_path / "v.parquet", Fields(), "math")
    assert [(p.id, p.question, p.answer) for p in reading.problems] == [
        (str(i), f"{i}?", str(i)) for i in range(3)
    ]
    assert dict(reading.layouts) == {"prompt (chat) → reward_model.ground_truth": 3}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "p.jsonl",
            b'{"problem": "a", "answer": "1"}\n\n{"problem": \n',
            "line 3 is not valid JSON",
        ),
        ("p.jsonl", b"[1]\n", "is an array, not a JSON object"),
        ("p.jsonl", b"\n", "holds no problems"),
        ("p.jsonl", b"[" * 100_000, "line 1 is nested too deeply"),
        (
            "p.jsonl",
            b'{"problem": "a", "answer": ' + b"9" * 9000 + b"}",
            "line 1 is not valid JSON",
        ),
        (
            "p.jsonl",
            '{"problem": "é", "answer": "1"}'.encode("latin-1"),
            "is not UTF-8 (byte 0xe9); it looks like Latin-1",
        ),
        ("p.json", '[{"problem": "é"}]'.encode("utf-16"), "it looks like UTF-16"),
        ("p.json", b'{"data": []}', "holds an object, not an array of records"),
        ("p.json", b"[1]", "record 1 is a number"),
        ("p.json", b"[\n{", "is not valid JSON (line 2)"),
        ("p.csv", b"problem,answer\na,1\nb\n", "record 2 (line 3) has not as many fields"),
        ("p.csv", b'problem,answer\n"a,1\n', "is not valid CSV"),
        ("p.csv", b"", "holds no problems"),
        ("p.csv", b"problem,answer,answer\na,1,2\n", "names a field twice"),
        ("p.jsonl.gz", b"no gzip", "cannot be read"),
        ("p.jsonl.gz", gzip.compress(b"x" * 5000)[:-20], "cannot be read"),
        ("p.parquet", b"no parquet", "is not a Parquet file"),
        ("p.arrow", b"no arrow", "is not an Arrow file"),
        ("p.txt", b"", "unknown suffix"),
    ],
)
def test_bad_files(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as e:
        read_problems(tmp_path / name, Fields(), "math")
    assert said in str(e.value) and str(tmp_path / name) in str(e.value)
    assert "\n" not in str(e.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataError, match="none.jsonl does not exist"):
        read_problems([tmp_path / "none.jsonl"], Fields(), "math")
    with pytest.raises(DataError, match=r"\*.jsonl does not exist"):
        read_problems(str(tmp_path / "*.jsonl"), Fields(), "math")
    with pytest.raises(DataError, match="none that `datasets` saved"):
        read_problems(tmp_path, Fields(), "math")
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(DataError):
        read_problems(tmp_path, Fields(), "math")


def test_several_files_and_patterns(tmp_path):
    write(tmp_path / "a.jsonl", *ROWS[:2])
    write(tmp_path / "b.jsonl", {**ROWS[2], "id": "n0"}, {"problem": "x", "answer": 1})
    reading = read_problems([str(tmp_path / "*.jsonl")], Fields(), "math")
    assert [p.id for p in reading.problems] == ["n0", "n1", "b-1", "b-2"]
    assert reading.renamed == ["b-1"]
    assert "1 records have an id that was used before; they are called b-1" in reading.notes("f")[0]
    first = read_problems([tmp_path / "b.jsonl", tmp_path / "a.jsonl"], Fields(), "math", limit=2)
    assert [p.id for p in first.problems] == ["n0", "b-2"]


def test_repeated_records_are_read_once(tmp_path):
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2"}] * 50
    rows += [{"problem": "a", "answer": "7", "id": "odd"}]
    path = write(tmp_path / "p.jsonl", *rows)
    reading = read_problems(path, Fields(), "math")
    assert [p.question for p in reading.problems] == ["a", "b", "a"]
    assert reading.repeated == 98 and reading.conflicts == [("1", "odd")]
    said = reading.notes("p")
    assert said[0] == "p: 98 records repeat the prompt and answer of others"
    assert said[1] == "p: the same prompt with different answers: 1 and odd"
    kept = read_problems(path, Fields(), "math", keep_repeated=True).problems
    assert len(kept) == 101 == len({p.id for p in kept})
    # However the options are shuffled.
    options = {"question": "q", "options": list("wxyz")}
    rows = [{**options, "answer": "w", "id": str(i)} for i in range(8)]
    reading = read_problems(write(path, *rows), Fields(), "choice")
    assert len(reading.problems) == 1 and reading.repeated == 7


# ----------------------------------------------------------------- properties

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.text(max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "label", "ground_truth", "index", "type"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
names = st.sampled_from(
    ["problem", "messages", "prompt", "question", "answer", "solution", "reward_model", "kind"]
    + ["id", "meta", "options", "choices", "answerKey", "extra_info", "data_source", "test_list"]
    + ["Question", "Correct Answer", "Incorrect Answer 1", "text", "entry_point", "test"]
)


@given(
    st.lists(st.dictionaries(names, values, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["math", "choice", "code", "chain"]),
)
def test_any_record_is_a_problem_or_one_sentence(tmp_path_factory, rows, kind):
    path = tmp_path_factory.getbasetemp() / "generated.jsonl"
    write(path, *rows)
    try:
        reading = read_problems(path, Fields(), kind)
    except DataError as e:
        assert str(path) in str(e) and "\n" not in str(e)
        return
    assert len({p.id for p in reading.problems}) == len(reading.problems) > 0
    for p in reading.problems:
        assert p.messages[-1]["role"] == "user" and p.question.strip()
        assert all(isinstance(m["content"], str) for m in p.messages)
        assert isinstance(p.answer, str) and isinstance(p.kind, str)
        json.dumps(p.meta)
        p.question.encode()


@given(
    st.binary(max_size=60),
    st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".arrow", ".jsonl.gz"]),
)
def test_any_bytes_are_refused_in_one_sentence(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError) as e:
        read_problems(path, Fields(), "math")
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@given(st.text(string.ascii_letters, min_size=1, max_size=8), st.integers(2, 10))
def test_options_keep_their_gold(tmp_path_factory, name, count):
    path = tmp_path_factory.getbasetemp() / "options.jsonl"
    texts = [f"option {i}" for i in range(count)]
    gold = random.Random(name).randrange(count)
    write(path, {"id": name, "question": "q", "options": texts, "answer": gold})
    (p,) = read_problems(path, Fields(), "choice").problems
    assert f"{p.answer}) option {gold}" in p.question.splitlines()
    assert sorted(p.meta["option_order"]) == list(range(count)) and p.answer in LETTERS[:count]
