"""`primerl run validate FILE`: a start with `--dry-run`."""

from __future__ import annotations

from primerl.cli.run.common import parser_of
from primerl.cli.run.start import start_rl


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "validate",
        "Checks a config, its model and its environments, writes the resolved configs, and starts nothing: the same as "
        "`primerl rl @ FILE --dry-run`, which takes keys as well.",
        of_run=False,
    )
    parser.add_argument("file", metavar="FILE", help="a config of a run")
    chosen = parser.parse_args(arguments)
    return start_rl(["@", chosen.file.removeprefix("@"), "--dry-run"])
