"""One rank of the equivalence checks: our actor against transformers, at many layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_cgrpo.algorithm.batch import build_batch
from megatron_cgrpo.config import parse_config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.kernels.policy_loss import LossColumns, policy_loss_reference
from megatron_cgrpo.policy.parallel import initialize
from tests.groups import groups


def make_config(case, root):
    return parse_config(
        {
            "model": {
                "path": root,
                "dtype": "float32",
                "output_layer": case.get("output_layer", "fused"),
            },
            "data": {"path": "unused"},
            "parallel": {
                "world_size": case["world"],
                "tensor": case["tp"],
                "pipeline": case["pp"],
                "virtual_pipeline": case.get("vpp"),
                "sequence_parallel": case.get("sp", False),
                "context": case.get("cp", 1),
                "expert": case.get("ep", 1),
                "expert_tensor": case.get("etp"),
                "first_stage_layers": case.get("first"),
            },
            "optimizer": {
                "lr": case.get("lr", 0.0),
                "clip_grad": 0.05 if case.get("clip") else 0.0,
                "sharded": case.get("sharded", False),
            },
            "algorithm": {
                "responses": 4,
                "refinements": 2,
                "length_norm": case.get("length_norm", "none"),
            },
            "rollout": {
                "temperature": case.get("temperature", 1.0),
                "max_prompt_tokens": 60,
                "max_response_tokens": 60,
            },
            "training": {
                "problems_per_step": 4,
                "mini_batch_problems": case.get("mini", 4),
                "micro_batch_tokens": case.get("micro", 128),
                "packing": case.get("packing", "padded"),
                "measure_refinement_gradient": case.get("measure", True),
            },
        }
    )


def reference(root, batch, config):
    """Log-probs per sample and gradients of the whole objective from transformers' model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)
    logprob = token_logprobs(model, batch, config)
    loss = loss_of(logprob, logprob.detach(), batch, config)
    loss.backward()
    grads = stored_names({n: p.grad for n, p in model.named_parameters()})
    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    return logprob.detach(), grads, norm


def stored_names(tensors):
    """transformers' model holds the experts of a layer as one tensor; files hold them singly."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                prefix = name.replace("gate_up_proj", str(e))
                out |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            out |= {f"{prefix}{e}.down_proj.weight": t for e, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def objective(model, batch, config):
    """The loss at a step's first update."""
    logprob = token_logprobs(model, batch, config)
    return loss_of(logprob, logprob.detach(), batch, config)


def token_logprobs(model, batch, config):
    logprobs = []
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:]):
        ids = batch.tokens[start:end]
        logits = model(ids[None]).logits[0].double() / config.rollout.temperature
        logp = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        logprobs.append(torch.cat([logp.new_zeros(1), logp]))
    return torch.cat(logprobs)


def loss_of(logprob, old, batch, config):
    columns = LossColumns(
        old,
        batch.engine_logprob.double(),
        batch.advantage.double(),
        batch.weight.double(),
        batch.is_refinement,
        batch.loss_mask,
    )
    loss, _, _ = policy_loss_reference(
        logprob, torch.zeros_like(logprob), columns, config.algorithm
    )
    return loss


