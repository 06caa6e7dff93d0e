"""Options of verifiers, critics and the refiner."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_cgrpo.config.base import Natural, Positive, Section, Share


class Engine(Section):
    """vLLM servers of a model that is not the policy and is not trained."""

    path: str
    """Hugging Face directory of the model."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of its weights."""
    servers: Positive = 1
    """vLLM servers that share the requests."""
    tensor: Positive = 1
    """Tensor-parallel size of one server."""
    gpus: tuple[Natural, ...] = ()
    """GPU indices of this node, `tensor` for each server (none with `rollout.placement: cpu`)."""
    context_length: Positive | None = None
    """Longest sequence in tokens; default: that of the model."""
    gpu_memory_utilization: Share = 0.85
    """Share of GPU memory for a server."""
    kv_cache_mib: Positive = 64
    """KV cache of a server on the CPU."""
    extra_args: tuple[str, ...] = ()
    """More arguments for the vLLM server."""


class Critic(Section):
    """The model that writes the critiques of `algorithm.critique: cot`."""

    url: str | None = None
    """OpenAI-compatible endpoint, up to and with `/v1`."""
    model: str | None = None
    """The model's name at that endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; it is never logged or saved. Not needed on this host."""
    engine: Engine | None = None
    """Instead of `url`: vLLM servers of our own for a model directory."""
    prompt: str | None = None
    """File with {question} and {response}, and {answer} where the critic may see the gold answer;
    default: our own prompt, without it."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Sampling temperature of critiques."""
    max_tokens: Positive = 2048
    """Longer critiques are cut, and then carry no label."""
    concurrency: Positive = 32
    """Requests to an endpoint at once."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A request to an endpoint takes no longer, however slowly it answers."""
    retries: Natural = 4
    """How often a request is sent again after a time-out, 429, 5xx or a broken answer, with
    growing, jittered pauses."""
    max_requests_per_step: Positive | None = None
    """Budget of a step: requests sent, retries included."""
    max_tokens_per_step: Positive | None = None
    """Budget of a step: prompt and critique tokens; requests in flight count with the most that
    they can take."""
    max_cost_per_step: Annotated[float, Field(gt=0)] | None = None
    """Budget of a step in the currency of the prices."""
    price_in: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million prompt tokens."""
    price_out: Annotated[float, Field(ge=0)] = 0.0
    """Price of a million critique tokens."""
    breaker_failures: Positive = 10
    """After so many failed requests in a row (429 counts when it was the last try), none is sent
    for `breaker_pause_s`."""
    breaker_pause_s: Annotated[float, Field(gt=0)] = 60.0
    """Then one request tries whether the critic is back."""
    fallback: Literal["skip", "indicative", "indicative_gt"] = "skip"
    """When no critique can be had (outage, budget): the response is not refined, or refined with
    this critique."""
    cache: bool = True
    """Keep critiques in the run directory, so that a repeated step does not pay twice."""

    @model_validator(mode="after")
    def _one_source(self) -> Critic:
        if self.url is not None and self.engine is not None:
            raise ValueError("feedback.critic takes url or engine, not both")
        if self.url is not None and self.model is None:
            raise ValueError("feedback.critic.url needs feedback.critic.model, its name there")
        if self.url is not None and ("@" in self.url or "?" in self.url):
            raise ValueError(
                "feedback.critic.url must hold no key or password: it is saved with the run; set "
                "feedback.critic.api_key_env"
            )
        budget = self.max_cost_per_step
        if budget is not None and not (self.price_in or self.price_out):
            raise ValueError(
                "feedback.critic.max_cost_per_step needs feedback.critic.price_in and price_out"
            )
        return self


class Noise(Section):
    """Disturbed critiques, for studies of robustness."""

    share: Share = 0.0
    """Share of critiques that are disturbed."""
    kind: Literal["flip", "swap"] = "flip"
    """flip: right is called wrong and wrong right; swap: the critique of another response of the
    group."""


class Feedback(Section):
    workers: Positive = 1
    """Verifier processes."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """A verdict that takes longer: the process is killed and the verdict is `on_failure`."""
    memory_mib: Positive = 2048
    """Address space that a verifier may add to what it starts with."""
    code_timeout_s: Annotated[float, Field(gt=0)] = 5.0
    """Wall-clock and CPU seconds of a program under test; at most 0.8 `timeout_s` is used."""
    code_memory_mib: Positive = 1024
    """Address space of a program under test."""
    on_failure: Literal["wrong", "invalid"] = "wrong"
    """Verdict when a verifier was killed or failed: wrong, or invalid (the sample is left out and
    counted)."""
    verifiers: dict[str, str] = {}
    """Verifiers of your own: problem kind → dotted path of a function
    (Problem, response) → Verdict, run in the same killable processes."""
    refine_prompt: str | None = None
    """File with {question}, {response} and {critique}; default: our own prompt."""
    critic: Critic = Critic()
    noise: Noise = Noise()
    refiner: Engine | None = None
    """Another model writes the refinements (weak to strong); it needs the policy's tokenizer.
    Default: the policy itself."""
