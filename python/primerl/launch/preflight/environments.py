"""Whether the environments of a run can be used, each asked by the interpreter that its workers will have."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.config.schema.rl import RLConfig
from primerl.envs.generations import choice
from primerl.envs.generations.choice import TASKSETS
from primerl.envs.interface import Role, module_name
from primerl.launch.interpreters import lookup
from primerl.launch.preflight import checker
from primerl.launch.secrets import Variables
from primerl.process.import_path import located
from primerl.process.problems import Problem


@dataclass(frozen=True)
class Answer:
    """What `check_environments` says of one."""

    problem: str | None
    remark: str | None
    keys: Sequence[str] = ()
    """Keys of the environment's section that the problem is about."""


@dataclass(frozen=True)
class Wanted:
    """One environment of the run."""

    label: str
    python: str
    """Interpreter of its workers."""
    request: tuple[Any, ...]
    """As `check_environments` takes it."""


def of_run(config: RLConfig, variables: Variables) -> list[Wanted]:
    """Those with workers on this machine: a worker that joins checks its own where that is installed."""
    source = config.orchestrator
    trained = [
        one(entry, "train", entry.group_size or source.group_size, variables, entry.held_out)
        for entry in source.train.env
    ]
    measured = [one(entry, "eval", entry.rollouts_per_example, variables) for entry in source.eval.env]
    entries = [*source.train.env, *source.eval.env]
    return [found for found, entry in zip([*trained, *measured], entries, strict=True) if entry.num_workers]


def one(entry: lookup.Entry, role: Role, rollouts: int, variables: Variables, held_out: int = 0) -> Wanted:
    modules = [] if entry.metrics_port is None else ["prometheus_client"]
    known = (role, rollouts, entry.max_concurrent, modules, held_out)
    return Wanted(entry.label, lookup.of(entry), (entry.id, entry.arguments, variables[entry.label], *known))


def check_installed(entries: Iterable[lookup.Entry]) -> None:
    """Raises ConfigError where there is no module for an environment: that is known before verifiers, which takes
    seconds, is imported. Of this interpreter: others are asked themselves."""
    problems = []
    # One problem of one package, no matter how many environments use it.
    for entry in {entry.id: entry for entry in reversed(list(entries))}.values():
        name = module_name(entry.id)
        if entry.python is not None or not entry.num_workers or located(name) or located(f"{TASKSETS}.{name}"):
            continue
        if choice.claimed(entry.id) is not None:
            continue
        here = Path("environments") / name / "pyproject.toml"
        package = name.replace("_", "-")
        how = (
            f"`primerl env install {package}`"
            if here.is_file()
            else "for the examples: `pip install ./examples/<name>`"
        )
        problem = (
            f"environment {entry.id!r} cannot be imported: there is no module {name!r}; install its package ({how}) "
            "into this virtual environment"
        )
        problem = "; ".join([problem, *choice.unusable()])
        problems.append(_named(entry.label, problem))
    if problems:
        raise ConfigError.of(problems[::-1])


@contextlib.contextmanager
def checking(environments: list[Wanted], folder: Path) -> Iterator[Mapping[str, subprocess.Popen[str]]]:
    """A process of each interpreter, which imports verifiers already. `folder`: for as long as they run."""
    with contextlib.ExitStack() as started:
        processes = {}
        for python in dict.fromkeys(environment.python for environment in environments):
            if python == sys.executable:
                processes[python] = started.enter_context(checker.environments())
                continue
            variables = lookup.variables(python, folder / "package", dict(os.environ))
            running = checker.running(checker.ENVIRONMENTS, python=python, environment=variables)
            processes[python] = started.enter_context(running)
        yield processes


def problems(
    environments: list[Wanted],
    processes: Mapping[str, subprocess.Popen[str]],
    check_s: float,
    say: Callable[[str], None],
) -> list[Problem]:
    """What is wrong with them; prints what is worth knowing of the others."""
    found: list[Problem] = []
    for python, process in processes.items():
        asked = [environment for environment in environments if environment.python == python]
        request = json.dumps([environment.request for environment in asked], default=str)
        labels = [environment.label for environment in asked]
        verdicts = _verdicts(checker.ended(process, check_s, request), labels, check_s)
        if isinstance(verdicts, Problem):
            found.append(verdicts)
            continue
        for label, answer in zip(labels, verdicts, strict=True):
            if answer.problem is not None:
                found.append(_named(label, " ".join(answer.problem.split()), answer.keys))
            if answer.remark is not None:
                say(_named(label, answer.remark))
    # Entries of one environment may have one problem.
    return list(dict.fromkeys(found))


def _named(label: str, text: str, keys: Iterable[str] = ()) -> Problem:
    """`keys`: of the environment, which the text is about."""
    words = text if repr(label) in text else f"environment {label!r}: {text.removeprefix('environment ')}"
    return Problem(words, *keys, environment=label)


def _verdicts(
    done: subprocess.CompletedProcess[str] | None, labels: list[str], check_s: float
) -> list[Answer] | Problem:
    if done is None:
        return Problem(
            f"importing the environments ({', '.join(labels)}) did not end within timeouts.check_s = {check_s:g} s; "
            "raise it (and timeouts.start_s) where imports are slow; run `python -m primerl.envs.check ID` for each to "
            "see which takes so long, or hangs",
            "timeouts.check_s",
            "timeouts.start_s",
        )
    try:
        return [Answer(*answer) for answer in json.loads(done.stdout.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        return Problem(f"importing the environments ({', '.join(labels)}) ended the process: {checker.said(done)}")
