"""Labels, noise, copied answers and guards."""

from __future__ import annotations

import asyncio
import math

import pytest

from megatron_cgrpo.algorithm.selection import is_answer_copy, select_refinements
from megatron_cgrpo.config import ConfigError, parse_config
from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.config.feedback import Critic as CriticOptions
from megatron_cgrpo.config.feedback import Noise
from megatron_cgrpo.config.training import Guards
from megatron_cgrpo.feedback.chat_models import Reply
from megatron_cgrpo.feedback.critics import ExecutionCritic, WorldCritic, rule_critic
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.labels import conclusion
from megatron_cgrpo.feedback.model_critic import ModelCritic
from megatron_cgrpo.feedback.noise import NoisyCritic
from megatron_cgrpo.rollout.critics import api_key
from megatron_cgrpo.rollout.writers import check_writer
from megatron_cgrpo.training.guards import METRICS, Watch
from megatron_cgrpo.training.logger import RunLogger
from megatron_cgrpo.types import Completion, Problem, Sample, Verdict
from megatron_cgrpo.worlds import chain
from tests.unit.test_config import BASE


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Step 1 is fine.\nConclusion: correct [END]", True),
        ("Step 1 is off.\n\nConclusion: wrong [END]\n", False),
        ("**Conclusion: wrong [END]**", False),
        ("conclusion: Correct. [end]", True),
        ("Conclusion: wrong [END]\nConclusion: wrong [END]", False),
        ("Conclusion: wrong [END]\nThat is my view.", False),
        # No label: missing, contradictory, not a line of its own, another word, no end mark.
        ("It looks right to me.", None),
        ("Conclusion: correct [END]\nNo.\nConclusion: wrong [END]", None),
        ("I would write Conclusion: correct [END] if it were.", None),
        ("Conclusion: right [END]", None),
        ("Conclusion: correct", None),
        ("Conclusion: correct or wrong [END]", None),
        ("", None),
    ],
)
def test_labels_are_strict(text, label):
    assert conclusion(text) is label
    assert conclusion(text, truncated=True) is None


def sample(text, correct=False, parent=None, ids=(2,)):
    completion = Completion((1,), ids, (-0.1,) * len(ids), text, "stop", (0,))
    role = "initial" if parent is None else "refinement"
    return Sample("p", role, completion, Verdict(correct, None, "AssertionError"), None, parent)


MATH = Problem("p", ({"role": "user", "content": "q"},), "42")


def noisy(kind, share, critic, problem, samples):
    wrapped = NoisyCritic(critic, Noise(kind=kind, share=share), seed=0)

    async def main():
        return [await wrapped(problem, s, samples) for s in samples]

    return asyncio.run(main()), wrapped.metrics()["critic/disturbed"]


def test_flipped_critiques():
    samples = [sample(f"a{i}", ids=(i,)) for i in range(200)]
    critiques, disturbed = noisy("flip", 0.2, rule_critic("indicative", {"math"}), MATH, samples)
    flipped = [c for c in critiques if c.says_correct]
    assert len(flipped) == disturbed and 20 <= disturbed <= 60
    assert {c.text for c in flipped} == {"The attempt is correct."}
    again, _ = noisy("flip", 0.2, rule_critic("indicative", {"math"}), MATH, samples)
    assert again == critiques
    assert noisy("flip", 1.0, rule_critic("indicative", {"math"}), MATH, samples)[1] == 200


def test_swapped_critiques_are_those_of_other_responses():
    problem = chain.ChainWorld.make(0, secrets=3, steps=3, secret_steps=2).problems(0, 1)[0]
    start, ops = problem.meta["start"], problem.meta["ops"]
    right = [int(c) for c in problem.answer]
    attempts = []
    for i in range(3):
        values = list(right)
        values[i] = (values[i] + 1) % 10
        attempts.append(sample(chain.solution(start, ops, values), ids=(i,)))
    own = [chain.critique_chain(problem, s.completion.text, "step") for s in attempts]
    assert len(set(own)) == 3
    critiques, _ = noisy("swap", 1.0, WorldCritic("step", "chain", chain.CHAIN), problem, attempts)
    assert all(c.text in own and c.text != mine for c, mine in zip(critiques, own))
    flipped, _ = noisy("flip", 1.0, WorldCritic("step", "chain", chain.CHAIN), problem, attempts)
    assert {c.text for c in flipped} == {"right"}


class Says:
    """A model that always writes the same."""

    def __init__(self, text):
        self.text = text

    def identity(self):
        return ["says"]

    def fits(self, messages):
        return True

    async def write(self, messages, seed):
        return Reply(self.text, False, 1, 1)

    async def close(self):
        pass


def test_a_models_conclusion_is_flipped_in_its_text_too():
    model = Says("Step 2 is off.\nConclusion: wrong [END]")
    critic = ModelCritic("cot", model, CriticOptions(), "{question}{response}", None, print)
    (critique,), disturbed = noisy("flip", 1.0, critic, MATH, [sample("x")])
    assert disturbed == 1 and critique.says_correct is True
    assert critique.text == "Step 2 is off.\nConclusion: correct"
    # The fallback is a rule's: flipped once, by its verdict.
    silent = ModelCritic(
        "cot", Says(" "), CriticOptions(fallback="indicative"), "{question}{response}", None, print
    )
    (critique,), _ = noisy("flip", 1.0, silent, MATH, [sample("x")])
    assert critique.says_correct is True and critique.text == "The attempt is correct."