def check(case, root):
    from megatron.core import parallel_state as ps

    from megatron_cgrpo.policy.actor import MegatronActor
    from megatron_cgrpo.policy.export import stream_hf
    from megatron_cgrpo.policy.model import shard_group

    config = make_config(case, root)
    initialize(config.parallel)
    checkpoint = HFCheckpoint(root)
    shape = shape_of(json.loads((Path(root) / "config.json").read_text()))
    actor = MegatronActor(config, shape, checkpoint)
    batch = build_batch(groups(3, 4), config.algorithm, 1, config.rollout.max_response_tokens)
    want, grads, norm = reference(root, batch, config)
    prepared = actor.prepare(batch, 1)
    actor.score(prepared)
    worst = torch.zeros(4, dtype=torch.float64)
    if ps.is_pipeline_last_stage(ignore_virtual=True):
        # Each micro-batch carries its targets; its log-probs must be found among the reference's.
        by_key = {}
        for t in range(len(batch.tokens)):
            if batch.loss_mask[t]:
                key = (int(batch.tokens[t]), round(float(batch.engine_logprob[t]), 6))
                by_key.setdefault(key, []).append(float(want[t]))
        for mb in prepared[0]:
            engine = mb.columns.engine_logprob.tolist()
            for token, e, got in zip(mb.targets.tolist(), engine, mb.columns.old_logprob.tolist()):
                gap = min(abs(got - w) for w in by_key[(token, round(e, 6))])
                worst[0] = torch.maximum(worst[0], torch.tensor(gap, dtype=torch.float64))
    result = actor.train(prepared[0])
    if case.get("lr"):
        extra = after_steps(actor, config, batch, root, norm)
        return report(case, worst, result, norm) | extra
    mine = actor.model.parameters_by_name()
    if not config.optimizer.sharded:
        for entry in actor.model.plan:
            names = [n for n in entry.megatron if n in mine]
            if "embedding.word_embeddings.weight" in names and shape.tied:
                names += [n for n in ("output_layer.weight",) if n in mine]
            for name in names:
                group = shard_group(entry)
                parts = [grads[h] for h in entry.hf_names]
                ref = entry.rule.shard(parts, shape, group.size(), group.rank())
                error = (mine[name].main_grad - ref).abs().max() / (ref.abs().max() + 1e-12)
                worst[1] = torch.maximum(worst[1], error.double())
    for everywhere in (False, True):
        for name, tensor in stream_hf(actor.model, everywhere):
            if everywhere or dist.get_rank() == 0:
                same = tensor is not None and torch.equal(tensor, checkpoint.get(name))
                worst[2] += not same
    return report(case, worst, result, norm)


def after_steps(actor, config, batch, root, norm):
    """A second step, then the weights against torch's Adam on transformers' model."""
    from transformers import AutoModelForCausalLM

    from megatron_cgrpo.policy.export import stream_hf

    prepared = actor.prepare(batch, 1)
    actor.score(prepared)
    actor.train(prepared[0])
    o = config.optimizer
    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)
    adam = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=0.0
    )
    for _ in range(2):
        adam.zero_grad()
        objective(model, batch, config).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        adam.step()
    want = model.state_dict()
    # Adam's first steps are ±lr: where a gradient is rounding noise its sign is, too. So the
    # comparison is over whole tensors.
    far = [
        ((t - want[n]).norm() / want[n].norm()).item()
        for n, t in stream_hf(actor.model, everywhere=True)
    ]
    return {"stepped": max(far), "tied_copies": tied_difference(actor)}


def tied_difference(actor):
    """Largest difference between the embedding of the first and the last stage's copy."""
    from megatron.core import parallel_state as ps

    if not actor.shape.tied or ps.get_pipeline_model_parallel_world_size() == 1:
        return 0.0
    group, mine = ps.get_pipeline_model_parallel_group(), actor.model.parameters_by_name()
    ranks = dist.get_process_group_ranks(group)
    names = {ranks[0]: "embedding.word_embeddings.weight", ranks[-1]: "output_layer.weight"}
    held = [None] * len(ranks)
    name = names.get(dist.get_rank())
    dist.all_gather_object(held, None if name is None else mine[name].detach(), group=group)
    gap = torch.tensor((held[0] - held[-1]).abs().max().item())
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return gap.item()


def report(case, worst, result, norm):
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "case": case,
        "logprob": worst[0].item(),
        "grad": worst[1].item(),
        "export": worst[2].item(),
        "norm": result.grad_norm,
        "reference_norm": norm,
        "max_log_ratio": result.max_log_ratio,
        "clipped": result.sums["clipped_low"] + result.sums["clipped_high"],
        "refinement_norm": result.refinement_grad_norm,
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    results = [check(case, case["root"]) for case in job["cases"]]
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
