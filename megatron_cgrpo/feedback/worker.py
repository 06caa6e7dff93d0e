"""A verifier process: JSON lines in, JSON lines out. Started and killed by `VerifierPool`."""

from __future__ import annotations

import json
import os
import resource
import sys

from megatron_cgrpo.config.feedback import Feedback
from megatron_cgrpo.feedback.verdicts import Verifier, resolve
from megatron_cgrpo.types import Problem


def main(options: Feedback, kinds: list[str]) -> None:
    """Serve problems of these kinds until standard input closes."""
    replies = os.fdopen(os.dup(1), "w")
    # A library that prints must not garble the protocol.
    os.dup2(2, 1)
    verifiers = {kind: resolve(kind, options) for kind in kinds}
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    cap = used + (options.memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        problem = Problem(**job["problem"])
        try:
            reply = _answer(verifiers[problem.kind], problem, job["response"])
        except Exception as e:
            # Any input may reach a third-party parser: MemoryError and RecursionError are among
            # these. The pool decides what it means.
            reply = {"failed": f"{type(e).__name__}: {e}"[:200]}
        print(json.dumps(reply), file=replies, flush=True)


def _answer(verifier: Verifier, problem: Problem, response: str | None) -> dict:
    """A verdict; without a response, what is wrong with the gold answer."""
    if response is None:
        return {"gold": verifier.gold(problem)}
    v = verifier.verify(problem, response)
    return {"correct": v.correct, "extracted": v.extracted, "reason": v.reason}


if __name__ == "__main__":
    main(Feedback.model_validate_json(sys.argv[1]), json.loads(sys.argv[2]))
