"""`primerl convert`: files of other tools as primerl's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.cli.arguments import CommandParser

if TYPE_CHECKING:
    from primerl.config.foreign.conversion import Conversion

TITLE = "Nothing was written"
IN_PART = 1
"""Exit code where keys are missing from it without which something else is learnt."""


def convert(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    from primerl.config.errors.fail import ConfigError, fail
    from primerl.config.foreign import conversion

    files = [file.removeprefix("@") for file in chosen.files if file != "@"]
    try:
        if not files:
            raise ConfigError("no file is named; give the paths of TOML files of another tool")
        made = conversion.of_files(files)
        if chosen.output is not None:
            _write(chosen.output, made.text)
    except ConfigError as error:
        return fail(str(error), title=TITLE)
    if chosen.output is None:
        print(made.text, end="")
    _report(made, chosen.output)
    return IN_PART if made.problems else 0


def parser() -> CommandParser:
    main = CommandParser(
        prog="primerl convert",
        description="Writes files of prime-rl, Hosted Training and verifiers as one file of primerl, with comments: "
        "what was translated, and which keys have no counterpart, and why.",
        epilog="`primerl rl @ FILE`, `sft @ FILE` and `eval @ FILE` read such files too. Exit codes: 0 all of it is "
        "translated, 1 it lacks keys without which something else is learnt, or it runs elsewhere, 2 nothing was "
        "written.",
    )
    main.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="TOML files: one, several that prime-rl would merge (the last counts the most), or those of its "
        "orchestrator, trainer and inference",
    )
    main.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write it there (a new file), and do not print it"
    )
    return main


def _write(output: Path, text: str) -> None:
    from primerl.config.errors.fail import ConfigError
    from primerl.config.process_files.files import write_text

    if output.exists():
        raise ConfigError(f"--output {output} is there already; name a new file, or remove it")
    try:
        write_text(output, text)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}; name another file") from None


def _report(made: Conversion, output: Path | None) -> None:
    where: Any = "the output" if output is None else output
    for problem in made.problems:
        print(problem, file=sys.stderr)
    print(f"{where}: {made.summary}", file=sys.stderr)
