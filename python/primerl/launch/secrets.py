"""The user's secrets, which only env workers get in their environment.

They go to the guard over its socket and from there into the worker's environment: no file of the run, no log and no
process list has them. Of two the launcher knows what they are for: a tailnet's key (`tailnet`), and W&B's, which the
process of the monitors gets (`monitors`).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.config.errors.fail import ConfigError
from primerl.envs.tailnet import KEY_VARIABLE
from primerl.process.redaction import note
from primerl.runs import secrets as stored
from primerl.runs.registry import Registry
from primerl.runs.state import StateError

if TYPE_CHECKING:
    from primerl.config.process_files.files import ProcessConfig
    from primerl.config.schema.environment import Environment
    from primerl.config.schema.rl import RLConfig

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Prefix of the run's own variables, such as its key.
RESERVED = "PRIMERL_"


Variables = dict[str, dict[str, str]]
"""Variables of env workers, by their environment's name in the run."""


def of_workers(config: RLConfig) -> Variables:
    """The stored secrets, and over them those of the run's files, which are read once a start.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where one of them cannot be read.
    """
    return variables_of([*config.orchestrator.train.env, *config.orchestrator.eval.env], config.env_files)


def variables_of(entries: Sequence[Environment], env_files: Iterable[str]) -> Variables:
    """As [`of_workers`][primerl.launch.secrets.of_workers], of any environments."""
    # Commands that only list runs do without the classes of configs.
    from primerl.config.schema.environment import evaluation_label

    of_files = read_files(env_files)
    found: Variables = {}
    for label in {entry.label: None for entry in entries}:
        ids = [entry.id.split("@", 1)[0] for entry in entries if entry.label == label]
        known_as = [name for one in ids for name in (one.rsplit("/", 1)[-1], one)]
        # What validates an environment has its secrets.
        known_as += [one for entry in entries if entry.label == label and (one := getattr(entry, "validates", None))]
        # So has an evaluation of the same environment that had to get a name of its own.
        known_as += [
            entry.label
            for entry in entries
            if evaluation_label(entry.label) == label and entry.id.split("@", 1)[0] in ids
        ]
        try:
            found[label] = stored.of_environment(*known_as, label) | of_files
        except StateError as error:
            raise ConfigError.like(error) from None
    return found


def of_all(env_files: Iterable[str]) -> dict[str, str]:
    """What every environment has: the secrets that were stored for all, and over them those of the files.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where one of them cannot be read.
    """
    of_files = read_files(env_files)
    try:
        return stored.of_environment() | of_files
    except StateError as error:
        raise ConfigError.like(error) from None


def names_of_variables(variables: Variables) -> dict[str, list[str]]:
    """Names alone: env workers that join from other machines have to bring the values themselves. The key of a
    tailnet is for nodes of this machine."""
    return {label: sorted(values.keys() - {KEY_VARIABLE}) for label, values in variables.items()}


def with_variables(process: ProcessConfig, variables: Variables) -> ProcessConfig:
    """An env worker with its environment's variables; any other process as it is."""
    from primerl.config.schema.env_worker import EnvWorkerConfig

    if not isinstance(process.config, EnvWorkerConfig):
        return process
    return replace(process, variables=variables[process.config.environment])


def read_files(files: Iterable[str]) -> dict[str, str]:
    """The variables of `.env` files; of a name that two have, the later file's.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] that names the file and the line, and shows no
    value.
    """
    found: dict[str, str] = {}
    for file in files:
        found |= read_file(file)
    note(found.values())
    return found


def note_stored() -> None:
    """The stored ones; prints a warning where they cannot be read."""
    try:
        stored.note_all()
    except StateError as error:
        print(f"warning: secrets are not removed from what is shown: {error}", file=sys.stderr)


def note_of_run(folder: Path) -> None:
    """So that this process prints none of the secrets that the run in the folder may have: the stored ones, and those
    of its `env_files`. What cannot be read is skipped: it is no obstacle to looking at a run."""
    note_stored()
    for config, begun_in in _configs(folder.absolute()):
        try:
            files = tomllib.loads(config.read_text(encoding="utf-8")).get("env_files", [])
        except (OSError, ValueError):
            continue
        for file in files if isinstance(files, list) else []:
            with contextlib.suppress(ConfigError):
                note(read_file(os.fspath(begun_in / str(file))).values())


def _configs(folder: Path) -> Iterator[tuple[Path, Path]]:
    """What the run was given, with the folder that relative paths in it begin at."""
    with contextlib.suppress(StateError), Registry(reading=True) as registry:
        found = [run for run in registry.all() if run.output_dir == folder]
        yield from ((run.config, run.folder) for run in found)
    # Configs of a run that is not in the list: mostly started where the command is given.
    yield from ((folder / "configs" / name, Path.cwd()) for name in ("rl.toml", "eval.toml"))


def read_file(file: str) -> dict[str, str]:
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    path = Path(os.path.abspath(os.path.expanduser(file)))
    try:
        with path.open(encoding="utf-8") as stream:
            statements = list(parse_stream(stream))
    except FileNotFoundError:
        raise ConfigError.at(
            "env_files",
            f"there is no file {path}; give the path of a file of NAME=value lines, seen from here or from "
            "the folder of the config that names it",
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError.at("env_files", f"{path} cannot be read: {reason}") from None
    for statement in statements:
        # Values that are left open over the end of a line begin where their name is; blank lines before do not count.
        text = statement.original.string
        line = statement.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        where = f"{path}, line {line}"
        if statement.error:
            raise ConfigError.at("env_files", f"{where} cannot be read; write NAME=value, and quotes that are closed")
        if statement.key is None:
            continue
        if not NAME.fullmatch(statement.key):
            raise ConfigError.at(
                "env_files", f"{where}: {statement.key!r} is no name of a variable; use letters, digits and '_'"
            )
        if statement.key.startswith(RESERVED):
            raise ConfigError.at(
                "env_files", f"{where}: {statement.key} is primerl's own; export it where primerl is started"
            )
        if statement.value is None:
            raise ConfigError.at("env_files", f"{where}: {statement.key} has no value; write {statement.key}=value")
        if "\0" in statement.value:
            raise ConfigError.at(
                "env_files", f"{where}: the value of {statement.key} has a null character, which no variable can hold"
            )
    # With what `${NAME}` within values stands for.
    return {name: value for name, value in dotenv_values(path, encoding="utf-8").items() if value is not None}
