"""`cgrpo grade`: verdicts on a file of responses."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add(commands) -> None:
    grade = commands.add_parser("grade", help="verdicts on a file of responses")
    grade.add_argument("file", type=Path, help='JSONL of {"id", "kind", "answer", "response"}')
    grade.add_argument("--out", type=Path, required=True, help="JSONL of verdicts")
    grade.add_argument("--workers", type=int, default=os.cpu_count())
    grade.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.feedback.grade import grade_file

    counts = grade_file(args.file, args.out, Feedback(workers=args.workers))
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    return 0
