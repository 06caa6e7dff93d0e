"""Critique-GRPO training: the loop on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_cgrpo.config.checks import check_model
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.policy.parallel import initialize, shutdown
from megatron_cgrpo.rollout.nodes import Meeting
from megatron_cgrpo.training.directory import read_progress
from megatron_cgrpo.training.engines import Engines
from megatron_cgrpo.training.exchange import StopSignal, from_rank_zero, on_rank_zero, share_batch
from megatron_cgrpo.training.metrics import update_metrics
from megatron_cgrpo.training.record import Clock, Record
from megatron_cgrpo.training.rollouts import open_rollouts


def train(config: Config, root: Path, meeting: Meeting | None = None) -> None:
    """Run the whole training of `config` in the run directory `root`; on every rank.

    Rollouts and record are rank 0's; what it alone does goes through `on_rank_zero`.

    Args:
        meeting: of the nodes, where servers run on several.
    """
    stop, shape, t = StopSignal(), shape_of(check_model(config)), config.training
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(_process_groups(config))
        progress = from_rank_zero(lambda: read_progress(config, root))
        record = on_rank_zero(lambda: enter(Record(config, root, progress, stop.ask)))
        engines = enter(Engines(config, root, meeting, progress.version, stop))
        rollouts = on_rank_zero(
            lambda: enter(open_rollouts(config, root, engines.fleets, progress, record))
        )
        engines.start()
        # Imported now: Megatron loads while the servers start.
        from megatron_cgrpo.training.state import RunState, build_actor, due

        actor = build_actor(config, shape, progress)
        of_rank_zero = ((rollouts, record), record.warn) if record else ()
        state = enter(RunState(config, root, actor, *of_rank_zero))
        engines.connect(actor.model)
        clock = Clock()
        if not progress.resumed:
            on_rank_zero(lambda: record.validation(0, rollouts.validate()))
        clock.restart()
        for step in range(progress.step + 1, t.steps + 1):
            with clock("rollout_s"):
                batch = share_batch(on_rank_zero(lambda: rollouts.batch(step, stop)))
            if batch is None:
                state.checkpoint(step - 1, engines.version, last=True)
                on_rank_zero(lambda: record.stopped(step - 1))
                break
            engines.park()
            micro_batches = actor.prepare(batch, t.mini_batches)
            with clock("score_s"):
                scores = actor.score(micro_batches)
            with clock("train_s"):
                updates = [actor.train(part) for part in micro_batches]
            with clock("push_s"):
                engines.push(changed=any(u.applied for u in updates))
            values, seconds = update_metrics(scores, updates), clock.lap()
            on_rank_zero(
                lambda: record.report(
                    step, {**rollouts.metrics, **values, **engines.metrics()}, seconds
                )
            )
            stopping = stop.agreed()
            last = step == t.steps
            # Whoever asked for a stop may not wait long.
            if last or (due(config.validation.every, step) and not stopping):
                on_rank_zero(lambda: record.validation(step, rollouts.validate()))
                clock.restart()
            state.checkpoint(step, engines.version, last or stopping)
            state.export(step, last or stopping)
            if stopping:
                on_rank_zero(lambda: record.stopped(step))
                break


@contextlib.contextmanager
def _process_groups(config: Config) -> Iterator[None]:
    initialize(config.parallel, config.run.seed, config.training.collective_timeout_s)
    yield
    # Only when nothing failed: a launcher ends the job when one rank has left, and rank 0 has more
    # to close than the others.
    dist.barrier()
    shutdown()
