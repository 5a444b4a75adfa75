"""What the words share: a run found by its id, or a complaint."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from primerl.cli.arguments import parse
from primerl.config.complaint import fail
from primerl.runs.registry import Registry, Run, UnknownRunError
from primerl.runs.state import StateError

FAILED, BAD_INPUT = 1, 2


def parser_of(word: str, description: str, *, of_run: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"primerl run {word}", description=description, allow_abbrev=False)
    if of_run:
        parser.add_argument("id", metavar="ID", help="id of the run, the beginning of one, or its name")
    return parser


def with_run(
    parser: argparse.ArgumentParser, arguments: list[str], do: Callable[[Run, argparse.Namespace], int]
) -> int:
    """Calls `do` with the run that the arguments name; returns the exit code."""
    chosen = parse(parser, arguments)
    return chosen if isinstance(chosen, int) else of_run(chosen, do)


def of_run(chosen: argparse.Namespace, do: Callable[[Run, argparse.Namespace], int]) -> int:
    try:
        with Registry() as registry:
            run = registry.find(chosen.id)
        return do(run, chosen)
    except (UnknownRunError, StateError) as error:
        return fail(str(error), title="Nothing was done")


def can_go_on(run: Run) -> bool:
    """Whether its folder holds what `primerl run resume` needs."""
    from primerl.launch.preflight import never_began
    from primerl.train.step_folders import saved_steps

    folder = run.output_dir
    if run.kind == "sft":
        return bool(saved_steps(folder / "checkpoints"))
    # One that was stopped before it had begun begins.
    return (folder / "journal").is_dir() or (folder.is_dir() and never_began(folder))


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


def show(header: list[str], rows: list[list[Any]], *, right: tuple[int, ...] = ()) -> None:
    """A table on a terminal; plain columns, of which nothing is cut off, elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        from primerl.runs.tables import table

        print("\n".join(line.removeprefix("  ") for line in table(header, rows)))
        return
    shown = Table()
    for index, name in enumerate(header):
        shown.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console.print(shown)
