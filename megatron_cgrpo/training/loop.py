"""Critique-GRPO training: the loop on every rank."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.markup import escape

from megatron_cgrpo.algorithm.batch import Batch, build_batch
from megatron_cgrpo.config.checks import check_model
from megatron_cgrpo.config.schema import Config
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint
from megatron_cgrpo.conversion.shape import ModelShape
from megatron_cgrpo.policy.parallel import initialize, shutdown
from megatron_cgrpo.policy.states import STATES, VALIDATION, read_run_state
from megatron_cgrpo.rollout.host import NodeServers, servers_beside
from megatron_cgrpo.rollout.nodes import Meeting, trainer_nodes
from megatron_cgrpo.rollout.server import EngineError
from megatron_cgrpo.training.controller import Controller
from megatron_cgrpo.training.exchange import StopSignal, from_rank_zero, share_batch, share_error
from megatron_cgrpo.training.exporter import Exporter
from megatron_cgrpo.training.guards import Watch
from megatron_cgrpo.training.logger import STOPPED, RunLogger, resume_from, step_line
from megatron_cgrpo.training.metrics import lineages, rollout_metrics, update_metrics


def train(config: Config, root: Path, meeting: Meeting | None = None) -> None:
    """Run the whole training of `config` in the run directory `root`; on every rank.

    Args:
        meeting: of the nodes, where servers run on several.
    """
    with Session(config, root, meeting) as s:
        s.validate(s.first_step - 1)
        for step in range(s.first_step, config.training.steps + 1):
            with s.timed("rollout_s"):
                batch = s.rollout(step)
            if batch is None:
                s.checkpoint(step - 1, last=True)
                s.mark_stopped(step - 1)
                break
            s.free_gpus()
            micro_batches = s.actor.prepare(batch, config.training.mini_batches)
            with s.timed("score_s"):
                scores = s.actor.score(micro_batches)
            with s.timed("train_s"):
                updates = [s.actor.train(part) for part in micro_batches]
            with s.timed("push_s"):
                s.push_weights(changed=any(u.applied for u in updates))
            s.report(step, update_metrics(scores, updates))
            last, stop = step == config.training.steps, s.stop.agreed()
            if last or not stop:
                # Whoever asked for a stop may not wait long.
                s.validate(step, last)
            s.checkpoint(step, last or stop)
            s.export(step, last or stop)
            if stop:
                s.mark_stopped(step)
                break


class Session:
    """Everything that lives as long as a run: groups of ranks, actor, engines, logs."""

    def __init__(self, config: Config, root: Path, meeting: Meeting | None) -> None:
        self.config, self.root, self._meeting = config, root, meeting
        self.stop = StopSignal()
        self.version = 0
        self.first_step = 1
        self._resumed: dict[str, Any] | None = None
        self._times: dict[str, float] = {}
        self._groups_metrics: dict[str, float] = {}
        self._push: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self.sync = None
        self._accuracy: float | None = None
        self._watch = Watch(config.training.guards)
        self._guard: str | None = None
        self._exporter: Exporter | None = None
        self.logger: RunLogger | None = None
        self.controller: Controller | None = None
        self._servers: NodeServers | None = None

    def __enter__(self) -> Session:
        config, t = self.config, self.config.training
        hf = check_model(config)
        shape = ModelShape.from_hf(hf)
        initialize(config.parallel, config.run.seed, t.collective_timeout_s)
        self._checkpoint = from_rank_zero(lambda: resume_from(config, self.root))
        if self._checkpoint is not None:
            self._resumed = read_run_state(self._checkpoint)
            self.first_step, self.version = self._resumed["step"] + 1, self._resumed["version"]
        try:
            self._on_rank_zero(self._start_controller)
            self._start_servers()
            if config.rollout.placement == "colocated":
                # The engines leave the GPUs before the model is built there.
                self._on_rank_zero(self._park_engines)
            # Imported late: Megatron and vLLM load while the servers start.
            from megatron_cgrpo.policy.actor import MegatronActor
            from megatron_cgrpo.policy.checkpoint import StateSaver, load_state
            from megatron_cgrpo.rollout.weight_sync import WeightSync

            self.actor = MegatronActor(config, shape, HFCheckpoint(config.model.path))
            if self._resumed is not None:
                load_state(self.actor, self._checkpoint)
            self._saver = StateSaver(
                self.actor, self.root / STATES, t.keep_checkpoints, t.background_checkpoints
            )
            if config.rollout.placement != "colocated":
                self._on_rank_zero(lambda: self.controller.wait_ready())
            fleet = self.controller.fleet if self.controller else None
            self.sync = WeightSync(config, self.actor.model, fleet)
            elsewhere = config.model.weights or config.rollout.urls
            if self.version > 0 or config.rollout.placement == "colocated" or elsewhere:
                # Resumed: the engines have the initial weights. Colocated: they sleep without any.
                # Weights from elsewhere, engines given by URL: they hold others, or unknown ones.
                self.sync.push(self.version)
        except BaseException:
            self._close()
            raise
        self._step_start = time.perf_counter()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._close()
        if error is None:
            # A launcher ends the job when one rank has left: rank 0 has more to close.
            dist.barrier()
            shutdown()

    def _start_controller(self) -> None:
        self.logger = RunLogger(self.config, self.root, self._resumed)
        model = self.config.model
        self._exporter = Exporter(
            self.root / "checkpoints",
            [Path(model.path), Path(model.tokenizer or model.path)],
            self._say_error,
        )
        self.controller = Controller(
            self.config, self.logger, self._resumed is not None, self._meeting
        )
        if self._resumed is not None:
            self.controller.sampler.load_state_dict(self._resumed["sampler"])
            where = escape(str(self._checkpoint))
            self.logger.say(f"continuing after step {self._resumed['step']} ({where})")

    def _start_servers(self) -> None:
        """The servers of this node, by its first rank; rank 0's fleet has started its own."""
        if self._meeting is not None and os.environ["LOCAL_RANK"] == "0":
            self._servers = servers_beside(
                self.config, self.root, self._meeting, trainer_nodes(), lambda: self.stop.asked
            )
            if self._servers is not None:
                self._servers.start()

    def _say_error(self, message: str) -> None:
        if self.logger is not None:
            self.logger.warn(message)

    def _park_engines(self) -> None:
        self.controller.wait_ready()
        self.controller.fleet.sleep()

    def _close(self) -> None:
        try:
            if self.sync is not None:
                self.sync.close()
        finally:
            if self._exporter is not None:
                self._exporter.wait()
            if self.controller is not None:
                self.controller.close()
            if self._servers is not None:
                self._servers.stop()
            if self.logger is not None:
                self.logger.close()

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0; its error is raised on every rank."""
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                action()
            except Exception as e:
                error = e
        share_error(error)

    # --------------------------------------------------------------- the steps

    def rollout(self, step: int) -> Batch | None:
        """This step's batch, on every rank; None when it failed because whoever asked for a stop
        ended the engines too (Slurm's SIGTERM goes to all processes of a job)."""
        batch, error, stopped = None, None, False
        if self.controller is not None:
            before = self.controller.sampler.state_dict()
            try:
                groups, counts = self.controller.rollout(step)
                config = self.config
                batch = build_batch(
                    groups,
                    config.algorithm,
                    config.training.mini_batches,
                    config.rollout.max_response_tokens,
                )
                self._groups_metrics = rollout_metrics(groups, counts)
                self._groups_metrics["tokens/generated"] = (
                    counts.generated_tokens + counts.refinement_tokens
                )
                seconds = counts.refine_seconds
                self._groups_metrics["time/refine_group_s"] = sum(seconds) / max(len(seconds), 1)
                self.logger.samples(lineages(step, groups, config.training.log_samples))
            except Exception as e:
                stopped = self.stop.asked and isinstance(e, EngineError)
                error = None if stopped else e
                if stopped:
                    self.controller.sampler.load_state_dict(before)
                    self._say_error(f"stopping: {e}")
        share_error(error)
        return None if self.stop.shared(stopped) else share_batch(batch)

    def free_gpus(self) -> None:
        """Colocated engines give their GPU memory to training; the next push wakes them."""
        if self.config.rollout.placement == "colocated":
            # Every rank waits here until the engines of all GPUs sleep.
            self._on_rank_zero(lambda: self.controller.fleet.sleep())

    def push_weights(self, changed: bool) -> None:
        """Bring the engines to the new weights; sleeping ones get theirs back in any case."""
        self.version += changed
        if changed or self.config.rollout.placement == "colocated":
            self._push = self.sync.push(self.version)

    def mark_stopped(self, step: int) -> None:
        """Tell whoever started the run that it was stopped, is complete up to here, and why."""
        if self.logger is not None:
            (self.root / STOPPED).write_text(f"{step}\n{self._guard or ''}")

    def report(self, step: int, values: dict[str, float]) -> None:
        """Write this step's metrics."""
        if self.logger is None:
            return
        now = time.perf_counter()
        self._times["step_s"], self._step_start = now - self._step_start, now
        row = {**self._groups_metrics, **values}
        row |= {f"time/{k}": round(v, 4) for k, v in self._times.items()}
        row["push/gib_per_s"] = self._push.get("gib_per_s", 0.0)
        row["push/mib"] = self._push.get("bytes", 0) / 2**20
        rollout = self._times.get("rollout_s", 0.0)
        trained = self._times.get("score_s", 0.0) + self._times.get("train_s", 0.0)
        row["throughput/rollout_tokens_per_s"] = row["tokens/generated"] / max(rollout, 1e-9)
        row["throughput/trainer_tokens_per_s"] = row["tokens/scored"] / max(trained, 1e-9)
        fleet = self.controller.fleet
        row |= {
            "weight_version": self.version,
            "engine/lost_requests": fleet.lost,
            "engine/restarts": fleet.restarts,
            "verifier/killed": self.controller.killed_verifiers,
            **self.controller.critic_metrics(),
        }
        self._times = {}
        self.logger.step(step, row)
        self.logger.say(step_line(step, self.config.training.steps, row))
        warnings, self._guard = self._watch.check(values)
        for warning in warnings:
            self._say_error(warning)
        if self._guard is not None:
            self._say_error(f"stopping: {self._guard}")
            self.stop.ask()

    def validate(self, step: int, last: bool = False) -> None:
        """Score the validation problems at step 0, every N steps and at the end."""
        self._accuracy = None
        every = self.config.validation.every
        if not (step == 0 or last or (every and step % every == 0)):
            return
        if self._resumed is not None and step == self._resumed["step"]:
            return  # scored before the checkpoint was written, or left out by a stop
        self._on_rank_zero(lambda: self._validate(step))
        self._step_start = time.perf_counter()

    def _validate(self, step: int) -> None:
        score = self._accuracy = self.controller.validate()
        if score is not None:
            self.logger.step(step, {"validation/accuracy": score})
            self.logger.say(f"step {step:>4}  validation accuracy {score:.3f}")

    def checkpoint(self, step: int, last: bool) -> None:
        """Write the training state every N steps and at the end.

        One that fails (full disk) is reported and the run goes on with the older ones; the last
        one raises.
        """
        every = self.config.training.checkpoint_every
        due = last or bool(every and step % every == 0)
        run_state: dict[str, Any] = {}
        if due and self.controller is not None:
            run_state = {
                "step": step,
                "version": self.version,
                "sampler": self.controller.sampler.state_dict(),
                "wandb_id": self.logger.wandb_id,
                "config": self.config.model_dump(mode="json"),
                VALIDATION: self._accuracy,
            }
        try:
            self._saver.poll(blocking=due)
        except OSError as e:
            self._say_error(f"an earlier checkpoint failed: {e}")
        try:
            if due:
                self._saver.save(step, run_state)
            if last:
                self._saver.wait()
        except OSError as e:
            if last:
                raise
            self._say_error(f"checkpoint of step {step} failed: {e}")

    def export(self, step: int, last: bool = False) -> None:
        """Export the policy as a Hugging Face directory every N steps and at the end.

        Training waits for the gathering of the weights; they are written in the background. An
        export that fails (full disk) is reported and the run goes on; the last one raises. A
        failed export leaves nothing that looks complete.
        """
        every = self.config.training.save_every
        if not (last or (every and step % every == 0)):
            return
        from megatron_cgrpo.policy.export import stream_hf

        tensors = stream_hf(self.actor.model)
        if self._exporter is not None:
            self._exporter.start(step, tensors)
        else:
            for _ in tensors:
                pass
        if last:
            self._on_rank_zero(lambda: self._exporter.finish())

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start
