"""Secrets of this user: values that env workers alone get, as variables of their environment.

`secrets/secrets.json` in the state folder, readable by its owner only: `{"all": {NAME: value}, "environments":
{environment: {NAME: value}}}`. Written whole, under a lock; a reader sees the file of before or of after.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl.process import redaction
from primerl.runs.state import StateError, private_folder, state_folder, write_private

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OURS = ("PRIMERL_",)
LONGEST = 128 * 1024
"""What Linux takes of one variable, with its name, in bytes (MAX_ARG_STRLEN)."""
Values = dict[str, str]
Content = dict[str, Any]


class SecretError(Exception):
    """A name or value cannot be kept. The message never holds a value."""


def check_name(name: str) -> None:
    """Raises SecretError."""
    if not NAME.fullmatch(name) or len(name) > 200:
        if "=" in name:
            # What follows is likely the value, which does not belong on a screen either.
            raise SecretError(
                "expected a name alone: a value on the command line is seen by everybody on this machine and kept in "
                "the shell's history; it is read from standard input, or asked for. Was it a real one, change it"
            )
        raise SecretError(f"{name!r} cannot name a variable; use letters, digits and _, and no digit first")
    if name.startswith(OURS):
        raise SecretError(f"{name}: names that begin with {OURS[0]} are primerl's own")


def check_environment(environment: str) -> None:
    if not environment.strip() or any(character.isspace() for character in environment):
        raise SecretError(f"{environment!r} is no environment; give its id (owner/name) or its name in the run")


def names(environment: str | None = None) -> list[str]:
    return sorted(_of(_read(), environment))


def environments() -> list[str]:
    """Environments that have secrets of their own."""
    return sorted(name for name, values in _read()["environments"].items() if values)


def put(name: str, value: str, environment: str | None = None) -> bool:
    """Returns whether it replaced one. Raises SecretError, StateError."""
    check_name(name)
    if not value:
        raise SecretError(f"{name}: the value is empty")
    if "\0" in value:
        raise SecretError(f"{name}: the value holds a null character, which no variable can")
    if len(f"{name}={value}".encode()) >= LONGEST:
        raise SecretError(f"{name}: the value is too long for a variable, which has at most {LONGEST // 1024} KiB")
    with _changed() as content:
        values = content["environments"].setdefault(environment, {}) if environment else content["all"]
        replaced = name in values
        values[name] = value
    return replaced


def remove(name: str, environment: str | None = None) -> bool:
    """Returns whether there was one."""
    with _changed() as content:
        found = _of(content, environment).pop(name, None) is not None
        if environment and not content["environments"].get(environment):
            content["environments"].pop(environment, None)
    return found


def of_environment(*known_as: str) -> Values:
    """Secrets of all environments, then of the one that goes by these names, the later ones first choice."""
    content = _read()
    found: Values = dict(content["all"])
    for name in known_as:
        found |= content["environments"].get(name, {})
    redaction.note(found.values())
    return found


def note_all() -> None:
    """So that no value of the store is printed by this process. Raises StateError."""
    content = _read()
    for values in (content["all"], *content["environments"].values()):
        redaction.note(values.values())


def _of(content: Content, environment: str | None) -> Values:
    found: Values = content["environments"].get(environment, {}) if environment else content["all"]
    return found


def _file() -> Path:
    return state_folder() / "secrets" / "secrets.json"


def _read() -> Content:
    file = _file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {"all": dict(content["all"]), "environments": dict(content["environments"])}
    except FileNotFoundError:
        return {"all": {}, "environments": {}}
    except OSError as error:
        raise StateError(f"{file} cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        # The parser's message would show what is in it.
        raise StateError(f"{file} is not as `primerl secret` writes it; delete it, and set them again") from None


@contextlib.contextmanager
def _changed() -> Iterator[Content]:
    folder = private_folder("secrets")
    try:
        lock = (folder / "lock").open("w", encoding="utf-8")
    except OSError as error:
        raise StateError(f"{folder} cannot be written to: {error}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = _read()
        yield content
        write_private(_file(), json.dumps(content, indent=1) + "\n")
