"""Model critics against a real vLLM server, through a proxy that behaves like the internet."""

from __future__ import annotations

import asyncio
import time

import pytest

from megatron_cgrpo.config.feedback import Critic as Options
from megatron_cgrpo.data.prompts import PromptBuilder, tokenizer_in
from megatron_cgrpo.feedback import weather
from megatron_cgrpo.feedback.chat_models import EndpointChat, EngineChat
from megatron_cgrpo.feedback.critique_cache import CritiqueCache
from megatron_cgrpo.feedback.model_critic import ModelCritic, critique_template
from megatron_cgrpo.feedback.pool import VerifierPool
from megatron_cgrpo.rollout.events import AGREEMENT, LABELS_FROM_RULE, events_of
from megatron_cgrpo.rollout.pipeline import RolloutPipeline
from megatron_cgrpo.rollout.writers.critiqued import Critiqued
from megatron_cgrpo.types import Completion, Problem, Sample, Verdict
from megatron_cgrpo.worlds import chain
from tests.engine.engine_config import tiny_config
from tests.engine.proxy import FAULTS, Proxy, running

PROBLEM = Problem("1+2", ({"role": "user", "content": "1+2"},), "3")
TEMPLATE = "{question}try{response}"


@pytest.fixture
def proxy(fleet, monkeypatch):
    monkeypatch.setattr(weather, "FIRST_PAUSE_S", 0.02)
    with running(Proxy(fleet.servers[0].url)) as proxy:
        yield proxy


def sample(text: str = "1+2=4", correct: bool = False) -> Sample:
    completion = Completion((1,), (2,), (-0.1,), text, "stop", (0,))
    return Sample("1+2", "initial", completion, Verdict(correct))


class Told(list):
    """What users were told."""

    def __call__(self, message: str) -> None:
        self.append(message)


def ask(proxy, fleet, texts, cache=None, told=None, before=None, **options):
    """Critiques of these responses, one after the other, and the critic's counts."""
    key = fleet.servers[0].token
    told = Told() if told is None else told

    async def main():
        o = Options(**{"url": proxy.url, "model": "policy", "max_tokens": 8, **options})
        kept = CritiqueCache(cache, told) if cache else None
        critic = ModelCritic("cot", EndpointChat(o, key), o, TEMPLATE, kept, told)
        try:
            out = []
            for text in texts:
                if before is not None:
                    await before(text)
                out.append(await critic(PROBLEM, sample(text)))
            return out, critic.usage
        finally:
            await critic.close()

    return asyncio.run(main())


def test_a_good_answer(proxy, fleet):
    (critique,), usage = ask(proxy, fleet, ["1+2=4"])
    assert critique.text and critique.kind == "cot" and critique.critic == "policy"
    assert critique.tokens_out == usage.tokens_out > 0 and critique.tokens_in > 0
    assert critique.seconds > 0 and usage.requests == 1 and usage.retries == 0
    # A policy of 1M parameters concludes nothing.
    assert critique.says_correct is None and usage.no_label == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_costs_a_retry(proxy, fleet, fault):
    proxy.faults = [fault]
    timeout = {"timeout_s": 1.0} if fault == "drip" else {}
    (critique,), usage = ask(proxy, fleet, ["1+2=4"], **timeout)
    assert critique is not None and critique.text
    assert (usage.requests, usage.retries, usage.failures) == (2, 1, 0)


@pytest.mark.parametrize(("fallback", "says"), [("skip", None), ("indicative_gt", "answer is 3")])
def test_an_outage_opens_the_breaker_and_heals(proxy, fleet, fallback, says):
    proxy.always, told = "drop", Told()

    async def heal(text):
        if text == "healed":
            proxy.always = None
            await asyncio.sleep(0.6)

    texts = ["a", "b", "c", "d", "e", "healed", "after"]
    options = {"fallback": fallback, "retries": 1, "breaker_failures": 2, "breaker_pause_s": 0.5}
    critiques, usage = ask(proxy, fleet, texts, told=told, before=heal, **options)
    for c in critiques[:5]:
        assert (c is None) if says is None else (says in c.text and c.says_correct is False)
    assert [c.kind for c in critiques[5:]] == ["cot", "cot"]
    # Two requests that failed, then silence until the pause is over.
    assert usage.failures == 1 and usage.refused_by_breaker == 4
    assert proxy.seen == usage.requests == 4
    assert len(told) == 1 and told[0].startswith("no critique: ")


