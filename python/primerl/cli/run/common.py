"""What the words share: a run found by its id, or a complaint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from primerl.cli.arguments import CommandParser
from primerl.config.errors.fail import fail
from primerl.runs import served
from primerl.runs.registry import Registry, Run, UnknownRunError
from primerl.runs.state import StateError

FAILED, BAD_INPUT = 1, 2
STEPLESS = ("eval", "inference")
"""Kinds of runs that train no steps."""


def parser_of(word: str, description: str, *, of_run: bool = True) -> CommandParser:
    parser = CommandParser(prog=f"primerl run {word}", description=description, allow_abbrev=False)
    if of_run:
        parser.add_argument("id", metavar="ID", help="id of the run, the beginning of one, or its name")
    return parser


class _Output(argparse.Action):
    """`-o json`, as `prime` has it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.json = values == "json"


def add_json(parser: argparse._ActionsContainer, what: str = "print one JSON array") -> None:
    parser.add_argument("--json", action="store_true", help=f"{what}; also -o json")
    parser.add_argument("-o", "--output", action=_Output, choices=("table", "json"), help=argparse.SUPPRESS)


def natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def with_run(
    parser: CommandParser,
    arguments: list[str],
    do: Callable[[Run, argparse.Namespace], int],
    *,
    needs_folder: bool = False,
) -> int:
    """Calls `do` with the run that the arguments name; returns the exit code. `needs_folder`: of a run whose folder is
    gone it is only said that it is."""
    chosen = parser.parse_args(arguments)

    def unless_gone(run: Run, chosen: argparse.Namespace) -> int:
        said = gone(run)
        return do(run, chosen) if said is None else fail(said, title="Its folder is gone")

    return of_run(chosen, unless_gone if needs_folder else do)


def gone(run: Run) -> str | None:
    """The message about a run whose folder is gone, with what its store has; None for any other run."""
    from primerl.launch.resume.restoring import is_gone, what_is_stored

    return f"{run.id}: its folder {run.output_dir} is gone; {what_is_stored(run)}" if is_gone(run.output_dir) else None


def of_run(chosen: argparse.Namespace, do: Callable[[Run, argparse.Namespace], int]) -> int:
    try:
        with Registry(reading=True) as registry:
            run = registry.find(chosen.id)
        return do(run, chosen)
    except (UnknownRunError, StateError) as error:
        return fail(str(error), title="Nothing was done")


def can_go_on(run: Run) -> bool:
    """Whether its folder holds what `primerl run resume` needs."""
    from primerl.launch.preflight.output_folder import holds_checkpoint, never_began
    from primerl.launch.resume.going_back import whole_steps

    folder = run.output_dir
    if run.kind in ("inference", served.KIND):
        return folder.is_dir()
    if run.kind == "sft":
        return holds_checkpoint(folder)
    # One that was stopped before it had begun begins; one that has lost its journal goes back to a checkpoint.
    return (folder / "journal").is_dir() or bool(whole_steps(folder)) or (folder.is_dir() and never_began(folder))


def ago(seconds: float) -> str:
    """`3 min`, `2 h 5 min`, `4 d`."""
    minutes = int(max(0.0, seconds)) // 60
    if minutes < 1:
        return f"{int(max(0.0, seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show(
    header: list[str], rows: list[list[Any]], *, right: tuple[int, ...] = (), optional: tuple[int, ...] = ()
) -> None:
    """A table on a terminal; plain columns, of which nothing is cut off, elsewhere. `optional`: columns that are
    dropped, one after the other, where the terminal is too narrow for all."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        from primerl.runs.tables import table

        print("\n".join(line.removeprefix("  ") for line in table(header, rows)))
        return
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    columns = list(range(len(header)))
    for column in optional:
        if _width([header, *cells], columns) > console.width:
            columns.remove(column)
    shown = Table()
    for column in columns:
        shown.add_column(header[column], justify="right" if column in right else "left", overflow="fold")
    for row in cells:
        shown.add_row(*(Text(row[column]) for column in columns))
    console.print(shown)


def _width(rows: list[list[str]], columns: list[int]) -> int:
    """Width of a table with lines around its cells."""
    return sum(max(len(row[column]) for row in rows) + 3 for column in columns) + 1
