"""Verifiers in child processes with time and memory caps; a hung one is killed and replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict

from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.feedback.verdicts import check_kinds
from megatron_cgrpo.process import child_of_a_rank
from megatron_cgrpo.types import Problem, Verdict

START_TIMEOUT_S = 120.0


class VerifierPool:
    """`workers` processes that grade responses; used from one asyncio loop.

    `killed` counts processes that exceeded their time or died (memory cap, crash).
    """

    def __init__(self, options: Feedback, kinds: set[str]) -> None:
        check_kinds(kinds, options)
        self._options, self._kinds = options, sorted(kinds)
        self._idle: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        self._all: set[asyncio.subprocess.Process] = set()
        self.killed = 0
        for _ in range(options.workers):
            self._idle.put_nowait(None)

    async def grade(self, problem: Problem, response: str) -> Verdict:
        """The verdict on a response; within `timeout_s` of a worker's time, whatever it holds."""
        reply = await self._job(problem, response)
        if "failed" in reply:
            wrong = self._options.on_failure == "wrong"
            return Verdict(False if wrong else None, None, reply["failed"])
        return Verdict(**reply)

    async def unusable_gold(self, problem: Problem) -> str | None:
        """Why the gold answer of a problem cannot be judged against; None for a usable one."""
        reply = await self._job(problem, None)
        return reply["failed"] if "failed" in reply else reply["gold"]

    async def _job(self, problem: Problem, response: str | None) -> dict:
        """A worker's reply; {"failed": reason} when it raised, was killed or died."""
        worker = await self._idle.get()
        try:
            if worker is None:
                worker = await self._start()
            job = {"problem": asdict(problem), "response": response}
            try:
                line = await asyncio.wait_for(self._ask(worker, job), self._options.timeout_s)
                if not line:
                    raise ConnectionResetError
                return json.loads(line)
            except (TimeoutError, ConnectionError) as e:
                await self._kill(worker)
                worker = None
                self.killed += 1
                slow = isinstance(e, TimeoutError)
                reason = f"over {self._options.timeout_s} s" if slow else "the verifier died"
                return {"failed": reason}
        except BaseException:
            if worker is not None:
                await self._kill(worker)
                worker = None
            raise
        finally:
            self._idle.put_nowait(worker)

    @staticmethod
    async def _ask(worker: asyncio.subprocess.Process, job: dict) -> bytes:
        worker.stdin.write(json.dumps(job).encode() + b"\n")
        await worker.stdin.drain()
        return await worker.stdout.readline()

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megatron_cgrpo.feedback.worker",
            self._options.model_dump_json(),
            json.dumps(self._kinds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=child_of_a_rank,
            limit=1 << 22,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
        )
        self._all.add(worker)
        try:
            line = await asyncio.wait_for(worker.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = b""
        if line != b"ready\n":
            await self._kill(worker)
            raise RuntimeError(
                "a verifier process did not start; run `python -m megatron_cgrpo.feedback.worker "
                f"OPTIONS KINDS` to see why (kinds: {self._kinds})"
            )
        return worker

    async def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await worker.wait()

    async def close(self) -> None:
        """End all workers."""
        for worker in list(self._all):
            await self._kill(worker)
