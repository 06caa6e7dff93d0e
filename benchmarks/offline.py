"""Compiling the Triton kernels for GPUs that are not here, and reading what came out.

A stub driver lets Triton specialise and compile for any architecture; the bundled cuobjdump and
nvdisasm tell registers, spills, shared memory and instructions of the machine code.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Triton 3.9 asks for a decision; fused multiply-adds are what the kernels are written for.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import MockTensor  # noqa: E402

from megatron_cgrpo.kernels import policy_loss_triton as loss_kernels  # noqa: E402
from megatron_cgrpo.kernels import token_logprob_triton as logprob_kernels  # noqa: E402

ARCHITECTURES = (90, 100)
SHARED_LIMIT = 227 * 1024
REGISTER_FILE = 65_536
# Qwen2.5/3's vocabulary at TP8, 16k tokens.
TOKENS, WIDTH = 16_384, 151_936 // 8
MAX_INSTRUCTIONS_PER_ELEMENT = 10.0


class _StubDriver:
    """Pretends that a GPU of one architecture is there, for compiling only."""

    def __init__(self, sm: int) -> None:
        self._sm = sm

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._sm, 32)

    def get_current_device(self) -> int:
        return self._sm  # a compile cache of its own for each architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} needs a real GPU")


@dataclass(frozen=True)
class Usage:
    """Resources of one compiled kernel."""

    kernel: str
    config: str
    sm: int
    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int
    spills: int
    loads_128: int
    stores_128: int
    loop_instructions: int
    elements_per_thread: int

    @property
    def instructions_per_element(self) -> float:
        return self.loop_instructions / self.elements_per_thread if self.elements_per_thread else 0

    def complaints(self, streaming: bool) -> list[str]:
        """What makes this configuration unfit; empty for a good one."""
        found = []
        if self.spills or self.local_bytes:
            found.append(f"{self.spills} spill instructions, {self.local_bytes} B of local memory")
        if self.shared_bytes > SHARED_LIMIT:
            found.append(f"{self.shared_bytes} B of shared memory")
        if self.registers * self.threads > REGISTER_FILE:
            found.append(f"{self.registers} registers × {self.threads} threads")
        if streaming and not self.loads_128:
            found.append("no 16-byte loads")
        if self.elements_per_thread and (
            self.instructions_per_element > MAX_INSTRUCTIONS_PER_ELEMENT
        ):
            found.append(f"{self.instructions_per_element:.1f} instructions per element")
        return found


def compile_stats(
    sm: int, config: dict[str, int], width: int = WIDTH, masked: bool = False
) -> Usage:
    """`token_logprob` forward, bf16 logits, which may hold −inf with `masked`."""
    bf16, f32, i64 = (MockTensor(d) for d in (torch.bfloat16, torch.float32, torch.int64))
    kernel = _warm_up(
        sm,
        logprob_kernels.stats_kernel,
        (bf16, i64, f32, width, TOKENS, width, 3 * width, 1 / 0.7),
        {**config, "FAST": True, "MASKED": masked},
        (TOKENS,),
    )
    per_thread = config["LANES"] * config["VEC"] // (32 * config["num_warps"])
    name = f"token_logprob forward{' masked' if masked else ''}"
    # The instruction limit is for the kernel of the hot path, which sees no −inf.
    return _usage(name, config, sm, kernel, 0 if masked else per_thread)


def compile_gradient(sm: int, config: dict[str, int], entropy: bool = True) -> Usage:
    """`token_logprob` backward, bf16 logits, with or without the entropy's gradient."""
    bf16, f32, i64 = (MockTensor(d) for d in (torch.bfloat16, torch.float32, torch.int64))
    arguments = (bf16, bf16, i64, f32, f32, f32, f32, WIDTH, WIDTH, WIDTH, WIDTH, 0, 1 / 0.7)
    kernel = _warm_up(
        sm,
        logprob_kernels.gradient_kernel,
        arguments,
        {**config, "ENTROPY": entropy, "FAST": True},
        (TOKENS, triton.cdiv(WIDTH, config["BLOCK"])),
    )
    name = f"token_logprob backward{' + entropy' if entropy else ''}"
    return _usage(name, config, sm, kernel, 0)


def compile_loss(sm: int) -> Usage:
    """`policy_loss` with every option on."""
    f32, u8 = MockTensor(torch.float32), MockTensor(torch.uint8)
    config = {"BLOCK": loss_kernels.BLOCK, "num_warps": loss_kernels.WARPS}
    kernel = _warm_up(
        sm,
        loss_kernels.loss_kernel,
        (*[f32] * 7, u8, u8, f32, f32, f32, TOKENS, 0.8, 1.2, 3.0, -2.3, 0.1, 0.01, 2.0, 20.0),
        {
            **config,
            "DUAL": True,
            "CLIP_REFINEMENTS": True,
            "KL": True,
            "ENTROPY": True,
            "CAP": True,
            "PARTIALS": loss_kernels.PARTIALS,
        },
        (TOKENS // loss_kernels.BLOCK,),
    )
    return _usage("policy_loss", config, sm, kernel, 0)


def all_configurations() -> Iterator[tuple[Usage, bool]]:
    """Every configuration that can be launched, on every architecture, and whether it streams."""
    for sm in ARCHITECTURES:
        for config in logprob_kernels.FORWARD_CONFIGS:
            yield compile_stats(sm, config), True
            yield compile_stats(sm, config, masked=True), True
        for config in logprob_kernels.BACKWARD_CONFIGS:
            yield compile_gradient(sm, config, entropy=False), True
            yield compile_gradient(sm, config, entropy=True), True
        yield compile_loss(sm), False


def _warm_up(sm: int, kernel, arguments: tuple, options: dict[str, Any], grid: tuple):
    driver.set_active(_StubDriver(sm))
    return kernel.warmup(*arguments, grid=grid, **options)


def _usage(name: str, config: dict[str, int], sm: int, kernel, per_thread: int) -> Usage:
    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        told = subprocess.run(
            [os.path.join(tools, "cuobjdump"), "-res-usage", f.name], capture_output=True, text=True
        )
        sass = subprocess.run(
            [os.path.join(tools, "nvdisasm"), "-c", f.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told.stdout + told.stderr)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return Usage(
        name,
        " ".join(f"{k}={v}" for k, v in config.items()),
        sm,
        registers=int(found[1]),
        local_bytes=int(found[2]) + int(found[3]),
        shared_bytes=kernel.metadata.shared,
        threads=kernel.metadata.num_warps * 32,
        spills=count(r"\bSTL") + count(r"\bLDL"),
        loads_128=count(r"LDG\.E[\w.]*\.128"),
        stores_128=count(r"STG\.E[\w.]*\.128"),
        loop_instructions=_hot_loop(sass),
        elements_per_thread=per_thread,
    )


def _hot_loop(sass: str) -> int:
    """Instructions of the longest innermost loop."""
    instructions, labels, longest = [], {}, 0
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+|\.L_\d+):", line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if found:
            instructions.append(found[1])
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+|\.L_\d+)", found[1])
            if target and target[1] in labels:
                longest = max(longest, len(instructions) - labels[target[1]])
    return longest
