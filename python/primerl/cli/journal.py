"""`primerl trace` and `primerl buffer`: what the journal of a run holds, during the run or afterwards."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl.cli.arguments import CommandParser, count
from primerl.config.errors.fail import fail
from primerl.process.redaction import redacted

FAILED = 1
NUMBERED = ("rollout", "group", "step", "batch")


def trace(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl trace",
        description="Shows the journal of a run: a summary, or the events of one rollout, group or step (a batch is "
        "its step's). Nothing is written, and the run may be active.",
    )
    parser.add_argument("output_dir", type=Path, help="output folder of the run")
    parser.add_argument("what", nargs="?", choices=NUMBERED, help="what to show")
    parser.add_argument("number", nargs="?", type=natural, help="which one")
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument(
        "--idle", action="store_true", help="where trainer, engines and workers waited, and for what"
    )
    questions.add_argument("--dropped", action="store_true", help="what was sampled and not trained, by reason")
    questions.add_argument(
        "--check", action="store_true", help="play everything and check every invariant; exit code 1 if one is broken"
    )
    add_json(parser)
    chosen = parser.parse_args(arguments)
    flag = next((name for name in ("idle", "dropped", "check") if getattr(chosen, name)), None)
    if (chosen.what is None) != (chosen.number is None) or (chosen.what is not None and flag is not None):
        return fail(
            f"expected a folder, and one of: {', '.join(f'{name} NUMBER' for name in NUMBERED)}, --idle, --dropped, "
            f"--check; see primerl trace --help",
            title="No trace",
        )
    what = "step" if chosen.what == "batch" else chosen.what or flag or "summary"
    from primerl._core import inspect_run
    from primerl.process.printing import printable_lines
    from primerl.runs import trace as tables

    def show(answer: dict[str, Any]) -> None:
        print(printable_lines(getattr(tables, what)(answer)))

    code = tell(chosen, lambda: inspect_run(chosen.output_dir, what, chosen.number), show, title="No trace")
    return code if isinstance(code, int) else FAILED if code.get("broken") else 0


def buffer(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="primerl buffer",
        description="The difficulty buffer of a run as it is now: examples of each pool, epochs, movement by step.",
    )
    parser.add_argument("output_dir", type=Path, help="output folder of the run")
    parser.add_argument("--steps", type=count, default=10, help="number of the last steps to show (10)")
    parser.add_argument("--example", nargs=2, metavar=("ENV", "INDEX"), help="the history of one example")
    add_json(parser)
    chosen = parser.parse_args(arguments)
    environment, example = chosen.example or (None, None)
    if example is not None and not (example.isascii() and example.isdigit() and int(example) < 2**32):
        return fail(
            f"--example {environment} {example}: expected the example's number, counted from 0", title="No buffer"
        )
    from primerl._core import inspect_buffer
    from primerl.runs.buffer import show

    def ask() -> dict[str, Any]:
        answer = inspect_buffer(chosen.output_dir, environment, None if example is None else int(example))
        answer["steps"] = answer["steps"][-chosen.steps :]
        return answer

    code = tell(chosen, ask, lambda answer: print(show(answer)), title="No buffer")
    return code if isinstance(code, int) else 0


def natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**64):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def add_json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def tell(
    chosen: argparse.Namespace,
    ask: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    title: str,
) -> dict[str, Any] | int:
    """Prints the answer, for people or as JSON, and returns it; or the exit code after a complaint."""
    from primerl._core import PrimerlError
    from primerl.launch.secrets import note_of_run

    if not chosen.output_dir.is_dir():
        return fail(f"there is no folder {chosen.output_dir}; give the output_dir of a run", title=title)
    # Journals of versions in which env workers did not remove them.
    note_of_run(chosen.output_dir)
    try:
        answer: dict[str, Any] = redacted(ask())
    except PrimerlError as error:
        return fail(str(error), title=title)
    if chosen.json:
        print(json.dumps(answer, indent=2))
    else:
        show(answer)
    return answer
