"""What the flags of a command line say: `--dotted.key VALUE`, `--dotted.key=VALUE`, `--switch`, `--no-switch`.

What a key takes, and not what a value looks like, decides how it is read: a value may begin with a dash, and one that
begins with two, or is empty, is given with `=`. Values stay text where the config's classes read text as well. `None`
leaves a key out.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, NamedTuple

from pydantic import BaseModel

from primerl.config.command_line import names_of
from primerl.config.fields import type_text
from primerl.config.keys import Key, look_up
from primerl.config.lines import Location
from primerl.config.load import ConfigError, dotted

SWITCHED = {"true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


class Flag(NamedTuple):
    """A flag that was read."""

    name: str
    """As it was given, `--ckpt.interval`."""
    place: Location
    value: Any


def read(cls: type[BaseModel], arguments: list[str]) -> list[Flag]:
    """All flags, in their order.

    Raises:
        ConfigError: A word belongs to no flag; a flag has no value, or one that cannot be read, or contradicts another.
    """
    words = deque(arguments)
    found: list[Flag] = []
    strays: list[str] = []
    switch = ""  # what the word before was, where that takes no value
    while words:
        name, equals, text = words.popleft().partition("=")
        if not name.startswith("--"):
            word = name + equals + text
            if switch:
                raise ConfigError(
                    f"{switch} {word}: a switch is true or false; give it alone, or --no-{switch.removeprefix('--')} "
                    "to turn it off (a config file is given as `@ FILE.toml`)"
                )
            strays.append(word)
            continue
        if not all(names_of(name)):
            raise ConfigError(f"{name}: no key has such a name; give --KEY VALUE")
        before = len(words)
        given = text if equals else None
        flag = _off(cls, name, given) or _on(cls, name, given, words)
        switch = name if flag.value is True and given is None and len(words) == before else ""
        found.append(flag)
    if strays:
        raise ConfigError(f"Unrecognized arguments: {' '.join(strays)}; a config file is given as `@ FILE.toml`")
    _check(found)
    return found


def _off(cls: type[BaseModel], name: str, text: str | None) -> Flag | None:
    """Of `--no-KEY`; None where it is none, or a key's own name begins so."""
    if not name.startswith("--no-") or look_up(cls, names_of(name)).kind != "unknown":
        return None
    given = f"--{name.removeprefix('--no-')}"
    key = look_up(cls, names_of(given))
    if key.kind == "unknown":
        return None
    _check_place(given, key)
    if text is not None:
        raise ConfigError(f"{name} takes no value; give {given} VALUE, or {name} alone")
    path = dotted(key.place)
    if key.kind == "any":
        return Flag(name, key.place, False)
    if key.sections and not key.is_optional:
        raise ConfigError(f"{name}: [{path}] is always there; --no- is for switches and optional sections")
    if not key.sections and bool not in key.shapes:
        leave_out = ", or None to leave it out" if key.is_optional else ""
        raise ConfigError(f"{name}: {path} is no switch ({type_text(key.annotation)}); give {given} VALUE{leave_out}")
    return Flag(name, key.place, None if key.sections else False)


def _on(cls: type[BaseModel], name: str, text: str | None, words: deque[str]) -> Flag:
    """The flag with its value, which is taken from the words that follow where it was not given with `=`."""
    key = look_up(cls, names_of(name))
    _check_place(name, key)
    more = deque[str]() if text is not None else words
    takes = bool not in key.shapes or (words and words[0] in (*SWITCHED, "None"))
    if more and takes and not more[0].startswith("--"):
        text = more.popleft()
    if text == "None":
        return Flag(name, key.place, None)
    return Flag(name, key.place, _value(name, key, text, more))


def _value(name: str, key: Key, text: str | None, words: deque[str]) -> Any:
    if key.kind != "known":
        return True if text is None else _guessed(text)
    if key.sections and list not in key.shapes:
        return _section(name, key, text)
    if bool in key.shapes:
        return True if text is None else SWITCHED.get(text, text)
    if list in key.shapes and str not in key.shapes:
        return _list(name, key, text, words)
    if text is None:
        raise ConfigError(f"{name} requires a value")
    if dict in key.shapes or (list in key.shapes and text.startswith("[")):
        return _json(name, text, dict if dict in key.shapes else list)
    return text


def _section(name: str, key: Key, text: str | None) -> Any:
    if text is None and (key.is_optional or isinstance(key.place[-1], int)):
        return {}
    if text is None or not text.startswith("{"):
        raise ConfigError(
            f"{name}: [{dotted(key.place)}] is a section; set keys of it, as in {name}."
            f"{key.first.replace('_', '-')} VALUE"
        )
    return _json(name, text, dict)


def _list(name: str, key: Key, text: str | None, words: deque[str]) -> Any:
    """JSON; or, of what is no tables, the entries as words."""
    if text is None:
        return []
    if text.startswith("["):
        return _json(name, text, list)
    if key.sections:
        raise ConfigError(
            f"{name}: a list of tables is given as JSON, as in {name} '[{{\"{key.first}\": ..}}]'; a key of one entry "
            f"as {name}.0.{key.first.replace('_', '-')} VALUE"
        )
    entries = [text] if text else []
    while words and not words[0].startswith("--"):
        entries.append(words.popleft())
    return entries


def _json(name: str, text: str, wanted: type[list[Any]] | type[dict[str, Any]]) -> Any:
    example = "'[..]'" if wanted is list else "'{\"key\": ..}'"
    try:
        found = json.loads(text)
    except ValueError as error:
        # Without the text, which may hold a key.
        raise ConfigError(f"{name}: the value is not valid JSON: {error}; give {name} {example}") from None
    if not isinstance(found, wanted):
        raise ConfigError(f"{name}: the value is no {'list' if wanted is list else 'table'}; give {name} {example}")
    return found


def _guessed(text: str) -> Any:
    """Of keys that are not ours: JSON where it is some."""
    try:
        found = json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
    return text if found is None else found


def _check_place(name: str, key: Key) -> None:
    path = dotted(key.place)
    flag = "--" + path.replace("_", "-")
    if key.kind == "below":
        raise ConfigError(f"{name}: {path} has no keys of its own ({type_text(key.annotation)}); give {flag} VALUE")
    if key.kind == "unnumbered":
        first = key.first.replace("_", "-")
        raise ConfigError(
            f"{name}: {path} is a list of tables; name an entry by its number, counted from 0, as in {flag}.0.{first}"
        )


def _check(flags: list[Flag]) -> None:
    """Which of two that contradict each other comes first would decide."""
    for flag in flags:
        for other in flags:
            if other.place[: len(flag.place)] != flag.place:
                continue
            is_below = len(other.place) > len(flag.place)
            if flag.value is None and (is_below or (flag.name.startswith("--no-") and other.name != flag.name)):
                raise ConfigError(
                    f"{flag.name} leaves [{dotted(flag.place)}] out, and {other.name} gives it; leave one of them out"
                )
            if isinstance(flag.value, list) and is_below:
                raise ConfigError(
                    f"{flag.name} gives the whole list, and {other.name} an entry of it; put the entry's keys into the "
                    "list"
                )
