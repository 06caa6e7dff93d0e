"""Hugging Face directories: reading single tensors, writing complete ones."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

# Files beside the weights that make a directory loadable by transformers and vLLM.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class HFCheckpoint:
    """Tensors of a directory of safetensors files, read one at a time.

    Raises:
        ValueError: a file that is no safetensors file, or an index naming an absent tensor.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._where: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        for path in sorted(self.root.glob("*.safetensors")):
            try:
                self._open[path] = safe_open(path, "pt")
            except (SafetensorError, OSError) as e:
                raise ValueError(f"{path} is not a complete safetensors file: {e}") from e
            self._where.update(dict.fromkeys(self._open[path].keys(), path))
        if not self._where:
            raise ValueError(f"{self.root} holds no tensors (*.safetensors)")
        index = self.root / "model.safetensors.index.json"
        if index.exists():
            for name, file in json.loads(index.read_text())["weight_map"].items():
                if name not in self._where:
                    raise ValueError(f"{index} names {name} in {file}, which does not hold it")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(self._open[p].get_slice(n).get_shape()) for n, p in self._where.items()}

    def get(self, name: str) -> torch.Tensor:
        return self._open[self._where[name]].get_tensor(name)


def write_hf(
    target: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    companions: Iterable[Path],
) -> Path:
    """Write a loadable directory: weights under a temporary name, renamed when complete.

    Args:
        target: directory to create; one that is there is replaced once the new one is complete.
        tensors: (HF name, tensor) pairs; written in files of at most ~4 GiB.
        companions: directories searched for configuration and tokenizer files, first hit wins.
    """
    target = Path(target)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        files, weight_map, total, dtypes = 0, {}, 0, set()
        chunk: dict[str, torch.Tensor] = {}

        def flush() -> None:
            nonlocal files
            files += 1
            name = f"model-{files:05d}.safetensors"
            try:
                save_file(chunk, partial / name, metadata={"format": "pt"})
            except SafetensorError as e:
                raise OSError(f"cannot write {partial / name}: {e}") from e
            weight_map.update(dict.fromkeys(chunk, name))
            chunk.clear()

        for name, tensor in tensors:
            chunk[name] = tensor.detach().to("cpu").contiguous()
            total += chunk[name].nbytes
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if sum(t.nbytes for t in chunk.values()) >= 4 << 30:
                flush()
        if chunk:
            flush()
        (partial / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        )
        sources = list(companions)
        for file in COMPANIONS:
            found = next((s / file for s in sources if (s / file).exists()), None)
            if found:
                shutil.copyfile(found, partial / file)
        _record_dtype(partial / "config.json", dtypes)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    return target


def _record_dtype(config: Path, dtypes: set[str]) -> None:
    """config.json must name the dtype of the tensors beside it, not that of where it came from."""
    if not config.exists() or len(dtypes) != 1:
        return
    settings = json.loads(config.read_text())
    # transformers 5 writes `dtype`, transformers 4 `torch_dtype`.
    settings["dtype" if "dtype" in settings else "torch_dtype"] = dtypes.pop()
    config.write_text(json.dumps(settings, indent=2) + "\n")
