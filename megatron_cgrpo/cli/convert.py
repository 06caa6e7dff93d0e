"""`cgrpo convert`: checkpoints between Hugging Face and Megatron."""

from __future__ import annotations

import argparse
import importlib

TOOLS = ("hf_to_megatron", "megatron_to_hf", "verify", "inspect")


def add(commands) -> None:
    convert = commands.add_parser("convert", help="checkpoints between Hugging Face and Megatron")
    convert.add_argument("tool", choices=TOOLS)
    convert.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the tool: see -h")
    convert.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from checkpoint_tools.common import run as run_tool

    tool = importlib.import_module(f"checkpoint_tools.{args.tool}")
    return run_tool(tool, args.arguments, prog=f"cgrpo convert {args.tool}")
