"""A Hugging Face model directory, held against the plan of its family: from headers, no weights."""

from __future__ import annotations

from pathlib import Path

from megatron_cgrpo.conversion.config_json import shape_of
from megatron_cgrpo.conversion.plan import Entry, check_tensors, plan_for
from megatron_cgrpo.conversion.safetensors_io import HFCheckpoint, Spec, read_json


class ModelFiles:
    """The files of a model: its shape, the plan of its tensors, and where they are.

    Raises:
        ValueError, ConfigError: one sentence for whatever does not fit: no or a damaged
            config.json, an unsupported or quantised model, a file that is cut, absent or a Git
            LFS pointer, a tensor that is missing, has no place in the model, or another shape or
            no floating dtype.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = self.companions = Path(root)
        if not (self.root / "config.json").exists():
            raise ValueError(f"{root} holds no config.json")
        config = read_json(self.root / "config.json")
        if not isinstance(config, dict):
            raise ValueError(f"{self.root / 'config.json'} holds no JSON object")
        self.shape = shape_of(config)
        self.plan = plan_for(self.shape)
        self.checkpoint = HFCheckpoint(self.root)
        where = self.checkpoint.file_of
        check_tensors(self.plan, self.checkpoint.shapes(), self.root, self.shape, where)
        specs = self.checkpoint.specs()
        for name in (n for entry in self.plan for n in entry.hf_names):
            if not specs[name][1].is_floating_point:
                raise ValueError(f"{where(name)}: {name} is {specs[name][1]}, not a floating type")

    def get(self, entry: Entry):
        """The tensors of an entry."""
        return [self.checkpoint.get(n) for n in entry.hf_names]

    def specs(self) -> list[list[tuple[str, Spec]]]:
        """Names, shapes and dtypes of all tensors, those of an entry together."""
        specs = self.checkpoint.specs()
        return [[(n, specs[n]) for n in e.hf_names] for e in self.plan]
