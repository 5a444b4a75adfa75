"""`primerl run logs`: what the processes of a run wrote, and write."""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from primerl.cli.run.common import natural, parser_of, with_run
from primerl.config.errors.fail import fail
from primerl.launch.secrets import note_of_run
from primerl.launch.slurm import jobs
from primerl.launch.supervise.lock import in_use
from primerl.process.redaction import redact
from primerl.runs.registry import Run

LINES = 50
LOOK_EVERY_S = 0.2
TAIL_BYTES = 1 << 20
PATTERNS = {
    "launcher": ["launcher", "job"],
    "inference": ["inference", "inference_*"],
    "env-worker": ["envs/*"],
    "env-server": ["envs/*"],
    "trainer": ["trainer", "trainer/node_*"],
}
"""Log files of the components that have several logs, or none of their name."""
COMPONENTS = ("launcher", "orchestrator", "inference", "trainer", "env-worker", "store")


def main(arguments: list[str]) -> int:
    parser = parser_of("logs", "Prints the ends of a run's logs, without values of secrets.")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until the run has ended")
    parser.add_argument(
        "-c",
        "--component",
        help=f"only of {', '.join(COMPONENTS)}, or of a log by its name in the run's folder logs/ (`envs/train/*`)",
    )
    parser.add_argument("--env", metavar="NAME", help="only of the env workers of this environment; NAME/N: of one")
    parser.add_argument(
        "-n",
        "--lines",
        "--tail",
        type=natural,
        help=f"last lines of each log ({LINES}; with --search all); 0 with -f: only new ones",
    )
    parser.add_argument("--all", action="store_true", help="all lines of each log")
    parser.add_argument("--search", metavar="TEXT", help="only lines that hold TEXT, in lower or upper case")
    parser.add_argument("--regex", action="store_true", help="TEXT is a regular expression")
    # Nothing is decorated here.
    parser.add_argument("-r", "--raw", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.lines == 0 and not chosen.follow:
        parser.error("argument -n: 0 lines are shown of nothing but what is new (-f); give a number from 1 up")
    return with_run(parser, arguments, _logs, needs_folder=True)


def _pattern(chosen: argparse.Namespace) -> re.Pattern[str] | None:
    """What a line has to hold. Raises re.error."""
    if chosen.search is None:
        return None
    return re.compile(chosen.search if chosen.regex else re.escape(chosen.search), re.IGNORECASE)


def _logs(run: Run, chosen: argparse.Namespace) -> int:
    folder, component = run.output_dir / "logs", chosen.component
    if chosen.env is not None:
        name, _, number = chosen.env.partition("/")
        component = f"envs/*/{name}/env_worker_{number or '*'}"

    def files() -> dict[str, Path]:
        # Links name logs that are there by their own names.
        paths = (path for path in sorted(folder.rglob("*.log")) if not path.is_symlink())
        found = {str(path.relative_to(folder).with_suffix("")): path for path in paths}
        return {name: path for name, path in found.items() if component is None or _is(name, component)}

    def goes_on() -> bool:
        return bool(chosen.follow) and (in_use(run.output_dir) or jobs.queued(run.output_dir) is not None)

    if not files() and not goes_on():
        there = sorted({str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.log")})
        known = f"; there are {', '.join(there)}" if there else "; it has none yet"
        hint = " (only a run that was started with -d has one)" if component == "launcher" else ""
        what = f" of {chosen.env or component!r}" if component else ""
        return fail(f"{folder} has no log{what}{hint}{known}", title="No logs")
    try:
        pattern = _pattern(chosen)
    except re.error as error:
        return fail(f"--search {chosen.search!r} is no regular expression: {error}; omit --regex", title="No logs")
    note_of_run(run.output_dir)
    every = chosen.all or (chosen.lines is None and pattern is not None)
    Printer(files, sys.maxsize if every else (LINES if chosen.lines is None else chosen.lines), pattern).run(goes_on)
    return 0


def _is(name: str, component: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS.get(component, [component]))


class Printer:
    """Prints whole lines, with the log's name before each where there are several."""

    def __init__(
        self, files: Callable[[], dict[str, Path]], lines: int, pattern: re.Pattern[str] | None = None
    ) -> None:
        self._files = files
        self._pattern = pattern
        self._lines = lines
        self._at: dict[str, int] = {}  # how far each was read
        self._last = ""

    def run(self, goes_on: Callable[[], bool]) -> None:
        while True:
            # Before what is there is read, so that the last words of a run that ends now are read.
            again = goes_on()
            for name, path in self._files().items():
                self._print(name, path, whole=again)
            sys.stdout.flush()
            self._lines = sys.maxsize  # a log that comes later is new from its beginning
            if not again:
                return
            time.sleep(LOOK_EVERY_S)

    def _print(self, name: str, path: Path, *, whole: bool) -> None:
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = self._at.get(name)
                if begin is None or begin > size:  # a run that started over
                    begin = _start_of_last(file.fileno(), size, self._lines)
                file.seek(begin)
                content = file.read()
        except OSError:
            return
        if whole:  # half a line is read when the rest is there
            content = content[: content.rfind(b"\n") + 1]
        self._at[name] = begin + len(content)
        lines = redact(content.decode(errors="replace")).splitlines()
        if self._pattern is not None:
            lines = [line for line in lines if self._pattern.search(line)]
        if lines and name != self._last and len(self._files()) > 1:
            print(f"==> {name} <==")
            self._last = name
        for line in lines:
            print(line)


def _start_of_last(descriptor: int, size: int, lines: int) -> int:
    """Where the last so many lines begin, of those within `TAIL_BYTES`."""
    if lines == sys.maxsize:
        return 0
    begin = max(0, size - TAIL_BYTES)
    content = os.pread(descriptor, size - begin, begin)
    wanted = content.splitlines(keepends=True)[-lines:] if lines else []
    return size - sum(map(len, wanted))
