"""Kinds of answers that graders judge wrong: each with members beyond the one that was seen."""

from __future__ import annotations

import time

import pytest

from megatron_cgrpo.feedback.choice_verifier import extract_choice
from megatron_cgrpo.feedback.math_verifier import extract_answer, unreadable_gold, verify_math
from megatron_cgrpo.types import Problem

SQUARE = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"
COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
ELLIPSE = r"\frac{x^2}{4}+\frac{y^2}{9}=1"
# kind → (gold, right answers, wrong answers)
KINDS = {
    "equations of the same curve": [
        (
            "3x-6y+9=0",
            [r"y = \frac{1}{2}x + \frac{3}{2}", "x=2y-3", "x-2y+3=0"],
            ["3x-6y-9=0", "x-2y=3"],
        ),
        ("x^2+y^2-4x=0", ["(x-2)^2+y^2=4"], ["(x-2)^2+y^2=2"]),
        ("y=2x+1", ["2x-y+1=0", "y=1+2x"], ["x-y+1=0", "y=2x+4"]),
        ("x+y=5", ["-2x-2y=-10"], ["x-y=5"]),
        (ELLIPSE, ["9x^2+4y^2=36"], ["4x^2+9y^2=36"]),
        ("f(x)=2x+1", ["f(x)=1+2x"], ["f(x)=2x-1"]),
        ("x=2", ["2x=4"], ["y=2"]),
        ("xy=1", ["y=1/x", r"y=\frac{1}{x}"], ["y=2/x"]),
        ("PV=nRT", ["P=nRT/V"], ["P=nRV/T"]),
    ],
    "sets of reals": [
        (
            r"(-\infty,0)\cup(4,\infty)",
            ["x<0 or x>4", r"x<0 \text{ or } x>4", r"(4,\infty)\cup(-\infty,0)"],
            [r"x\le 0 or x>4", "0<x<4"],
        ),
        (
            r"\mathbb{R}\setminus\{5\}",
            [r"(-\infty,5)\cup(5,\infty)", r"x \neq 5", r"x \ne 5"],
            [r"x \neq 4", r"\mathbb{R}"],
        ),
        (
            "[1,3)",
            [
                r"1 \le x < 3",
                r"x \in [1,3)",
                r"x\ge 1 and x<3",
                r"\{x \mid 1 \le x < 3\}",
                r"[1,2]\cup(1,3)",
            ],
            ["1<x<3", "[1,3]", "[1,4)"],
        ),
        (r"(\sqrt{2},\infty)", [r"x>\sqrt 2"], [r"x>\sqrt 3", r"x\ge\sqrt 2"]),
        ("(1,2)", ["(1,2)"], ["(2,1)"]),
        (r"x \neq 0", [r"x\ne 0"], [r"y \neq 0"]),
        (r"[1,\infty)", [r"x\ge 1"], [r"[1,\infty]", r"x>1"]),
    ],
    "complex numbers": [
        ("3 - 2i", ["3.0 - 2.0i", "3 - 2j", "-2i + 3"], ["3 + 2i", "3", "2 - 3i"]),
        ("i", ["1.0i"], ["-i"]),
        (r"\frac{i}{2}", ["0.5i"], ["2i"]),
        (r"\frac{1}{2}+\frac{3}{2}i", ["0.5+1.5i"], ["0.5-1.5i"]),
        ("3", ["3.0"], ["3j", "3i"]),
    ],
    "ratios": [
        ("3:4", [r"\frac{3}{4}", "3 to 4", "6:8"], ["4:3", "3"]),
        ("3/4", ["3:4"], ["4:3"]),
        ("1:2:3", ["2:4:6"], ["1:3:2"]),
        ("1:2", ["1/2"], ["2/1"]),
        ("3:45", ["3:45"], [r"\frac{3}{45}", r"\frac{1}{15}", "1:15"]),
        ("12:00", ["12:00"], ["1:00"]),
    ],
    "percent": [
        (r"35\%", ["35", "0.35", r"35\%"], ["0.035", "3500"]),
        ("35", ["35"], ["0.35"]),
        ("0.35", ["0.35"], ["35"]),
    ],
    "angles": [
        (r"\frac{\pi}{3}", [r"60^\circ", r"\pi/3"], ["60", r"30^\circ"]),
        (r"60^\circ", [r"\frac{\pi}{3}", "60"], [r"\frac{\pi}{6}"]),
        (r"\frac{2\pi}{3}", ["120 degrees", r"120^{\circ}"], ["120"]),
        (r"\frac{2}{3}\pi", [r"120^{\circ}"], [r"12^{\circ}"]),
        (r"\pi", [r"180^\circ"], ["180"]),
        (r"-\frac{\pi}{4}", [r"-45^\circ"], [r"45^\circ"]),
        (r"\frac{-\pi}{2}", [r"-90^\circ"], [r"90^\circ"]),
    ],
    "constants in exponential form": [
        (
            r"e^{i\pi/3}",
            [r"\frac{1}{2}+\frac{\sqrt{3}}{2}i", r"\frac{1+i\sqrt{3}}{2}"],
            [r"\frac{1}{2}-\frac{\sqrt{3}}{2}i"],
        ),
        (r"e^{-i\pi}", ["-1"], ["1"]),
        ("-1", [r"e^{i\pi}"], [r"e^{2i\pi}"]),
        (r"2e^{i\pi/2}", ["2i"], ["-2i"]),
    ],
    "matrices and vectors": [
        (
            SQUARE,
            [
                r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
                r"\left[\begin{matrix}1&2\\3&4\end{matrix}\right]",
                r"\begin{pmatrix}1.0&2\\3&\frac{8}{2}\end{pmatrix}",
            ],
            [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"],
        ),
        (
            COLUMN,
            ["(1,2)", r"\langle 1, 2\rangle", r"\begin{bmatrix}1\\2\end{bmatrix}"],
            ["(2,1)", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "(1,2,3)"],
        ),
        (r"2\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix}2\\4\end{pmatrix}"], [COLUMN]),
        ("(1,2,3)", [r"\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix}"], [SQUARE]),
    ],
    "named variables and tuples": [
        ("a=2, b=7", ["(2,7)", "b=7, a=2"], ["(7,2)", "a=7, b=2"]),
        ("(2,7)", ["a=2, b=7"], ["a=7, b=2"]),
    ],
    "the empty set": [
        (r"\emptyset", [r"\varnothing", r"\{\}", "∅"], [r"\{0\}", "0"]),
        (r"\{ \}", [r"\emptyset"], ["1"]),
    ],
}
CASES = [
    (gold, answer, right)
    for cases in KINDS.values()
    for gold, *answers in cases
    for right, given in zip((True, False), answers)
    for answer in given
]


