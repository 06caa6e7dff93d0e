"""Writes the configuration reference: `python -m megatron_cgrpo.config.reference > FILE`."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megatron_cgrpo.config.load import section_of
from megatron_cgrpo.config.presets import METHODS
from megatron_cgrpo.config.schema import Config


def reference() -> str:
    """Every key with its type, default and meaning, as Markdown."""
    out = [
        "# Configuration",
        "",
        "`cgrpo train CONFIG.yaml [key.path=value …]`. Every key, its default and what it does. "
        "Unknown keys are refused. This page is written by "
        "`python -m megatron_cgrpo.config.reference`.",
        "",
        "## Methods",
        "",
        "A method fills the `algorithm` keys that the configuration leaves out.",
        "",
        "| method | " + " | ".join(METHODS) + " |",
        "|---|" + "---|" * len(METHODS),
    ]
    for key in sorted({k for preset in METHODS.values() for k in preset}):
        row = [f"`{preset[key]}`" if key in preset else "default" for preset in METHODS.values()]
        out.append(f"| `{key}` | " + " | ".join(row) + " |")
    for name, field in Config.model_fields.items():
        out += ["", f"## {name}", "", "| key | default | meaning |", "|---|---|---|"]
        out += _rows(section_of(field.annotation), f"{name}.")
    return "\n".join(out) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None and key != "trigger":
            rows += _rows(inner, f"{prefix}{key}.")
            continue
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{prefix}{key}` | {default} | {meaning} |")
    return rows


if __name__ == "__main__":
    print(reference(), end="")
