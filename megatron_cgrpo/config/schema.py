"""Every option of a training run, its type, its default and what it does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_cgrpo.config.algorithm import Algorithm
from megatron_cgrpo.config.base import Natural, Positive, Section, Share
from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.config.training import Training


class Run(Section):
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "cgrpo"
    """Name of the run; results go to `directory`/`name`."""
    directory: str = "runs"
    """Where run directories are made."""
    seed: Natural = 0
    """Fixes data order, sampling on a given engine layout, and the selection of refinements."""
    overwrite: bool = False
    """Start anew in a run directory that already holds metrics (the old files are replaced)."""


class Model(Section):
    path: str
    """Hugging Face directory: config.json, safetensors, tokenizer."""
    weights: str | None = None
    """Distributed checkpoint to take the initial weights from, instead of those in `path`: a
    converted one (`cgrpo convert`) or a training checkpoint of any run and layout."""
    tokenizer: str | None = None
    """Directory of the tokenizer when it is not in `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and activations; gradients and optimizer state are float32."""
    output_layer: Literal["fused", "logits"] = "fused"
    """fused: log-probs and loss in chunks of tokens, the logits are never held; logits: the model
    returns them (more memory, the same numbers)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron-core): core attention only, or whole layers."""
    context_length: Positive | None = None
    """Longest sequence in tokens; default: `max_position_embeddings` of the model."""


class Parallel(Section):
    world_size: Positive = 1
    """Trainer processes in all. Under torchrun it must equal WORLD_SIZE."""
    tensor: Positive = 1
    """Tensor-parallel size of the trainer."""
    pipeline: Positive = 1
    """Pipeline-parallel size of the trainer."""
    virtual_pipeline: Positive | None = None
    """Model chunks per pipeline stage (interleaved 1F1B)."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, where they do not divide evenly (the rest must)."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage, likewise."""
    context: Positive = 1
    """Context-parallel size: every sequence is cut over so many ranks, attention included."""
    expert: Positive = 1
    """Expert-parallel size of mixtures: the experts are dealt out over tensor × context × data
    ranks."""
    expert_tensor: Positive | None = None
    """Tensor-parallel size within an expert; default: `tensor`."""
    sequence_parallel: bool = False
    """Shard norms and residuals over the tensor-parallel ranks along the sequence."""

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @model_validator(mode="after")
    def _fits(self) -> Parallel:
        block = self.tensor * self.pipeline * self.context
        if self.world_size % block:
            raise ValueError(
                f"parallel.world_size={self.world_size} is not a multiple of tensor × pipeline × "
                f"context = {self.tensor} × {self.pipeline} × {self.context}"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("parallel.sequence_parallel needs parallel.tensor ≥ 2")
        if self.virtual_pipeline is not None and (self.pipeline == 1 or self.virtual_pipeline < 2):
            raise ValueError(
                "parallel.virtual_pipeline needs parallel.pipeline ≥ 2 and at least 2 chunks"
            )
        uneven = self.first_stage_layers or self.last_stage_layers
        if uneven and (self.pipeline == 1 or self.virtual_pipeline):
            raise ValueError(
                "parallel.first_stage_layers and last_stage_layers need parallel.pipeline ≥ 2 and "
                "no virtual_pipeline"
            )
        expert_block = self.expert * (self.expert_tensor or self.tensor) * self.pipeline
        if self.world_size % expert_block:
            raise ValueError(
                f"parallel.world_size={self.world_size} is not a multiple of expert × "
                f"expert_tensor × pipeline = {expert_block}"
            )
        return self


class Optimizer(Section):
    lr: Annotated[float, Field(ge=0.0)] = 1e-6
    """Peak learning rate of Adam."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate at the end of the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, over all optimizer steps of the run."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled decay of matrices; norms and biases are never decayed."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of Adam's first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of Adam's second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Adam's ε."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    sharded: bool = True
    """Distributed optimizer: state sharded over the data-parallel ranks."""


class Rollout(Section):
    placement: Literal["cpu", "colocated", "split"] = "cpu"
    """cpu: no GPU; colocated: engines and trainer take turns on the same GPUs; split: own GPUs."""
    servers: Positive = 1
    """vLLM servers that share the requests."""
    tensor: Positive = 1
    """Tensor-parallel size of one server."""
    own_nodes: Natural = 0
    """Nodes of a job that belong to the servers, its last ones (cpu, split). 0: servers run beside
    the trainer's ranks. Either way they are dealt out evenly over their nodes."""
    urls: tuple[str, ...] = ()
    """Servers that run already (started with our middleware and plugin); none is started then."""
    token_file: str | None = None
    """File with the access token of the servers in `urls`."""
    host: str = "127.0.0.1"
    """Address that servers bind to; on nodes other than rank 0's, the node's own."""
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """First port of the servers (server i takes port + i); default: free ports."""
    gpus: tuple[Natural, ...] = ()
    """split: GPU indices of a node for its servers, `tensor` each; default on nodes of their own:
    from 0."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature T; log-probs everywhere are log_softmax(logits / T)."""
    max_prompt_tokens: Positive = 2048
    """Longer problems are dropped when data is loaded, and counted."""
    max_response_tokens: Positive = 6144
    """Responses and refinements are cut there."""
    max_refinement_prompt_tokens: Positive | None = None
    """Limit of (problem, response, critique); the response is shortened from its middle to fit.
    Default: context length − max_response_tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the end-of-sequence token (base models)."""
    stop_token_ids: tuple[Natural, ...] = ()
    """Ids of the tokens that end a response. Default: all that the model's files name (tokenizer,
    config.json, generation_config.json) and the one that the chat template writes behind a
    response."""
    concurrency: Positive = 64
    """Requests in flight per server."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A request without an answer by then is counted lost and sent again (`request_retries`)."""
    request_retries: Natural = 2
    """How often a lost request is sent again before the run fails."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """How long a server may take to answer after its start."""
    max_restarts: Natural = 3
    """Restarts of dead servers in the whole run before it gives up."""
    max_num_seqs: Positive = 256
    """Sequences that a server decodes at once."""
    gpu_memory_utilization: Share = 0.85
    """Share of GPU memory for a server (not on the CPU). Colocated: the trainer's weights,
    gradients and optimizer state stay on the GPU beside it."""
    kv_cache_mib: Positive = 64
    """KV cache of a server on the CPU."""
    bucket_mib: Positive = 512
    """Most bytes of weights in flight at once when weights are pushed (a larger single tensor goes
    by itself)."""
    extra_args: tuple[str, ...] = ()
    """More arguments for the vLLM server."""


Paths = str | Annotated[tuple[str, ...], Field(min_length=1)]


class Fields(Section):
    question: str | tuple[str, ...] = ()
    """Field(s) of the problem text, joined by a blank, or of the chat; default: the first known
    name present. A dot descends: `reward_model.ground_truth`, `turns.0`."""
    answer: str | None = None
    """Field of the gold answer; default: the first known name present."""
    id: str | None = None
    """Field of the problem's name; default: `id`, `ID`, `idx`, else the record number."""


class Data(Section):
    path: Paths
    """Problems: a file, a pattern (`train/*.jsonl`), a directory saved by `datasets`, or a list of
    these. .jsonl, .json, .csv (also with .gz), .parquet, .arrow; see docs/data.md."""
    fields: Fields = Fields()
    kind: str = "math"
    """Verifier of problems that do not name one (`kind` field)."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the tokenizer's own template; plain: `prompt_file` with {question}, for base models."""
    prompt_file: str | None = None
    """Text with {question}: the whole prompt (plain) or the user message (chat)."""
    system: str | None = None
    """System message of problems that bring none."""
    shuffle_options: bool = True
    """Multiple choice: shuffle the options of each problem (fixed by its id)."""
    limit: Positive | None = None
    """Use only the first so many problems of the file."""
    keep_repeated: bool = False
    """Also train on records that repeat the prompt and the answer of an earlier one."""
    check_golds: bool = True
    """Exclude problems whose gold answer the verifier cannot read (they are named in
    `excluded.jsonl`); code: whose tests do not run, or fail the reference solution."""
    shuffle: bool = True
    """Visit problems in a random order, anew each epoch (fixed by `run.seed`)."""


class Validation(Section):
    path: Paths | None = None
    """Problems to validate on, as `data.path`; none: no validation."""
    every: Natural = 10
    """Steps between validations; 0: only before the first and after the last step."""
    limit: Positive | None = None
    """Use only the first so many validation problems."""
    samples: Positive = 1
    """Responses a problem; the score is their mean (avg@samples)."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.6
    """Sampling temperature; 0 is greedy."""


class Wandb(Section):
    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline writes into the run directory; `wandb sync` uploads it later."""
    project: str = "megatron_cgrpo"
    """wandb project."""
    id: str | None = None
    """wandb run id, to continue one."""


class Logging(Section):
    progress: bool = True
    """Progress on the console."""
    wandb: Wandb = Wandb()


class Config(Section):
    model: Model
    data: Data
    run: Run = Run()
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    algorithm: Algorithm = Algorithm()
    rollout: Rollout = Rollout()
    validation: Validation = Validation()
    feedback: Feedback = Feedback()
    training: Training = Training()
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _cross_checks(self) -> Config:
        mini = self.training.mini_batch_problems or self.training.problems_per_step
        members = mini * self.algorithm.responses
        if members < self.parallel.data:
            raise ValueError(
                f"a mini-batch of {mini} problems × {self.algorithm.responses} responses cannot be "
                f"shared by {self.parallel.data} data-parallel ranks; raise "
                "training.mini_batch_problems"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        context = self.model.context_length
        if context is not None and longest > context:
            raise ValueError(
                f"rollout.max_prompt_tokens + max_response_tokens = {longest} exceeds "
                f"model.context_length = {context}"
            )
        room = self.training.micro_batch_tokens * self.parallel.context
        if room < longest:
            raise ValueError(
                f"training.micro_batch_tokens × parallel.context = {room} is less than one longest "
                f"sequence of {longest} tokens"
            )
        if self.validation.temperature == 0 and self.validation.samples > 1:
            raise ValueError(
                "validation.temperature=0 is greedy: every sample would be the same; set "
                "validation.samples=1"
            )
        self._check_engines()
        self._check_critic()
        return self

    def _check_critic(self) -> None:
        critic = self.feedback.critic
        asked = self.algorithm.refines and self.algorithm.critique == "cot"
        if asked and critic.url is None and critic.engine is None:
            raise ValueError(
                "algorithm.critique=cot needs a critic: set feedback.critic.url and model, or "
                "feedback.critic.engine.path"
            )
        guards, training = self.training.guards, self.training
        if guards.refinement_share is not None and not training.measure_refinement_gradient:
            raise ValueError(
                "training.guards.refinement_share needs training.measure_refinement_gradient=true"
            )
        on_gpus = self.rollout.placement != "cpu"
        # The trainer's own depend on the nodes: rollout/nodes.py.
        taken = set() if self.rollout.own_nodes else set(self.rollout.gpus)
        for name, engine in (
            ("feedback.critic.engine", critic.engine),
            ("feedback.refiner", self.feedback.refiner),
        ):
            if engine and on_gpus and len(engine.gpus) != engine.servers * engine.tensor:
                raise ValueError(
                    f"{name}.gpus needs {engine.servers * engine.tensor} GPU indices "
                    "(servers × tensor)"
                )
            if engine and on_gpus and taken.intersection(engine.gpus):
                raise ValueError(
                    f"{name}.gpus {sorted(taken.intersection(engine.gpus))} belong to other engines"
                )
            taken |= set(engine.gpus) if engine else set()

    def _check_own_nodes(self) -> None:
        r = self.rollout
        if r.placement == "colocated" or r.urls:
            raise ValueError(
                "rollout.own_nodes is for servers of this job that do not share the trainer's GPUs "
                "(rollout.placement=split or cpu, no rollout.urls)"
            )
        if r.servers % r.own_nodes:
            raise ValueError(
                f"rollout.servers={r.servers} does not divide over rollout.own_nodes={r.own_nodes}"
            )
        each = r.servers // r.own_nodes * r.tensor
        if r.gpus and len(r.gpus) != each:
            raise ValueError(
                f"rollout.gpus needs {each} GPU indices (servers of a node × tensor), got "
                f"{len(r.gpus)}"
            )

    def _check_engines(self) -> None:
        r = self.rollout
        needed = r.servers * r.tensor
        if r.placement == "colocated" and needed > self.parallel.world_size:
            raise ValueError(
                f"rollout.placement=colocated: the engines' {needed} GPUs (servers × tensor) are "
                f"more than the trainer's parallel.world_size={self.parallel.world_size}"
            )
        if r.own_nodes:
            self._check_own_nodes()
        elif r.placement == "split" and not r.urls:
            if len(r.gpus) != needed:
                raise ValueError(
                    f"rollout.placement=split needs rollout.gpus with {needed} GPU indices "
                    f"(servers × tensor), got {len(r.gpus)}"
                )
            shared = set(r.gpus) & set(range(self.parallel.world_size))
            if shared:
                raise ValueError(
                    f"rollout.gpus {sorted(shared)} belong to the trainer "
                    f"(0 … {self.parallel.world_size - 1})"
                )
        limit = r.max_refinement_prompt_tokens
        context = self.model.context_length
        if limit is not None and context is not None and limit + r.max_response_tokens > context:
            raise ValueError(
                f"rollout.max_refinement_prompt_tokens + max_response_tokens = "
                f"{limit + r.max_response_tokens} exceeds model.context_length = {context}"
            )