def test_what_was_paid_for_is_not_paid_again(proxy, fleet, tmp_path):
    first, usage = ask(proxy, fleet, ["x", "y"], cache=tmp_path / "cache")
    again, cached = ask(proxy, fleet, ["x", "y", "z"], cache=tmp_path / "cache")
    assert usage.requests == 2 and (cached.cached, cached.requests) == (2, 1)
    assert [c.text for c in again[:2]] == [c.text for c in first]
    # Another prompt length is another question.
    _, other = ask(proxy, fleet, ["x"], cache=tmp_path / "cache", max_tokens=4)
    assert other.cached == 0
    # A file that is no database is done without.
    (tmp_path / "broken").write_text("x" * 5000)
    told = Told()
    (critique,), _ = ask(proxy, fleet, ["x"], cache=tmp_path / "broken", told=told)
    assert critique is not None and "no longer kept" in told[0]


@pytest.mark.parametrize(
    "budget",
    [
        {"max_requests_per_step": 2},
        {"max_tokens_per_step": 40},
        {"max_cost_per_step": 40.0, "price_in": 1e6, "price_out": 1e6},
    ],
)
def test_budgets_hold_with_many_at_once(proxy, fleet, budget):
    told = Told()

    async def main():
        o = Options(url=proxy.url, model="policy", max_tokens=8, concurrency=4, **budget)
        writer = EndpointChat(o, fleet.servers[0].token)
        critic = ModelCritic("cot", writer, o, TEMPLATE, None, told)
        try:
            texts = [f"t{i}" for i in range(30)]
            got = await asyncio.gather(*(critic(PROBLEM, sample(t)) for t in texts))
            return got, critic.usage, critic.metrics()["critic/cost"]
        finally:
            await critic.close()

    critiques, usage, cost = asyncio.run(main())
    got = sum(c is not None for c in critiques)
    assert 1 <= got <= 4 and usage.over_budget == 30 - got == 30 - usage.requests
    assert usage.tokens_in + usage.tokens_out <= 60 and cost <= 60
    assert told == ["the critic's budget of this step is spent"]


def test_the_breaker_holds_with_many_at_once(proxy, fleet):
    """Who waits for a turn while others fail does not ask any more."""
    proxy.always = "401"

    async def main():
        o = Options(url=proxy.url, model="policy", concurrency=4, breaker_failures=3)
        writer = EndpointChat(o, fleet.servers[0].token)
        critic = ModelCritic("cot", writer, o, TEMPLATE, None, Told())
        try:
            await asyncio.gather(*(critic(PROBLEM, sample(f"t{i}")) for i in range(40)))
            return critic.usage
        finally:
            await critic.close()

    usage = asyncio.run(main())
    assert usage.requests <= 3 + 4 and usage.refused_by_breaker == 40 - usage.requests


def test_the_same_question_at_once_is_paid_once(proxy, fleet):
    async def main():
        o = Options(url=proxy.url, model="policy", max_tokens=8)
        critic = ModelCritic(
            "cot", EndpointChat(o, fleet.servers[0].token), o, TEMPLATE, None, Told()
        )
        try:
            got = await asyncio.gather(*(critic(PROBLEM, sample("same")) for _ in range(5)))
            return got, critic.usage
        finally:
            await critic.close()

    critiques, usage = asyncio.run(main())
    assert usage.requests == 1 and usage.cached == 4
    assert len({c.text for c in critiques}) == 1


def test_a_refused_key_is_never_repeated(proxy, fleet, tmp_path):
    proxy.always, told = "401", Told()
    (critique,), usage = ask(proxy, fleet, ["x"], told=told, cache=tmp_path / "cache")
    assert critique is None and usage.requests == 1  # asking again would not help
    assert "401" in told[0] and fleet.servers[0].token not in told[0]
    assert fleet.servers[0].token.encode() not in (tmp_path / "cache").read_bytes()


