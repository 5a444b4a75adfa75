"""Runs make's targets one after another, stops at the first that fails, and reports what each took.

    python3 scripts/stages.py TARGET...

The report ends with the slowest tests and with the closing line of each test runner. It reads the JUnit files that
pytest writes to .make/reports and needs nothing but Python's standard library: the first stages run before there is an
environment.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path(".make/reports")
SLOWEST = 20
LEFT_BEHIND_S = 5.0
# "===== 12 passed, 1 skipped in 3.21s =====" of pytest; "test result: ok. 12 passed; 0 failed; ..." of cargo.
PYTEST_END = re.compile(r"^(?:=+ )?(?:no tests ran|\d+ (?:passed|failed|error|skipped|deselected)\b.*) in [\d.]+s\b.*$")
CARGO_END = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored; .*$")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Stage:
    target: str
    seconds: float = 0.0
    code: int = 0
    pytest_ends: list[str] = field(default_factory=list)
    cargo_counts: list[tuple[int, int, int]] = field(default_factory=list)

    def read(self, line: str) -> None:
        """Keeps what a test runner says at its end."""
        plain = COLOUR.sub("", line).rstrip()
        if PYTEST_END.match(plain):
            self.pytest_ends.append(plain)
        elif counts := CARGO_END.match(plain):
            passed, failed, ignored = map(int, counts.groups())
            self.cargo_counts.append((passed, failed, ignored))

    def run(self) -> None:
        print(f"\n>>> stage {self.target}", flush=True)
        began = time.monotonic()
        command = [os.environ.get("MAKE", "make"), "--no-print-directory", self.target]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        rest = b""
        # By chunks: the dots of a running test suite are shown before their line ends.
        while chunk := chunk_of(process):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.read(line.decode(errors="replace"))
        self.read(rest.decode(errors="replace"))
        self.code = process.wait()
        self.seconds = time.monotonic() - began


def chunk_of(process: subprocess.Popen[bytes]) -> bytes:
    """What the stage prints next; empty at its end. A process that a test has left behind may hold the output open."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], LEFT_BEHIND_S)[0]:
        if process.poll() is not None:
            print("a process that the stage has started still holds its output open", flush=True)
            return b""
    return os.read(process.stdout.fileno(), 65536)


def durations(folder: Path) -> list[tuple[float, str]]:
    """Seconds of each test with its setup and teardown, the slowest first."""
    found = []
    for file in sorted(folder.glob("*.xml")):
        try:
            suites = ElementTree.parse(file).getroot()
        except ElementTree.ParseError:
            continue  # pytest was killed while it wrote it
        for case in suites.iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            found.append((float(case.get("time", 0)), name))
    return sorted(found, reverse=True)


def report(stages: list[Stage], folder: Path) -> None:
    print("\n>>> seconds per stage")
    for stage in stages:
        print(f"{stage.seconds:8.1f}  {stage.target}{'' if stage.code == 0 else '  FAILED'}")
    print(f"{sum(stage.seconds for stage in stages):8.1f}  in all")
    if slowest := durations(folder)[:SLOWEST]:
        print(f"\n>>> the {len(slowest)} slowest tests, in seconds")
        for seconds, name in slowest:
            print(f"{seconds:8.1f}  {name}")
    print("\n>>> results")
    for stage in stages:
        if stage.cargo_counts:
            passed, failed, ignored = map(sum, zip(*stage.cargo_counts, strict=True))
            result = "FAILED" if failed else "ok"
            print(f"test result: {result}. {passed} passed; {failed} failed; {ignored} ignored ({stage.target})")
        for line in stage.pytest_ends:
            print(line)


def main(targets: list[str]) -> int:
    if not targets:
        print(__doc__, file=sys.stderr)
        return 2
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    done: list[Stage] = []
    for target in targets:
        stage = Stage(target)
        done.append(stage)
        try:
            stage.run()
        finally:
            if stage.code or target == targets[-1]:
                report(done, REPORTS)
        if stage.code:
            print(f"\nstage {target} failed after {stage.seconds:.0f} s; run it alone with: make {target}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
