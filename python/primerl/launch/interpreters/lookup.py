"""Environments with an interpreter of their own: which one, what it must have, and how a process is started with it.

Such a process imports `primerl` from the files of this package, through a folder that holds nothing but a link to it:
neither a wheel of primerl has to be installed there, nor is what is installed here in its way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.environment import EvaluationEnvironment, Interpreter, TrainEnvironment, Workers
from primerl.config.schema.evaluation import MeasuredEnvironment
from primerl.launch import secrets
from primerl.launch.interpreters import virtualenvs
from primerl.process.problems import Problem

PACKAGE = Path(__file__).resolve().parents[2]
LOOK_S = 60.0
LOOK = """
import json, sys, sysconfig
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
print(json.dumps([list(sys.version_info[:2]), sys.implementation.name, free]))
"""
OLDEST = (3, 11)


Entry = EvaluationEnvironment | MeasuredEnvironment | TrainEnvironment


def provided(entries: Iterable[Entry], install_s: float, say: Callable[[str], None]) -> None:
    """Installs what environments ask for, and looks whether their interpreters can run workers.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] with every problem, one a line.
    """
    problems: list[Problem] = []
    for entry in entries:
        name, python = entry.label, entry.python
        if python is None or not entry.num_workers:
            continue
        try:
            provide(python, install_s, say)
        except ConfigError as error:
            problems += [about_environment(name, problem) for problem in error.problems]
    if problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))


def about_environment(label: str, problem: Problem) -> Problem:
    """Keys of the problem are those of this environment."""
    return Problem(f"environment {label!r}: {problem}", *problem.keys, environment=label)


def provide(python: Interpreter, install_s: float, say: Callable[[str], None]) -> None:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] that names the key."""
    try:
        if python.requirements is not None:
            virtualenvs.install(python.requirements, install_s, say)
    except virtualenvs.InstallError as error:
        raise ConfigError.at("python.requirements", str(error)) from None
    check(interpreter(python))


def of(workers: Workers) -> str:
    """The interpreter of an environment's workers."""
    return sys.executable if workers.python is None else interpreter(workers.python)


def interpreter(python: Interpreter) -> str:
    """Its path; of a virtualenv that is still to be made, where it will be."""
    if python.requirements is not None:
        return os.fspath(virtualenvs.installed(python.requirements) / "bin" / "python")
    # Not resolved: a virtualenv's interpreter is a link, and knows by its own path where it is.
    path = Path(files.absolute(python.path or ""))
    return os.fspath(path / "bin" / "python" if path.is_dir() else path)


def check(python: str) -> None:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] for what is no Python that primerl can be
    imported by."""
    hint = "give the path of the `python` of a virtualenv, or of the virtualenv's folder"
    if not os.access(python, os.X_OK):
        raise ConfigError.at("python.path", f"there is no interpreter {python}; {hint}")
    try:
        done = subprocess.run(
            [python, "-I", "-c", LOOK], capture_output=True, text=True, timeout=LOOK_S, check=True, encoding="utf-8"
        )
        version, implementation, is_free_threaded = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError.at("python.path", f"{python} failed: {said}; {hint}") from None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise ConfigError.at("python.path", f"{python} is no Python interpreter ({error}); {hint}") from None
    if tuple(version) < OLDEST or implementation != "cpython" or is_free_threaded:
        found = f"{implementation} {version[0]}.{version[1]}{' without the GIL' if is_free_threaded else ''}"
        raise ConfigError.at(
            "python.path", f"{python} is {found}; env workers need CPython 3.11 or newer, with the GIL"
        )


def equipped(entries: Iterable[Entry], process: ProcessConfig, variables: secrets.Variables) -> ProcessConfig:
    """An env worker with its environment's interpreter and variables; any other process as it is."""
    process = secrets.with_variables(process, variables)
    if not isinstance(process.config, EnvWorkerConfig):
        return process
    (entry,) = [entry for entry in entries if entry.label == process.config.environment]
    return process if entry.python is None else replace(process, python=interpreter(entry.python))


def variables(python: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process of that interpreter: its virtualenv is active, and `primerl` is found.

    Args:
        folder: Where the link to the package is put; it stays as long as the process runs.
    """
    link_package(folder)
    paths = [os.fspath(folder), *filter(None, [environment.get("PYTHONPATH")])]
    changed = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
    home = Path(python).parent.parent
    changed.pop("VIRTUAL_ENV", None)
    if (home / "pyvenv.cfg").is_file():
        changed["VIRTUAL_ENV"] = os.fspath(home)
        changed["PATH"] = os.pathsep.join([os.fspath(home / "bin"), *filter(None, [environment.get("PATH")])])
    return changed


def link_package(folder: Path) -> None:
    """`folder/primerl`, the only thing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / PACKAGE.name
    if link.is_symlink() and Path(os.readlink(link)) == PACKAGE:
        return
    with tempfile.TemporaryDirectory(prefix=".link-", dir=folder.parent) as temporary:
        made = Path(temporary) / PACKAGE.name
        made.symlink_to(PACKAGE)
        made.replace(link)
