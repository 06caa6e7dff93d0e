"""`cgrpo data`: look at problem files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add(commands) -> None:
    data = commands.add_parser("data", help="look at problem files")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="can every gold answer be judged against?")
    check.add_argument("file", type=Path, help="problems, .jsonl or .parquet")
    check.add_argument("--kind", default="math", help="verifier of records that name none")
    check.add_argument("--question", nargs="*", default=[], help="field(s) of the question")
    check.add_argument("--answer", help="field of the gold answer")
    check.add_argument("--id", help="field of the problem's name")
    check.add_argument("--workers", type=int, default=os.cpu_count())
    check.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.config.schema import Fields
    from megatron_cgrpo.data.problems import load_problems
    from megatron_cgrpo.feedback.grade import check_problems

    fields = Fields(question=tuple(args.question), answer=args.answer, id=args.id)
    problems = load_problems(args.file, fields, args.kind)
    return check_problems(problems, Feedback(workers=args.workers))