def test_many_at_once_are_limited(proxy, fleet):
    async def main():
        o = Options(url=proxy.url, model="policy", max_tokens=4, concurrency=2, timeout_s=30)
        critic = ModelCritic(
            "cot", EndpointChat(o, fleet.servers[0].token), o, TEMPLATE, None, Told()
        )
        proxy.faults = ["429", "drop", "500"] * 3
        try:
            texts = [f"try{i}" for i in range(12)]
            return await asyncio.gather(*(critic(PROBLEM, sample(t)) for t in texts))
        finally:
            await critic.close()

    assert all(c is not None for c in asyncio.run(main()))


def test_own_engines_and_self_through_the_pipeline(fleet, policy):
    """`self` with the critic's labels for rewards: garbage has none, and the rule steps in."""
    config = tiny_config(
        policy,
        algorithm={
            "critique": "self",
            "reward": "critic",
            "no_label": "rule",
            "responses": 2,
            "refinements": 1,
        },
        rollout={"max_prompt_tokens": 64, "max_response_tokens": 32},
        feedback={"critic": {"max_tokens": 8}},
    )
    world = chain.ChainWorld.make(0, secrets=3, steps=3, secret_steps=2)
    prompts = PromptBuilder(tokenizer_in(policy), config.data, chain.REFINE_PROMPT)
    problems = [(p, prompts.problem(p)) for p in world.problems(0, 4)]

    async def main():
        writer = EngineChat(fleet, prompts.render, config.feedback.critic, "policy", lambda: 0)
        critic = ModelCritic("self", writer, config.feedback.critic, TEMPLATE, None, Told())
        pool = VerifierPool(config.feedback, {"chain"})
        try:
            writer = Critiqued(config, critic, fleet, prompts)
            pipeline = RolloutPipeline(config, fleet, pool, writer)
            return await pipeline.step(1, problems), writer.metrics()
        finally:
            await pool.close()
            await fleet.close()

    groups, metrics = asyncio.run(main())
    happened = events_of(groups)
    assert all(len(g.initial) == 2 and g.initial[0].critique is not None for g in groups)
    critiques = sum(happened[name] for name in AGREEMENT.values())
    refined = sum(g.attempted for g in groups)
    # Each response once; each refinement once for its label. Nothing is asked for twice.
    assert critiques == 8 + refined == metrics["critic/requests"] and refined > 0
    assert metrics["critic/no_label"] == happened[LABELS_FROM_RULE] == critiques


def test_too_long_a_response_is_no_outage(fleet, policy):
    async def main():
        o = Options(max_tokens=8, breaker_failures=1)
        prompts = PromptBuilder(tokenizer_in(policy), tiny_config(policy).data, "")
        writer = EngineChat(fleet, prompts.render, o, "policy")
        critic = ModelCritic("self", writer, o, TEMPLATE, None, Told())
        try:
            critiques = [await critic(PROBLEM, sample(t)) for t in ("1" * 400, "1+2=4")]
            return critiques, critic.usage
        finally:
            await fleet.close()

    (long, short), usage = asyncio.run(main())
    # Cut in its middle, as for a refinement.
    assert long is not None and short is not None
    assert 200 < long.tokens_in <= chain.CONTEXT - 8 and usage.failures == usage.not_fitting == 0


def test_our_prompt_asks_for_a_label():
    text = critique_template(None)
    assert "{question}" in text and "Conclusion: wrong [END]" in text


def test_the_clock_of_a_retry():
    pauses = [weather.pause_before_retry(i) for i in range(12)]
    assert all(0.4 <= p <= weather.LONGEST_PAUSE_S for p in pauses) and pauses[6] > pauses[0]
    assert weather.pause_before_retry(0, 30.0) == 30.0
    assert weather.pause_before_retry(0, 1e6) == weather.LONGEST_PAUSE_S
    breaker = weather.Breaker(1, 0.05)
    breaker.failed()
    assert not breaker.allows()
    time.sleep(0.06)
    assert breaker.allows() and not breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