def asked(gold: str, question: str = "q") -> Problem:
    return Problem("p", ({"role": "user", "content": question},), gold)


@pytest.mark.parametrize(("gold", "answer", "right"), CASES)
def test_math(gold, answer, right):
    verdict = verify_math(asked(gold), f"\\boxed{{{answer}}}")
    assert verdict.correct is right, verdict


@pytest.mark.parametrize("gold", sorted({gold for gold, _, _ in CASES}))
def test_golds_of_these_kinds_are_readable_and_equal_themselves(gold):
    assert unreadable_gold(gold) is None
    assert verify_math(asked(gold), f"\\boxed{{{gold}}}").correct is True


@pytest.mark.parametrize(
    "response",
    [
        r"So the answer is \boxed{12",
        r"First \boxed{12}, or rather \boxed{12",
        r"<think>so \boxed{12}",
        r"<think>a</think> hm <think>so \boxed{12}",
        r"\boxed{\frac{12}{1}",
    ],
)
def test_an_answer_that_was_cut_off_is_none(response):
    assert extract_answer(response) is None
    assert verify_math(asked("12"), response).correct is False
    assert extract_choice(response.replace("12", "B")) is None


QUESTION = "Which?\n\nA) Paris\nB) Rome and Milan\nC) Bonn\nD) Rome"
CHOICES = [
    ("Antwort: B", "B"),
    ("Die Antwort ist B.", "B"),
    ("Réponse : (B)", "B"),
    ("Respuesta: B", "B"),
    ("Risposta: B", "B"),
    ("Resposta: **B**", "B"),
    ("Ответ: B", "B"),
    ("답: B", "B"),
    ("정답은 B", "B"),
    ("答案：B", "B"),
    ("答案是 B", "B"),
    ("答えはBです", "B"),
    ("उत्तर: B", "B"),
    ("উত্তর: B", "B"),
    ("الإجابة: B", "B"),
    ("answer is b", "B"),
    ("The answer is (c).", "C"),
    ("answer: d", "D"),
    ("The answer is a good question", None),
    ("The answer is A good way to see it", None),
    ("The answer is I think unclear", None),
    ("the answer is b or c", None),
    ("The answer is A or B", None),
    (r"\boxed{A or B}", None),
    ("Answer: A and C", None),
    ("Answer: A, C", None),
    (r"\boxed{A and B}", None),
    (r"\boxed{D = 5}", None),
    ("La respuesta correcta es B", "B"),
    ("La réponse est la C", "C"),
    ("the answer is either", None),
    ("The answer is C, because the others fail", "C"),
    # An option as the question prints it.
    ("I weigh them.\nD) Rome", "D"),
    ("**D) Rome**", "D"),
    ("(D) Rome.", "D"),
    ("B) Rome and Milan", "B"),
    ("The answer is B.\nA) Rome", None),
    ("The answer is B.\nD) Rome", "D"),
    ("The answer is B.\nC) whatever", "B"),
]


@pytest.mark.parametrize(("response", "letter"), CHOICES)
def test_choices(response, letter):
    assert extract_choice(response, QUESTION) == letter


DEGENERATE = [
    (r"(1+x)^{3000}(2+y)^{9000}", r"(1+x)^{3000}(2+y)^{9001}"),
    (r"\sum_{i=1}^{10^9} i^i", r"\sum_{i=1}^{10^8} i^i"),
    (r"\prod_{i=1}^{10^7} (i+x)", "5"),
    ("5", r"((((1+x)^{99}+y)^{99}+z)^{99})"),
    ("5", "(10^9)!"),
    ("5", "9^{9^{9^9}}"),
    ("5", "(" * 390),
    ("x", "+".join(f"x^{{{i}}}" for i in range(45))),
]


@pytest.mark.parametrize(("gold", "answer"), DEGENERATE)
def test_work_is_bounded_before_it_is_done(gold, answer):
    start = time.perf_counter()
    assert verify_math(asked(gold), f"\\boxed{{{answer}}}").correct is not True
    # Far under the pool's limit: the first verdict loads the library.
    assert time.perf_counter() - start < 8
