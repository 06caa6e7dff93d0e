"""Our kernels against plain torch, Liger-Kernel and the roofline.

    python -m benchmarks.kernels              on a GPU: time, share of the roofline, memory, error
    python -m benchmarks.kernels --offline    anywhere: what the kernels compile to, and estimates

The roofline is the device's own: copy bandwidth and bf16 matmul rate measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

HIDDEN = 5120
# Rows compared with float64.
CHECKED = 256
VOCAB = 151_936
# H100 SXM data sheet, for estimates where there is no GPU.
H100_BYTES_PER_S = 3.35e12


def offline() -> int:
    """Print resources of every configuration; returns the number of unfit ones."""
    from benchmarks.offline import TOKENS, WIDTH, all_configurations

    header = f"{'kernel':34}{'configuration':32}{'sm':>4}{'regs':>6}{'spills':>8}{'smem':>7}"
    print(header + f"{'LDG.128':>9}{'STG.128':>9}{'instr/elem':>12}  verdict")
    unfit = 0
    for u, streaming in all_configurations():
        complaints = u.complaints(streaming)
        unfit += bool(complaints)
        loop = f"{u.instructions_per_element:.2f}" if u.elements_per_thread else "-"
        print(
            f"{u.kernel:34}{u.config:32}{u.sm:4}{u.registers:6}{u.spills:8}{u.shared_bytes:7}"
            f"{u.loads_128:9}{u.stores_128:9}{loop:>12}  {'; '.join(complaints) or 'fit'}"
        )
    size = TOKENS * WIDTH * 2
    print(f"\nEstimates (not measured) for an H100 at {H100_BYTES_PER_S / 1e12} TB/s, bf16 logits")
    print(f"[{TOKENS}, {WIDTH}]: forward {size / H100_BYTES_PER_S * 1e6:.0f} µs, ", end="")
    print(f"backward {2 * size / H100_BYTES_PER_S * 1e6:.0f} µs at full bandwidth")
    return unfit


def on_gpu() -> None:
    """Measure everything on the current CUDA device."""
    bandwidth, rate = _copy_bandwidth(), _matmul_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"measured copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s\n")
    print(f"{'operation':44}{'side':16}{'ms':>9}{'roofline':>10}{'MiB':>9}{'max error':>11}")
    for tokens in (4096, 16_384, 65_536):
        for tp in (1, 8):
            width = VOCAB // tp
            if tokens * width * 2 <= torch.cuda.get_device_properties(0).total_memory / 8:
                _token_logprob(tokens, width, bandwidth)
            _linear_logprob(tokens, width, rate)
        _policy_loss(tokens, bandwidth)


def _token_logprob(tokens: int, width: int, bandwidth: float) -> None:
    from megatron_cgrpo.kernels.token_logprob import token_logprob

    logits = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, width, (tokens,), device="cuda")

    def plain(x: torch.Tensor, t: torch.Tensor = targets) -> tuple[torch.Tensor, torch.Tensor]:
        lsm = torch.log_softmax(x.float(), -1)
        picked = lsm.gather(1, t[:, None])[:, 0]
        return picked, -(lsm.exp() * lsm).sum(-1)

    sides = {
        "ours": lambda x: token_logprob(x, targets),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    slice_ = logits[:CHECKED].double().requires_grad_()
    exact = torch.log_softmax(slice_, -1).gather(1, targets[:CHECKED, None])[:, 0]
    (exact_grad,) = torch.autograd.grad(exact.sum(), slice_)
    size = tokens * width * 2
    for name, side in sides.items():
        error = (side(logits)[0][:CHECKED] - exact).abs().max().item()
        ms, mib = _time(lambda side=side: side(logits))
        _row(f"log-prob forward [{tokens}, {width}]", name, ms, size / bandwidth, mib, error)

        def both(side=side) -> torch.Tensor:
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(side(leaf)[0].sum(), leaf)[0]

        error = (both()[:CHECKED] - exact_grad).abs().max().item()
        total, mib = _time(both)
        what = f"log-prob backward [{tokens}, {width}]"
        _row(what, name, total - ms, 2 * size / bandwidth, mib, error)


def _linear_logprob(tokens: int, width: int, rate: float) -> None:
    from megatron_cgrpo.kernels.linear_logprob import linear_logprob_loss

    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    weight = torch.randn(width, HIDDEN, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, width, (tokens,), device="cuda")

    def ours(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_logprob_loss(h, w, targets, lambda logp, _, rows: -logp.sum())

    def plain(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((h @ w.t()).float(), targets, reduction="sum")

    sides: dict[str, Callable] = {"ours": ours}
    if tokens * width * 16 <= torch.cuda.get_device_properties(0).total_memory:
        sides["torch"] = plain
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        sides["liger"] = lambda h, w: LigerFusedLinearCrossEntropyFunction.apply(
            h, w, targets, None, None, -100, 0.0, 0.0, "sum"
        )[0]
    except ImportError:
        pass
    flops = 6 * tokens * HIDDEN * width
    few = hidden[:CHECKED].double().requires_grad_()
    wide = few @ weight.double().t()
    loss = torch.nn.functional.cross_entropy(wide, targets[:CHECKED], reduction="sum")
    (exact,) = torch.autograd.grad(loss, few)
    for name, side in sides.items():

        def once(side=side) -> torch.Tensor:
            leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
            return torch.autograd.grad(side(*leaves), leaves)[0]

        error = (once()[:CHECKED] - exact).abs().max().item()
        ms, mib = _time(once)
        _row(f"linear + loss [{tokens}, {width}]", name, ms, flops / rate, mib, error)


def _policy_loss(tokens: int, bandwidth: float) -> None:
    from megatron_cgrpo.config.schema import Algorithm
    from megatron_cgrpo.kernels.policy_loss import LossColumns, policy_loss, policy_loss_reference

    options = Algorithm()
    logp = -torch.rand(tokens, device="cuda") * 3
    columns = LossColumns(
        logp + 0.1,
        logp - 0.1,
        torch.randn(tokens, device="cuda"),
        torch.rand(tokens, device="cuda"),
        torch.rand(tokens, device="cuda") < 0.3,
        torch.ones(tokens, device="cuda", dtype=torch.bool),
    )
    # log-prob, old, entropy, advantage, weight and two flags in; one gradient out
    size = tokens * (5 * 4 + 2 + 4)
    exact = policy_loss_reference(logp, logp, columns, options)[0].item()
    for name, side in {"ours": policy_loss, "torch": policy_loss_reference}.items():

        def both(side=side) -> None:
            leaf = logp.detach().requires_grad_()
            torch.autograd.grad(side(leaf, logp, columns, options)[0], leaf)

        error = abs(side(logp, logp, columns, options)[0].item() - exact)
        ms, mib = _time(both)
        _row(f"policy loss [{tokens}]", name, ms, size / bandwidth, mib, error)


def _row(what: str, side: str, ms: float, best_s: float, mib: float, error: float) -> None:
    share = best_s * 1e3 / ms if ms > 0 else 0.0
    print(f"{what:44}{side:16}{ms:9.3f}{share:10.1%}{mib:9.0f}{error:11.1e}", flush=True)


def _time(action: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """(median milliseconds, peak MiB above what was allocated before)."""
    action()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2], (torch.cuda.max_memory_allocated() - before) / 2**20


def _copy_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms, _ = _time(lambda: target.copy_(source))
    return 2 * source.numel() / ms * 1e3


def _matmul_rate() -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ms, _ = _time(lambda: a @ a)
    return 2 * 8192**3 / ms * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--offline", action="store_true", help="compile only; needs no GPU")
    args = parser.parse_args()
    if args.offline:
        return 1 if offline() else 0
    if not torch.cuda.is_available():
        print("no GPU here: use --offline for what the kernels compile to")
        return 2
    on_gpu()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
