"""`cgrpo data`: look at problem files before a run does."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_cgrpo.config.schema import Data, Fields


def add(commands) -> None:
    data = commands.add_parser("data", help="look at problem files")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what is understood of them: layout, kinds, prompts")
    check = actions.add_parser("check", help="can every gold answer be judged against?")
    for action in (show, check):
        action.add_argument("file", nargs="+", help="files, patterns, directories (docs/data.md)")
        action.add_argument("--kind", default="math", help="verifier of records that name none")
        action.add_argument("--question", nargs="*", default=[], help="field(s) of the question")
        action.add_argument("--answer", help="field of the gold answer")
        action.add_argument("--id", help="field of the problem's name")
        action.add_argument("--workers", type=int, default=os.cpu_count())
    show.add_argument("--tokenizer", type=Path, help="directory of a model, to render prompts")
    show.add_argument("--system", help="system message of problems that bring none")
    show.add_argument("--prompt-file", help="text with {question}, as data.prompt_file")
    show.add_argument("--template", choices=("chat", "plain"), default="chat")
    show.set_defaults(run=run_show)
    check.set_defaults(run=run_check)


def _fields(args: argparse.Namespace) -> Fields:
    return Fields(question=tuple(args.question), answer=args.answer, id=args.id)


def run_show(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.data.problems import read_problems, shown
    from megatron_cgrpo.feedback.show import show_problems

    data = Data(
        path=tuple(args.file),
        template=args.template,
        system=args.system,
        prompt_file=args.prompt_file,
    )
    reading = read_problems(args.file, _fields(args), args.kind)
    options = Feedback(workers=args.workers)
    show_problems(reading, shown(args.file), data, options, args.tokenizer)
    return 0


def run_check(args: argparse.Namespace) -> int:
    from megatron_cgrpo.config.feedback import Feedback
    from megatron_cgrpo.data.problems import read_problems
    from megatron_cgrpo.feedback.grade import check_problems

    problems = read_problems(args.file, _fields(args), args.kind).problems
    return check_problems(problems, Feedback(workers=args.workers))
