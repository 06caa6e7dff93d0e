"""Compare two checkpoints of either form: tensor by tensor and, where memory allows, logits."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch

from checkpoint_tools.common import open_checkpoint, progress_bar, run
from megatron_cgrpo.conversion.plan import parameter_count
from megatron_cgrpo.conversion.safetensors_io import nbytes

PROBE_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="checkpoint directory")
    parser.add_argument("b", type=Path, help="checkpoint directory")
    parser.add_argument("--hf", type=Path, help="config.json of a checkpoint that has none inside")
    parser.add_argument(
        "--no-logits", action="store_true", help="compare the tensors only, in little memory"
    )


def main(args: argparse.Namespace) -> int:
    """Compare; 0 when all tensors are the same bits, 1 when one differs."""
    a, b = (open_checkpoint(root, args.hf) for root in (args.a, args.b))
    if a.shape != b.shape:
        wrong = [f for f in vars(a.shape) if getattr(a.shape, f) != getattr(b.shape, f)]
        raise ValueError(f"the configurations of {args.a} and {args.b} differ in {wrong}")
    first = _compare(a, b)
    if not args.no_logits:
        _compare_logits(a, b)
    if first is None:
        print(f"equal: {sum(len(e.hf_names) for e in a.plan)} tensors, bit for bit")
        return 0
    print(f"different: {first}")
    return 1


def _compare(a, b) -> str | None:
    """The first difference, in words."""
    first = None
    with progress_bar("comparing", sum(map(nbytes, a.specs()))) as advance:
        for entry, group in zip(a.plan, a.specs()):
            for name, x, y in zip(entry.hf_names, a.get(entry), b.get(entry)):
                if first is None and x.dtype != y.dtype:
                    first = f"{name} is {x.dtype} in {a.root} and {y.dtype} in {b.root}"
                elif first is None and not torch.equal(_bits(x), _bits(y)):
                    # A NaN where the other has none is the largest difference.
                    gap = (x.float() - y.float()).abs()
                    place = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)]
                    first = f"{name}, by up to {gap.max():.3g} at {place}"
            advance(nbytes(group))
    return first


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaNs equal themselves, and 0 is not -0."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _compare_logits(a, b) -> None:
    """Print the largest difference of transformers' logits (float32) on a fixed sequence."""
    need = 4.8 * parameter_count(a.shape)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need > have:
        print(f"logits not compared: {need / 2**30:.0f} GiB needed, {have / 2**30:.0f} GiB free")
        return
    gap = (_logits(a) - _logits(b)).abs().max().item()
    print(f"logits differ by at most {gap:.3g}")


@torch.no_grad()
def _logits(model) -> torch.Tensor:
    """[PROBE_TOKENS, vocabulary], float32, of transformers' model with these tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(model.companions)
    with no_init_weights():
        reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = reference.state_dict()
    for entry in model.plan:
        for name, tensor in zip(entry.hf_names, model.get(entry)):
            _place(state, name).copy_(tensor)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.shape.vocab, (1, PROBE_TOKENS), generator=generator)
    return reference(ids).logits[0]


def _place(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Where transformers' model holds a stored tensor: since release 5 experts are fused in it."""
    expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if name in state or expert is None:
        return state[name]
    experts, number, kind = expert.groups()
    if kind == "down":
        return state[f"{experts}.down_proj"][int(number)]
    gate, up = state[f"{experts}.gate_up_proj"][int(number)].chunk(2)
    return gate if kind == "gate" else up


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
