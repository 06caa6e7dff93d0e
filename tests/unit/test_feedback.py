"""Verdicts, the killable pool, and the rule-based critics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cgrpo.config.errors import ConfigError
from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.data.boxes import boxes
from megatron_cgrpo.feedback.choice_verifier import extract_choice, verify_choice
from megatron_cgrpo.feedback.critics import check_critique, rule_critic
from megatron_cgrpo.feedback.grade import grade_file
from megatron_cgrpo.feedback.math_forms import rational
from megatron_cgrpo.feedback.math_verifier import extract_answer, unreadable_gold, verify_math
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.feedback.rewritings import rewritings
from megatron_cgrpo.feedback.text import without_thinking
from megatron_cgrpo.types import Completion, Problem, Sample, Verdict


def problem(answer: str, kind: str = "math") -> Problem:
    return Problem("p", ({"role": "user", "content": "q"},), answer, kind)


RIGHT = [
    ("5", r"so \boxed{5}"),
    ("18", "Q: What?\nA: a + b = 18"),
    ("18", r"\boxed{3} no wait, \boxed{18}"),
    ("27", r"\boxed{27.0}"),
    ("1018", r"\boxed{1,018}"),
    (r"\frac{1}{2}", r"\boxed{50\%}"),
    (r"28\%", r"\boxed{28 percent}"),
    ("5/4", r"\boxed{1 1/4}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \frac{\pi}{2})}"),
    ("2\\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("7", r"<think>\boxed{9}</think> The answer is 7."),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2004!}}"),
]
RIGHT += [
    ("8", "To answer this, we compute 5+3 = 8."),
    ("12", "The answer is 12. I hope this answer helps!"),
    ("12", "The answer is 12, because 3*4 = 13."),
    ("8", "So 5+3=8. This answers the question"),
    ("72", "**Answer:** 72 clips"),
    ("3.5", "the answer is 3.5."),
    ("x+1", "Final answer: $x+1$."),
    ("x+y", "We get 3 terms. The answer is x+y."),
    ("n!", "With n=3 the answer is n!."),
    ("3x", "The answer is 3 x."),
]
WRONG = [
    ("2", "The answer is 2 pi."),
    ("3", "The answer is 3 x."),
    ("5", r"\boxed{6}"),
    ("5", "no number at all"),
    ("5", ""),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"),
    (r"1 - \frac{1}{\mathrm{e}}", r"\boxed{1 + \frac{1}{\mathrm{e}}}"),
    ("0.0000001", r"\boxed{0.0000002}"),
    ("2", r"\boxed{2 2/3}"),
    ("5", r"\boxed{10^{10^{10^{10}}}}"),
    (r"\frac{63}{400}", r"\boxed{\frac{64}{400}}"),
    ("12:00", r"\boxed{1:00}"),
    ("1" * 50, r"\boxed{" + "1" * 49 + "2}"),
    ("3", r"<think>\boxed{3}</think> The answer is 4."),
]

# What a library that compares floats, truncates, or reads only what it knows gets wrong.
RIGHT += [
    (r"\frac{8}{3}", r"\boxed{2\frac{2}{3}}"),
    (r"\frac{270}7\text{ degrees}", r"\boxed{\frac{270}{7}^\circ}"),
    (r"1, 2, \ldots, 10", r"\boxed{1,2,\dots,10}"),
    ("2 and 3", r"\boxed{3, 2}"),
    ("2,3", r"The answer is $x=3$ or $x=2$."),
    (r"\{1, 2\}", r"\boxed{2,1}"),
    ("y = 2x + 3", r"\boxed{y=3+2x}"),
    ("1.2e-3", r"\boxed{1.2 \times 10^{-3}}"),
    (r"6 \cdot 10^{23}", r"\boxed{6\times10^{23}}"),
    (r"5.4 \text{ cents}", r"\boxed{5.4}"),
    (r"864 \mbox{ inches}^2", r"\boxed{864}"),
    (r"\$32,\!348", r"\boxed{\$32{,}348}"),
    ("-1./3", r"\boxed{-\tfrac13}"),
    (r"2^{100}", r"\boxed{1267650600228229401496703205376}"),
    (r"(3, 4]", r"\boxed{\left(3,\, 4\right]}"),
    ("1,000,000", r"\boxed{10^6}"),
    ("x^5 - x^4 + x^3 - x^2", r"\boxed{-x^4+x^5-x^2+x^3}"),
    ("−7", r"\boxed{-7}"),
]
WRONG += [
    ("10^{-7}", r"\boxed{2 \times 10^{-7}}"),
    ("2^{100}", r"\boxed{2^{100}+1}"),
    ("10^{400}", r"\boxed{10^{400}+1}"),
    (r"\sqrt{10^{-14}}", r"\boxed{\sqrt{2}\cdot 10^{-7}}"),
    (r"\frac{8}{3}", r"\boxed{2}"),
    (r"1, 2, \ldots, 10", r"\boxed{1,2,\dots,9}"),
    (r"1, 2, \ldots, 10", r"\boxed{1, 2}"),
    ("2,3", r"\boxed{2}"),
    ("2", r"\boxed{2, 3}"),
    ("2 and 3", r"\boxed{2, 3, 4}"),
    ("y = 2x + 3", r"\boxed{y = 2x + 4}"),
    ("[0,1)", r"\boxed{(0,1)}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"5 \text{ cm}", r"\boxed{5 \text{ km}}"),
    ("3", r"\boxed{3 million}"),
    ("10", r"\boxed{10\%}"),
    ("5", r"\boxed{5 choose 2}"),
]


def boxed(pairs):
    return [(gold, f"\\boxed{{{answer}}}") for gold, answer in pairs]


# Found by an adversarial reading of the rules.
RIGHT += boxed(
    [
        (r"\pm 5", "5, -5"),
        ("5,-5", r"\pm 5"),
        (r"3\pm\sqrt{2}", r"3+\sqrt2, 3-\sqrt2"),
        ("1234", r"1\,234"),
        ("6", r"\text{6}"),
        ("6", r"\mathbf{6}"),
        (r"\text{east}", "east"),
        (r"\text{Yes}", "yes"),
        (r"0.\overline{3}", r"\frac{1}{3}"),
        (r"[0,\infty)", r"x\ge 0"),
        (r"[1,2]", r"1\le x\le 2"),
        ("x>5", r"(5,\infty)"),
        (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"),
        ("x=5, y=3", "y=3, x=5"),
        ("x=5, y=3", "5, 3"),
        ("6", "2+4=6"),
        ("12_8", "12_8"),
        ("BAC", "BAC"),
        ("5 cm", r"5\text{ centimeters}"),
        ("x=2, x=3", "3, 2"),
        ("f(x)=2x+1", "y=1+2x"),
    ]
)
WRONG += boxed(
    [
        ("x=5, y=3", "x=3, y=5"),
        ("p=3, q=5", "q=3, p=5"),
        ("x=5, y=3", "3, 5"),
        ("x=2", "y=2"),
        (r"(0,1)\cup(2,3)", r"(0,1)\cap(2,3)"),
        (r"(0,1)\cup(2,3)", r"(0,1)\setminus(2,3)"),
        (r"(-\infty,-1)\cup(1,\infty)", r"(-\infty,-1]\cup[1,\infty)"),
        ("2", "2 xy"),
        ("2", "2 abc"),
        ("3", r"3\text{i}"),
        ("4", r"4\text{x}"),
        ("3", r"3\text{ million}"),
        ("3", r"3\text{ dozen}"),
        ("5", r"5\text{ squared}"),
        ("2", r"2\text{ times 5}"),
        ("6", r"6 \text{ or more}"),
        ("10 km", "10 miles"),
        (r"3\text{ feet}", r"3\text{ inches}"),
        (r"3\text{ days}", r"3\text{ weeks}"),
        (r"5\text{ m}^2", r"5\text{ m}^3"),
        (r"5\text{ km/h}", r"5\text{ m/s}"),
        (r"\$5", "5 cents"),
        ("12_8", "12"),
        ("12_8", "12_9"),
        ("5", "5_8"),
        ("BAC", "CAB"),
        (r"\pi", "3.14159265"),
        (r"\sqrt2", "1.4142136"),
        ("6", "6+"),
        ("6", "6?"),
        ("6", "6^*"),
        ("6", r"\le 6"),
        ("6", r"n \mid 6"),
        ("6", "7=6"),
        ("2:1", "2"),
        ("f'(x)", "f(x)"),
        ("(1,2)", r"\{1,2\}"),
        ("1,2", "[1,2]"),
        ("1,2;3", "1;2,3"),
    ]
)
WRONG += [("5", f"Answer: 5 {w}") for w in ("million", "minus two", "squared", "plus pi", "halves")]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_right_answers(gold, response):
    assert verify_math(problem(gold), response).correct is True


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_wrong_answers(gold, response):
    assert verify_math(problem(gold), response).correct is False


def test_a_percent_sign_may_be_left_out_where_it_is_asked_for():
    asked = ({"role": "user", "content": "What percent of the apples are red?"},)
    for gold, response in (("10", r"\boxed{10\%}"), (r"10\%", "10"), (r"10\%", r"\boxed{0.1}")):
        assert verify_math(Problem("p", asked, gold), response).correct is True
    assert verify_math(Problem("p", asked, "0.5"), r"\boxed{5\%}").correct is False


@pytest.mark.parametrize("gold", ["", "\\frac{1}{", "x" * 500, "2, \\frac{1}{"])
def test_unreadable_golds(gold):
    assert unreadable_gold(gold) is not None


@given(st.fractions(max_denominator=500), st.integers(1, 6))
def test_every_rewriting_of_a_rational_number_is_right_and_its_neighbour_wrong(value, shift):
    gold = str(value)
    for name, response in rewritings(problem(gold)).items():
        assert verify_math(problem(gold), response).correct is True, (name, response)
    for name, response in rewritings(problem(str(value + Fraction(1, 10**shift)))).items():
        assert verify_math(problem(gold), response).correct is False, (name, response)


def test_empty_gold_is_not_scored():
    v = verify_math(problem(" "), r"\boxed{x+1}")
    assert v.correct is None and "gold" in v.reason


def test_extraction():
    assert boxes(r"\boxed{\frac{1}{2}} and \boxed{a") == [(0, r"\frac{1}{2}")]
    assert without_thinking("<think>a</think>b") == " b"
    assert without_thinking("cut off</think>b") == "b"
    assert extract_answer("**Final answer: 12**") == "12"
    assert extract_answer("x" * 100_000) is None
    assert rational("1,234.5") == 1234.5 and rational("1/0") is None and rational("x") is None


def grade(jobs, **options):
    """Grade (problem, response) pairs at once; returns verdicts, pool, seconds."""

    async def main():
        pool = VerifierPool(Feedback(**options), {"math", "chain"})
        try:
            await pool.grade(problem("1"), "1")
            start = time.perf_counter()
            verdicts = await asyncio.gather(*(pool.grade(p, r) for p, r in jobs))
            return verdicts, pool.killed, time.perf_counter() - start
        finally:
            await pool.close()

    return asyncio.run(main())


def grade_with(options, jobs):
    """Verdicts on (problem, response) pairs, and how many verifiers were killed."""

    async def main():
        pool = VerifierPool(options, {p.kind for p, _ in jobs})
        try:
            return [await pool.grade(*job) for job in jobs], pool.killed
        finally:
            await pool.close()

    return asyncio.run(main())


DEGENERATE = [
    "9" * 100_000,
    "(" * 20_000 + r"\boxed{" + "(" * 390,
    "\\log" * 5000 + r"\boxed{\log\log x}",
]


def test_degenerate_text_returns_within_the_cap():
    jobs = [(problem("5"), r) for r in DEGENERATE] + [(problem("5"), r"\boxed{5}")]
    verdicts, _, seconds = grade(jobs, timeout_s=5.0)
    assert [v.correct for v in verdicts] == [False] * len(DEGENERATE) + [True]
    assert seconds < 5.0 * len(jobs)


@pytest.mark.parametrize(("policy", "wanted"), [("wrong", False), ("invalid", None)])
def test_hung_verifier_is_killed_and_the_next_job_runs(policy, wanted, monkeypatch):
    async def main():
        pool = VerifierPool(Feedback(timeout_s=5.0, on_failure=policy), {"math"})
        try:
            await pool.grade(problem("1"), "1")
            (worker,) = pool._all
            os.kill(worker.pid, signal.SIGSTOP)
            start = time.perf_counter()
            first = await pool.grade(problem("5"), "5")
            seconds = time.perf_counter() - start
            second = await pool.grade(problem("5"), "5")
            return first, seconds, second, pool.killed
        finally:
            await pool.close()

    first, seconds, second, killed = asyncio.run(main())
    assert first.correct is wanted and "over 5.0 s" in first.reason
    assert seconds < 20 and second.correct is True and killed == 1


def test_killed_verifier_is_replaced():
    async def main():
        pool = VerifierPool(Feedback(), {"math"})
        try:
            await pool.grade(problem("1"), "1")
            (worker,) = pool._all
            os.kill(worker.pid, signal.SIGKILL)
            lost = await pool.grade(problem("5"), "5")
            return lost, await pool.grade(problem("5"), "5"), pool.killed
        finally:
            await pool.close()

    lost, after, killed = asyncio.run(main())
    assert lost.correct is False and "died" in lost.reason
    assert after.correct is True and killed == 1


def test_unknown_kind_is_refused_at_start():
    with pytest.raises(ConfigError, match="no verifier"):
        VerifierPool(Feedback(), {"poetry"})


def sample(text: str, correct: bool) -> Sample:
    completion = Completion((1,), (2,), (-0.1,), text, "stop", (0,))
    return Sample("p", "initial", completion, Verdict(correct))


def test_indicative_critics():
    plain, truth = rule_critic("indicative", {"math"}), rule_critic("indicative_gt", {"math"})
    wrong = asyncio.run(plain(problem("42"), sample("x", False)))
    assert wrong.says_correct is False and "42" not in wrong.text
    told = asyncio.run(truth(problem("42"), sample("x", False)))
    assert "42" in told.text and told.kind == "indicative_gt"
    assert asyncio.run(plain(problem("42"), sample("x", True))).says_correct is True
    assert rule_critic("none", {"math"}) is None
    for kind, wanted in (("step", "chain"), ("execution", "code")):
        with pytest.raises(ConfigError, match=f"critique={kind} is for problems of kind {wanted}"):
            check_critique(kind, {"math", wanted})


CHOICES = [
    ("**Answer: D**", "D"),
    ("so it is \\boxed{\\text{E}}", "E"),
    ("the answer is C because I computed it", "C"),
    ("The correct option is (J).", "J"),
    ("Answer: A\n\nWait, no.\n\nAnswer: B", "B"),
    ("\\boxed{A} then \\boxed{(B) 12 m/s}", "B"),
    ("I think about it.\nG", "G"),
    ("<think>The answer is A</think> Final answer: **F**", "F"),
    ("The answer is I think hard to say", None),
    ("A car moves; B is at rest.", None),
    ("The answer is Apple", None),
    ("\\boxed{12}", None),
    ("", None),
    ("The answer is I.", "I"),
    ("my choice would be $\\mathbf{H}$", "H"),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_choices(text, letter):
    assert extract_choice(text) == letter
    if letter is not None:
        assert verify_choice(problem(letter, "choice"), text).correct is True
    assert verify_choice(problem("A" if letter != "A" else "B", "choice"), text).correct is False


def test_a_gold_that_is_no_letter_is_not_scored():
    assert verify_choice(problem("42", "choice"), "Answer: A").correct is None


def shout(problem: Problem, response: str) -> Verdict:
    """A verifier of a user's."""
    return Verdict(response == problem.answer.upper(), response, "shouted")


