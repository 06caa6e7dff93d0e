"""A verifier process: JSON lines in, JSON lines out. Started and killed by `VerifierPool`."""

from __future__ import annotations

import json
import os
import resource
import sys

from megatron_cgrpo.feedback.verdicts import resolve
from megatron_cgrpo.types import Problem


def main(memory_mib: int, kinds: dict[str, str | None]) -> None:
    """Serve until standard input closes.

    Args:
        kinds: problem kind → dotted path of a verifier of the user's, or None for ours.
    """
    replies = os.fdopen(os.dup(1), "w")
    # A library that prints must not garble the protocol.
    os.dup2(2, 1)
    own = {kind: path for kind, path in kinds.items() if path is not None}
    verifiers = {kind: resolve(kind, own) for kind in kinds}
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    cap = used + (memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        problem = Problem(**job["problem"])
        try:
            v = verifiers[problem.kind](problem, job["response"])
            reply = {"correct": v.correct, "extracted": v.extracted, "reason": v.reason}
        except Exception as e:
            # Any input may reach a third-party parser: MemoryError and RecursionError are among
            # these. The pool decides what it means.
            reply = {"failed": f"{type(e).__name__}: {e}"[:200]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
