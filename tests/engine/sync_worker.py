"""One rank of the weight-sync checks: engines fed from TP=2 (or PP=2) shards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.policy.parallel import initialize
from tests.engine.engine_config import tiny_config

PROMPTS = [(4, 5, 6, 7) * 12, (40, 41, 42), tuple(range(3, 60))]


def sample(fleet, temperature):
    """Token ids and log-probs of all prompts; the prefix cache stays warm between calls."""

    async def run():
        try:
            return await asyncio.gather(
                *(
                    fleet.generate(
                        p, n=2 if temperature else 1, temperature=temperature, seed=7, max_tokens=24
                    )
                    for p in PROMPTS
                )
            )
        finally:
            await fleet.close()

    answers = asyncio.run(run())
    return [(c.prompt_ids, c.token_ids, c.logprobs) for a in answers for c in a]


def reference_gap(root, sampled, temperature):
    """Largest difference between engine log-probs and transformers' forward of `root`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)
    worst = 0.0
    for prompt, ids, logprobs in sampled:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].double() / temperature
        logp = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        want = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, (want - torch.tensor(logprobs).double()).abs().max().item())
    return worst


def main(job, out):
    root, other = job["root"], job["other"]
    config = tiny_config(
        root,
        parallel={"world_size": 2, **job["layout"]},
        rollout={"tensor": job["engine_tensor"], "max_restarts": 3},
    )
    rank = int(os.environ["RANK"])
    fleet = None
    if rank == 0:
        from megatron_cgrpo.rollout.fleet import EngineFleet

        fleet = EngineFleet(config, 256, Path(job["tmp"]))
        fleet.start()
    report = {}
    try:
        run(job, config, fleet, report, root, other)
    finally:
        if fleet is not None:
            fleet.stop()
    if rank == 0:
        Path(out).write_text(json.dumps(report))
    dist.barrier()


def run(job, config, fleet, report, root, other):
    initialize(config.parallel, timeout_s=300)
    from megatron_cgrpo.policy.actor import MegatronActor
    from megatron_cgrpo.policy.weights import load_weights
    from megatron_cgrpo.rollout.weight_sync import WeightSync

    shape = shape_of(json.loads((Path(root) / "config.json").read_text()))
    actor = MegatronActor(config, shape, HFCheckpoint(root))
    if fleet is not None:
        fleet.wait_ready()
    sync = WeightSync(config, actor.model, fleet)
    temperature = 0.6

    def on_rank_zero(key, action):
        if fleet is not None:
            report[key] = action()
        dist.barrier()

    first = sample(fleet, temperature) if fleet else None
    on_rank_zero("fresh_gap", lambda: reference_gap(root, first, temperature))
    sync.push(0)
    on_rank_zero("null_sync_equal", lambda: sample(fleet, temperature) == first)
    load_weights(actor.model, HFCheckpoint(other))
    # Other weights than the servers' own, and still version 0: as with `model.weights`.
    pushed = sync.push(0)
    report["push"] = pushed
    second = sample(fleet, temperature) if fleet else None
    on_rank_zero("changed", lambda: second != first)
    on_rank_zero("new_gap", lambda: reference_gap(other, second, temperature))
    if job.get("export"):
        export_and_serve(job, actor, fleet, on_rank_zero, other)
    if job.get("faults"):
        faults(fleet, sync, report, on_rank_zero, second, temperature, other)
    sync.close()


def export_and_serve(job, actor, fleet, on_rank_zero, other):
    """The exported directory, in a server of its own, continues prompts as the live engine does."""
    from megatron_cgrpo.policy.export import stream_hf
    from megatron_cgrpo.rollout.fleet import EngineFleet
    from megatron_cgrpo.training.exporter import Exporter

    tensors = stream_hf(actor.model)
    exports = Path(job["tmp"]) / "exports"
    if fleet is None:
        for _ in tensors:
            pass
    else:
        exporter = Exporter(exports, [Path(other)], print)
        exporter.start(2, tensors)
        # What was copied is exported, whatever happens to the weights meanwhile.
        for parameter in actor.model.chunks[0].parameters():
            parameter.data.zero_()
        exporter.finish()

    def compare():
        live = sample(fleet, 0.0)
        fleet.stop()
        served = EngineFleet(tiny_config(exports / "step_000002"), 256, exports)
        served.start()
        try:
            served.wait_ready()
            return [ids for _, ids, _ in sample(served, 0.0)] == [ids for _, ids, _ in live]
        finally:
            served.stop()

    on_rank_zero("export_serves_the_same", compare)


def faults(fleet, sync, report, on_rank_zero, second, temperature, other):
    """The engine core is killed while it generates; then a push hits a dead server."""

    def kill_while_generating():
        import psutil

        def kill():
            time.sleep(1.0)
            for child in psutil.Process(fleet.servers[0].process.pid).children(recursive=True):
                os.kill(child.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        start = time.perf_counter()

        async def long():
            try:
                return await asyncio.gather(
                    *(
                        fleet.generate((5 + i, 6, 7), n=8, temperature=1.0, seed=i, max_tokens=200)
                        for i in range(24)
                    )
                )
            finally:
                await fleet.close()

        answers = asyncio.run(long())
        report["survived_after_s"] = time.perf_counter() - start
        report["lost"], report["restarts"] = fleet.lost, fleet.restarts
        return len(answers)

    on_rank_zero("answers_after_kill", kill_while_generating)
    # The restarted server was brought to the pushed weights before it served.
    on_rank_zero("same_weights_after_restart", lambda: sample(fleet, temperature) == second)

    def kill_everything():
        os.killpg(fleet.servers[0].process.pid, signal.SIGKILL)
        fleet.servers[0].process.wait()

    on_rank_zero("killed", kill_everything)
    sync.push(3)
    on_rank_zero("served_after_failed_push", lambda: sample(fleet, temperature) == second)
    on_rank_zero("version", lambda: fleet.version)
    on_rank_zero("final_restarts", lambda: fleet.restarts)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
    dist.destroy_process_group()
