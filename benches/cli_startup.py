"""How long the commands take that a user waits for: help, a mistake in a config, a dry run.

    python benches/cli_startup.py [--runs 5]

Each command is started anew, as from a shell, and timed until it has ended: wall time and, since a busy machine makes
that longer, CPU time of all its processes. For the dry run (the demo's config, with all its checks) the floor is
printed beside it: a Python that does nothing but import verifiers as the check of an environment does, without what no
environment has used yet (`primerl.envs.generations.deferred`); and one that imports it as it is.

Goals, of the median: 0.05 s for `primerl --help`, 0.3 s for `primerl rl --help`, 1 s until a config's mistake is named,
1.5 s for the dry run. Exits 1 when one is missed or a command does not do what it should.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = "examples/reverse-text/rl-ci.toml"
IMPORT_VERIFIERS = "import gc, os; gc.disable(); import verifiers.v1; os._exit(0)"
PREPARE_VERIFIERS = """
import gc, os
gc.disable()
from primerl.envs.generations import choice
choice.prepared("v1")
os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    name: str
    goal_s: float | None
    command: list[str]
    exit_code: int = 0
    says: str = ""


def cases(folder: Path) -> list[Case]:
    def primerl(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "primerl", *arguments]

    given = ["--model.path", str(folder / "model"), "--output-dir", str(folder / "run")]
    return [
        Case("primerl --help", 0.05, primerl("--help"), says="usage: primerl COMMAND"),
        Case("primerl rl --help", 0.3, primerl("rl", "--help"), says="Most used keys"),
        Case("primerl config explain", None, primerl("config", "explain", "trainer.optim.lr"), says="Peak learning"),
        Case("a mistake in a config", 1.0, primerl("rl", "@", RECIPE, "--max-stepz", "3"), 2, "did you mean"),
        Case("primerl rl --dry-run", 1.5, primerl("rl", "@", RECIPE, *given, "--dry-run"), says="everything checked"),
        Case("importing verifiers as env workers do", None, [sys.executable, "-c", PREPARE_VERIFIERS]),
        Case("importing verifiers as it is", None, [sys.executable, "-c", IMPORT_VERIFIERS]),
    ]


def timed(case: Case) -> tuple[float, float]:
    """Wall and CPU seconds. Raises RuntimeError where the command did something else."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(case.command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, encoding="utf-8")
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != case.exit_code or case.says not in done.stdout + done.stderr:
        raise RuntimeError(f"{case.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(case: Case, runs: int) -> bool:
    timed(case)  # files and bytecode are read once
    walls, cpus = zip(*(timed(case) for _ in range(runs)), strict=True)
    goal = "" if case.goal_s is None else f"; goal {case.goal_s:g}"
    print(
        f"{case.name}: {median(walls):.2f} s in the median ({min(walls):.2f} to {max(walls):.2f}, {runs} runs{goal}), "
        f"{median(cpus):.2f} s of CPU; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
    return case.goal_s is None or median(walls) <= case.goal_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
        # In a process of its own: importing torch here would make every fork slower.
        make = "import sys, pathlib, primerl.models.tiny as t; t.write_model(pathlib.Path(sys.argv[1]), seed=0)"
        subprocess.run([sys.executable, "-c", make, f"{folder}/model"], check=True)
        held = [measure(case, arguments.runs) for case in cases(Path(folder))]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
