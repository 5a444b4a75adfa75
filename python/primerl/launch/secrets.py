"""What env workers get in their environment beside what all processes get: the user's secrets.

They go to the guard over its socket and from there into the worker's environment: no file of the run, no log and no
process list has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from primerl.config import resolve
from primerl.config.environment import Environment, EnvWorkerConfig
from primerl.config.load import ConfigError
from primerl.config.resolve import ProcessConfig
from primerl.config.rl import RLConfig
from primerl.redaction import note
from primerl.runs import secrets as stored

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of the run's own variables, such as its key.
RESERVED = "PRIMERL_"


def environment_of_workers(config: RLConfig, environment: str) -> dict[str, str]:
    """Variables of the env workers of one environment, by its name in the run: the stored secrets, and over them those
    of the run's files.

    Raises [`ConfigError`][primerl.config.load.ConfigError] where a file cannot be read, and StateError where the stored
    secrets cannot.
    """
    entries = [*config.orchestrator.train.env, *config.orchestrator.eval.env]
    return variables_of(entries, environment, config.env_files)


def variables_of(entries: Sequence[Environment], environment: str, env_files: Iterable[str]) -> dict[str, str]:
    """As [`environment_of_workers`][primerl.launch.secrets.environment_of_workers], of any environments."""
    ids = [entry.id.split("@", 1)[0] for entry in entries if entry.label == environment]
    known_as = [name for one in ids for name in (one.rsplit("/", 1)[-1], one)]
    return stored.of_environment(*known_as, environment) | read_files(env_files)


def with_variables(config: RLConfig, process: ProcessConfig) -> ProcessConfig:
    """An env worker with its environment's variables; any other process as it is."""
    if not isinstance(process.config, EnvWorkerConfig):
        return process
    return replace(process, variables=environment_of_workers(config, process.config.environment))


def read_files(files: Iterable[str]) -> dict[str, str]:
    """The variables of `.env` files; of a name that two have, the later file's.

    Raises [`ConfigError`][primerl.config.load.ConfigError] that names the file and the line, and shows no value.
    """
    found: dict[str, str] = {}
    for file in files:
        found |= read_file(file)
    note(found.values())
    return found


def read_file(file: str) -> dict[str, str]:
    from dotenv import dotenv_values
    from dotenv.parser import parse_stream

    path = Path(resolve.absolute(file))
    try:
        with path.open(encoding="utf-8") as stream:
            statements = list(parse_stream(stream))
    except FileNotFoundError:
        raise ConfigError(f"env_files: there is no file {path}; give the path of a file of NAME=value lines") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"env_files: {path} cannot be read: {reason}") from None
    for statement in statements:
        # Values that are left open over the end of a line begin where their name is; blank lines before do not count.
        text = statement.original.string
        line = statement.original.line + text[: len(text) - len(text.lstrip())].count("\n")
        where = f"env_files: {path}, line {line}"
        if statement.error:
            raise ConfigError(f"{where} cannot be read; write NAME=value, and quotes that are closed")
        if statement.key is None:
            continue
        if not NAME.fullmatch(statement.key):
            raise ConfigError(f"{where}: {statement.key!r} is no name of a variable; use letters, digits and '_'")
        if statement.key.startswith(RESERVED):
            raise ConfigError(f"{where}: {statement.key} is primerl's own; export it where primerl is started")
        if statement.value is None:
            raise ConfigError(f"{where}: {statement.key} has no value; write {statement.key}=value")
        if "\0" in statement.value:
            raise ConfigError(f"{where}: the value of {statement.key} has a null character, which no variable can hold")
    # With what `${NAME}` within values stands for.
    return {name: value for name, value in dotenv_values(path, encoding="utf-8").items() if value is not None}