def test_own_verifier_by_dotted_path(monkeypatch):
    own = {"loud": "tests.unit.test_feedback.shout"}

    async def main():
        pool = VerifierPool(Feedback(verifiers=own), {"loud"})
        try:
            return [await pool.grade(problem("abc", "loud"), r) for r in ("ABC", "abc")]
        finally:
            await pool.close()

    assert [v.correct for v in asyncio.run(main())] == [True, False]
    with pytest.raises(ConfigError, match="cannot be imported"):
        VerifierPool(Feedback(verifiers={"loud": "tests.no_such.thing"}), {"loud"})


def test_grade_a_file(tmp_path):
    rows = [
        {"id": 1, "kind": "math", "answer": "5", "response": "so 5"},
        {"id": 2, "kind": "choice", "answer": "B", "response": "Answer: A"},
        {"id": 3, "kind": "math", "answer": "", "response": "5"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in rows))
    counts = grade_file(source, target, Feedback(workers=2))
    assert counts == {"right": 1, "wrong": 1, "not judged": 1, "verifiers killed": 0}
    out = [json.loads(x) for x in target.read_text().splitlines()]
    assert [(r["id"], r["correct"]) for r in out] == [(1, True), (2, False), (3, None)]
    source.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="line 1 lacks kind, answer, response"):
        grade_file(source, target, Feedback())
    assert len(target.read_text().splitlines()) == 3


def fail(problem: Problem, response: str) -> Verdict:
    """A verifier of a user's with a bug."""
    return bytearray(1 << 40) if response == "memory" else 1 / 0


@pytest.mark.parametrize(("policy", "wanted"), [("wrong", False), ("invalid", None)])
def test_a_failing_verifier_follows_the_policy(policy, wanted):
    own = {"buggy": "tests.unit.test_feedback.fail"}

    async def main():
        pool = VerifierPool(Feedback(verifiers=own, on_failure=policy), {"buggy"})
        try:
            return [await pool.grade(problem("1", "buggy"), r) for r in ("x", "memory")]
        finally:
            await pool.close()

    zero, memory = asyncio.run(main())
    assert zero.correct is wanted and "ZeroDivisionError" in zero.reason
    assert memory.correct is wanted and "MemoryError" in memory.reason
