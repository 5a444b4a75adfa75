"""Whole runs in tests: starting one, finding its processes, and seeing that none is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl._core import PrimerlError, inspect_run
from primerl.launch.supervise.trees import MARK, marked

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples" / "reverse-text"
# The smaller task of rl-ci.toml.
TASK = ["--letters", "a-j", "--min-length", "3", "--max-length", "6"]

SMALL = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16", "--orchestrator.max-async-level", "1")
"""Flags of runs that are killed: short steps, and nothing but training."""


def write_small(folder: Path) -> Path:
    """Random weights, for runs in which it does not matter what is learnt."""
    from primerl.models.tiny import TinyConfig, write_model

    write_model(folder, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    return folder


def until(condition: Callable[[], Any], timeout_s: float = 100.0, what: str = "it did not happen") -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.05)
    return result


def measured(output: Path) -> int:
    """How many rollouts of an evaluation are done."""
    try:
        return len(inspect_run(output, "evaluated")["rollouts"])
    except PrimerlError:
        return 0


def primerl(*arguments: str, code: int = 0) -> str:
    """What a command prints that ends with that exit code; of one that fails, its complaint too."""
    command = [sys.executable, "-m", "primerl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr if code else done.stdout


def fine_tune(folder: Path, *demonstrations: str) -> Path:
    """The supervised model the short recipe starts from. `demonstrations`: options of make_data.py."""
    data = folder / "data.jsonl"
    make = [sys.executable, str(EXAMPLE / "make_data.py"), "--output", str(data), "--rows", "9600", *TASK]
    subprocess.run([*make, *demonstrations], check=True, capture_output=True, timeout=60)
    arguments = ["--output-dir", str(folder / "sft"), "--max-steps", "300", "--data.path", str(data)]
    primerl("sft", "@", str(EXAMPLE / "sft.toml"), *arguments)
    return folder / "sft" / "weights" / "step_300"


def arguments_of(model: Path, output: Path, *more: str) -> list[str]:
    return ["@", str(EXAMPLE / "rl-ci.toml"), "--model.path", str(model), "--output-dir", str(output), *more]


def read_lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def column(output: Path, name: str) -> list[float]:
    return [float(line[name]) for line in read_lines(output / "metrics.jsonl")]


def steps_of(output: Path) -> list[int]:
    """Steps that were trained, in the order of `metrics.jsonl`."""
    return [line["step"] for line in read_lines(output / "metrics.jsonl")]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def has_learnt(output: Path) -> None:
    """A run of the short recipe, evaluated before and after."""
    reward = column(output, "reward/all/mean")
    assert len(reward) == 25
    assert mean(reward[-5:]) >= 0.75
    assert mean(reward[-5:]) - mean(reward[:2]) >= 0.15
    before, after = read_lines(output / "evals.jsonl")
    assert (before["version"], after["version"]) == (0, 25)
    assert after["metrics"]["exact"] > before["metrics"]["exact"]
    assert before["failed"] == after["failed"] == 0


@dataclass
class Started:
    """A run that goes on while the test does something to it."""

    launcher: subprocess.Popen[str]
    output: Path
    mark: str = ""

    def steps(self) -> int:
        return len(read_lines(self.output / "metrics.jsonl"))

    def note_mark(self) -> None:
        """Remembers the mark all its processes carry, to find them once their parents are gone."""
        pid = until(lambda: self.pid_of("orchestrator"), 60, "the orchestrator")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (entry,) = [entry for entry in variables if entry.startswith(f"{MARK}=".encode())]
        self.mark = entry.split(b"=", 1)[1].decode()

    def pid_of(self, name: str) -> int | None:
        """The process that reads `configs/<name>.toml`."""
        return find(str(self.output / "configs" / f"{name}.toml"))

    def guard(self) -> int | None:
        return find("guard.py", self.mark)

    def left(self) -> list[int]:
        return marked(self.mark)

    def ended(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and all output."""
        output, _ = self.launcher.communicate(timeout=timeout_s)
        return self.launcher.returncode, output

    def kill(self) -> None:
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.launcher.wait()
        if self.launcher.stdout is not None:
            self.launcher.stdout.close()
        if self.mark:
            until(lambda: self.left() == [], 60, "cleaning up")


def find(*words: str) -> int | None:
    """A process whose command line has all the words as (ends of) arguments."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if all(any(argument.endswith(word) for argument in arguments) for word in words):
            return int(entry)
    return None


def launch(model: Path, output: Path, *more: str, variables: dict[str, str] | None = None) -> Started:
    return start(output, *arguments_of(model, output, *more), variables=variables)


def start(output: Path, *arguments: str, variables: dict[str, str] | None = None) -> Started:
    """A run whose config says that its folder is `output`."""
    command = [sys.executable, "-m", "primerl", "rl", *arguments]
    launcher = subprocess.Popen(
        command,
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return Started(launcher, output)
