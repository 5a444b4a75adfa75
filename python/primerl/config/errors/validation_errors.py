"""What pydantic finds wrong with a config, in words that say what to write."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from primerl.config.command_line.arguments import Location, dotted
from primerl.config.command_line.flags import Key, look_up
from primerl.config.command_line.sources import Written
from primerl.config.errors import foreign_keys
from primerl.process.problems import ProblemError

NO_TABLE = ("model_type", "model_attributes_type", "dict_type")
NO_LIST = ("list_type", "tuple_type")
# A key that words of a plug-in begin with.
LEADING = re.compile(r"[a-z_]\w*(?:\[\d+\]|\.\w[\w-]*)*")


@dataclass(frozen=True, slots=True)
class Mistake:
    location: Location
    message: str
    is_missing: bool = False
    """There is nothing at the place."""
    of_section: bool = False
    """The message is about keys below the place."""
    keys: tuple[str, ...] = ()
    """These, dotted."""


def describe(
    error: ValidationError,
    cls: type[BaseModel],
    arguments: list[str] | None = None,
    own: Callable[[Location], Location] = lambda location: location,
) -> str:
    """One line a mistake: dotted field, where it was written, what is wrong, the nearest known name.

    Args:
        own: Where the user has written what the class has at a place.
    """
    written = Written(arguments or [])
    listed: set[Location] = set()
    problems = []
    for detail in error.errors(include_url=False):
        mistake = told(detail, cls, listed)
        location, message = own(mistake.location), mistake.message
        where = written.near(location) if mistake.is_missing else written.at(location)
        if mistake.of_section:
            location, message, where = _of_section(mistake, written, own, where)
        field = dotted(location)
        problems.append(f"{field}{where}: {message}" if field else f"{message}{where}")
    return "\n".join(problems)


def _of_section(
    mistake: Mistake, written: Written, own: Callable[[Location], Location], where: str
) -> tuple[Location, str, str]:
    """Place, words and where it was written: of the key that the words begin with, or of another whose value they
    tell."""
    message = mistake.message
    places = [own((*mistake.location, *_place(key))) for key in mistake.keys]
    if places and message.startswith(f"{mistake.keys[0]}: ") and written.at(places[0]):
        return places[0], message.removeprefix(f"{mistake.keys[0]}: "), written.at(places[0])
    return own(mistake.location), message, next(filter(None, map(written.at, places)), where)


def _keys_of(detail: ErrorDetails) -> tuple[str, ...]:
    """Keys that a message about a section is of; in the words of plug-ins, such as an engine's own checks, the key that
    they begin with."""
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, ProblemError) and error.keys:
        return error.keys
    named = LEADING.match(str(error or ""))
    return () if named is None else (named[0],)


def _place(name: str) -> Location:
    """The place of a key as messages write it; keys that are not ours may have dashes."""
    parts = re.sub(r"\[(\d+)\]", r".\1", name).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def told(detail: ErrorDetails, cls: type[BaseModel], listed: set[Location]) -> Mistake:
    """`listed`: sections whose keys a message has listed already."""
    key = look_up(cls, detail["loc"])
    # Entries of a list of values are no keys of a class.
    location = tuple(detail["loc"]) if key.kind == "below" else key.place
    kind, given = detail["type"], detail.get("input")
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return Mistake(location, _unknown(location, cls, listed, given))
    if kind == "missing":
        also = foreign_keys.added(other_names(cls), _names(location), given, is_missing=True)
        return Mistake(location, "missing; it has no default, so set it" + also, is_missing=True)
    if kind in NO_TABLE:
        message = _no_table(location, given)
    elif kind in NO_LIST:
        other = foreign_keys.first_of(other_names(cls), _names(location), given)
        if other is not None:
            return Mistake((*location, other[0]), f"no key here: {other[1]}")
        message = _no_list(key, given)
    also = foreign_keys.added(other_names(cls), _names(location), given, is_missing=False)
    if isinstance(given, dict | list | BaseModel):
        of_section = kind not in (*NO_TABLE, *NO_LIST)
        return Mistake(location, message + also, of_section=of_section, keys=_keys_of(detail) if of_section else ())
    if given is None or SecretStr in key.shapes:
        return Mistake(location, message + also)
    return Mistake(location, f"{message} (it is {_shown(given)}){also}")


def other_names(cls: type[BaseModel]) -> foreign_keys.Names:
    """What other programs call keys of the class, with what to write here."""
    names: foreign_keys.Names = getattr(cls, "foreign_keys", {})
    return names


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integers of more than some thousand digits
        return "a number of thousands of digits"


def _unknown(location: Location, cls: type[BaseModel], listed: set[Location], given: Any) -> str:
    reason = other_names(cls).get(_names(location))
    if reason is not None:
        return f"no key here: {reason}"
    from primerl.config.foreign import loading  # which reads files, and reports what is wrong with them

    reason = loading.hint(cls, location, given)
    if reason is not None:
        return f"no key here: {reason}"
    section, name = location[:-1], str(location[-1])
    known = look_up(cls, section).known
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    if not known or section in listed:
        return "unknown key"
    listed.add(section)
    return f"unknown key; known keys here: {', '.join(sorted(known))}"


def _no_table(location: Location, given: Any) -> str:
    name = _names(location)
    if location and isinstance(location[-1], int):
        return f"a table is expected for each entry; write its keys below [[{name}]]"
    if isinstance(given, list):
        return f"`{name}` is one table: write `[{name}]` instead of `[[{name}]]`"
    return f"a table is expected; write its keys below [{name}]"


def _no_list(key: Key, given: Any) -> str:
    name = _names(key.place)
    if key.sections and isinstance(given, dict):
        tables = [other for other, value in given.items() if other not in key.known and isinstance(value, dict)]
        inner = f".{tables[0]}" if tables else ""
        return f"`{name}` is a list: write `[[{name}]]` instead of `[{name}{inner}]`"
    if key.sections:
        return f"a list of tables is expected; write the keys of each below [[{name}]]"
    if isinstance(given, str | int | float) and tuple not in key.shapes:
        return f"a list is expected; write {json.dumps([given], ensure_ascii=False)}"
    return "a list is expected; write its values between [ and ]"


def _names(location: Location) -> str:
    return ".".join(part for part in location if isinstance(part, str))
