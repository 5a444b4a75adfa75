"""Plain tables: columns as wide as their longest cell, so that a pipe and a narrow terminal lose nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from primerl.process.printing import printable

Cell = str | int | float | None


def text_of(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.3f}" if isinstance(cell, float) else printable(str(cell))


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """Numbers to the right, words to the left; a header without words is omitted."""
    cells = list(rows)
    written = [list(header)] if any(header) else []
    written += [[text_of(cell) for cell in row] for row in cells]
    widths = [max(len(line[column]) for line in written) for column in range(len(header))] if written else []
    numeric = [all(isinstance(row[column], int | float | None) for row in cells) for column in range(len(header))]

    def aligned(line: list[str]) -> str:
        columns = zip(line, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in columns).rstrip()

    return [f"  {aligned(line)}" for line in written]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def share(value: float) -> str:
    return f"{value:.1%}"