def test_what_servers_say_is_no_markup(tmp_path):
    config = parse_config({**BASE, "logging": {"wandb": {"mode": "disabled"}}})
    logger = RunLogger(config, tmp_path)
    logger.warn("HTTP 404: [/v1/chat/completions] not [bold]found[/x]")
    logger.close()


def test_a_damaged_row_of_the_cache_is_asked_for_again(tmp_path):
    cache = CritiqueCache(tmp_path / "c", print)
    with cache._file:
        cache._file.execute("INSERT INTO replies VALUES ('k', '[1, 2')")
        cache._file.execute("INSERT INTO replies VALUES ('l', '{\"x\": 1}')")
    assert cache.get("k") is None and cache.get("l") is None
    cache.put("k", Reply("t", False, 1, 2))
    assert cache.get("k") == Reply("t", False, 1, 2)


def test_execution_critique_is_what_python_said():
    code = Problem("p", MATH.messages, "", "code")
    told = asyncio.run(ExecutionCritic()(code, sample("x")))
    assert "AssertionError" in told.text and told.says_correct is False


def test_copied_answers():
    attempt = sample("one two three four five six seven eight nine ten \\boxed{7}")
    copy = sample("The answer: \\boxed{42}", True, 0)
    derived = sample("one two three four five so it is \\boxed{42}", True, 0)
    assert is_answer_copy(copy, attempt, 0.3) and not is_answer_copy(derived, attempt, 0.3)
    assert not is_answer_copy(sample("\\boxed{1}", False, 0), attempt, 0.3)
    options = Algorithm(responses=4, refinements=2, drop_answer_copies=True, answer_copy_share=0.3)
    assert select_refinements([copy, derived], options, "s", [attempt]) == [derived]
    plain = Algorithm(responses=4, refinements=2)
    assert len(select_refinements([copy, derived], plain, "s", [attempt])) == 2


def test_guards_warn_and_then_stop():
    watch = Watch(Guards(entropy=1.0, refinement_share=0.5, patience=2))
    calm = dict.fromkeys(METRICS.values(), 0.1)
    assert watch.check(calm) == ([], None)
    hot = {**calm, "policy/entropy": 1.5, "policy/context_shift_kl": 99.0}
    (warning,), stop = watch.check(hot)
    assert "policy/entropy = 1.5" in warning and "(1 of 2 steps)" in warning and stop is None
    watch.check(calm)
    assert watch.check(hot)[1] is None
    assert "training.guards.entropy" in watch.check({**hot, "policy/entropy": math.nan})[1]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"critique": "cot"}}, "critique=cot needs a critic"),
        (
            {"algorithm": {"critique": "indicative", "reward": "critic"}},
            "reward=critic needs critiques with a label",
        ),
        ({"feedback": {"critic": {"url": "http://x/v1"}}}, "needs feedback.critic.model"),
        (
            {"feedback": {"critic": {"url": "u", "model": "m", "engine": {"path": "p"}}}},
            "url or engine, not both",
        ),
        ({"feedback": {"critic": {"max_cost_per_step": 1.0}}}, "needs feedback.critic.price_in"),
        (
            {
                "rollout": {"placement": "split", "gpus": [1]},
                "feedback": {"refiner": {"path": "p", "gpus": [1]}},
            },
            r"gpus \[1\] belong to other engines",
        ),
        (
            {
                "training": {
                    "guards": {"refinement_share": 0.5},
                    "measure_refinement_gradient": False,
                }
            },
            "refinement_share needs training.measure_refinement_gradient",
        ),
        ({"feedback": {"critic": {"url": "http://u:p@x/v1", "model": "m"}}}, "must hold no key"),
        (
            {
                "rollout": {"placement": "split", "gpus": [1]},
                "feedback": {"refiner": {"path": "p", "servers": 2}},
            },
            "feedback.refiner.gpus needs 2 GPU indices",
        ),
    ],
)
def test_settings_that_cannot_work(sections, said):
    with pytest.raises(ConfigError, match=said):
        parse_config({**BASE, **sections})


def test_keys_come_from_the_environment(monkeypatch):
    critic = {"url": "https://api.example.com/v1", "model": "m", "api_key_env": "SOME_KEY"}
    config = parse_config(
        {**BASE, "algorithm": {"critique": "cot"}, "feedback": {"critic": critic}}
    )
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable SOME_KEY"):
        check_writer(config, {"math"}, 4096)
    monkeypatch.setenv("SOME_KEY", "secret-value")
    check_writer(config, {"math"}, 4096)
    assert api_key(config) == "secret-value"
    assert "secret-value" not in config.model_dump_json()
    with pytest.raises(ConfigError, match="critique=step is for problems of kind chain"):
        check_writer(parse_config({**BASE, "algorithm": {"critique": "step"}}), {"math"}, 4096)
