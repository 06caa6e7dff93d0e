"""Memory and time of log-prob + gradient on the CPU: chunked output layer against whole logits.

    python -m benchmarks.logprob_memory [--json FILE]

Each side runs in a process of its own, one after the other; memory is the growth of the process's
peak resident set over the inputs, time the best of three.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

VOCAB, TOKENS, HIDDEN, REPEATS = 151_936, 2048, 512, 3


def measure(side: str) -> dict[str, float]:
    """Run one side in this process."""
    import torch

    from megatron_cgrpo.kernels.linear_logprob import linear_logprob_loss

    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (TOKENS,))
    advantage = torch.randn(TOKENS)

    def ours():
        return linear_logprob_loss(
            hidden, weight, targets, lambda logp, _, rows: -(logp * advantage[rows]).sum()
        )

    def naive():
        logp = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
        return -(logp * advantage).sum()

    before = _peak()
    seconds = []
    for _ in range(REPEATS):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss = {"ours": ours, "naive": naive}[side]()
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": min(seconds),
        "mib": (_peak() - before) / 2**20,
        "loss": loss.item(),
        "gradient_norm": hidden.grad.norm().item() + weight.grad.norm().item(),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("ours", "naive"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side)))
        return
    results = {}
    for side in ("naive", "ours"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.logprob_memory", "--side", side],
            capture_output=True,
            text=True,
            check=True,
        )
        results[side] = json.loads(done.stdout)
    ours, naive = results["ours"], results["naive"]
    summary = {
        "memory_ratio": ours["mib"] / naive["mib"],
        "time_ratio": ours["seconds"] / naive["seconds"],
        **results,
    }
    print(f"{TOKENS} tokens × {VOCAB} vocabulary × {HIDDEN} hidden, float32, forward + backward")
    print(f"{'':8}{'MiB over inputs':>18}{'seconds':>10}{'loss':>16}")
    for side, r in results.items():
        print(f"{side:8}{r['mib']:18.0f}{r['seconds']:10.2f}{r['loss']:16.4f}")
    print(f"ratio   {summary['memory_ratio']:18.3f}{summary['time_ratio']:10.3f}")
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
