"""What the flags of a command line say: `--dotted.key VALUE`, `--dotted.key=VALUE`, `--switch`, `--no-switch`.

What a key takes, and not what a value looks like, decides how it is read: a value may begin with a dash, and one that
begins with two, or is empty, is given with `=`. Values stay text where the config's classes read text as well. `None`
leaves a key out.
"""

from __future__ import annotations

import json
import types
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from primerl.config.command_line.arguments import WORDS, Location, dotted, names_of
from primerl.config.describe.fields import models, type_text
from primerl.config.errors.fail import ConfigError

Kind = Literal["known", "any", "unknown", "below", "unnumbered"]


@dataclass(frozen=True, slots=True)
class Key:
    """What was found."""

    place: Location
    """With the numbers of entries as numbers, and without the `type` that pydantic adds to the place of a section that
    is one of several. Of a place that leads nowhere, as far as it is known."""
    kind: Kind
    """`any`: below a table whose keys are not ours. `below`: the path continues below a key that has no keys.
    `unnumbered`: it continues below a list of tables, without the number of an entry."""
    annotation: Any = None
    """Annotation of the field; for an entry of a list, the section's class."""
    sections: tuple[type[BaseModel], ...] = ()
    """Whose keys may stand there; several to be chosen from by their `type`."""

    @property
    def shapes(self) -> set[Any]:
        """What it may be: `list[str] | None` -> list, None."""
        return shapes_of(self.annotation)

    @property
    def is_optional(self) -> bool:
        """Whether None may be given to unset it."""
        return type(None) in self.shapes

    @property
    def known(self) -> list[str]:
        """The keys that may stand below."""
        return list(dict.fromkeys(name for section in self.sections for name in section.model_fields))

    @property
    def first(self) -> str:
        """The one of them to begin with: that which has to be set."""
        required = (n for section in self.sections for n, field in section.model_fields.items() if field.is_required())
        return next(required, self.known[0])


def look_up(cls: type[BaseModel], parts: Sequence[int | str]) -> Key:
    """By names as Python has them; numbers of entries may be digits."""
    rest, place = list(parts), list[int | str]()
    annotation: Any = cls
    sections: tuple[type[BaseModel], ...] = (cls,)
    while rest:
        name = rest.pop(0)
        chosen = tuple(section for section in sections if len(sections) > 1 and _type_of(section) == name)
        if chosen:
            sections = chosen
            continue
        place.append(name)
        field = next((section.model_fields[str(name)] for section in sections if name in section.model_fields), None)
        if field is None:
            is_any = any(section.model_config.get("extra") == "allow" for section in sections)
            return Key((*place, *rest), "any" if is_any else "unknown")
        annotation, sections = field.annotation, tuple(models(field.annotation))
        shapes = shapes_of(annotation)
        if not rest:
            break
        if not sections:
            free = dict in shapes
            return Key((*place, *rest) if free else tuple(place), "any" if free else "below", annotation)
        if list in shapes:
            if not str(rest[0]).isdigit():
                return Key(tuple(place), "unnumbered", annotation, sections)
            place.append(int(rest.pop(0)))
        elif dict in shapes:
            place.append(rest.pop(0))
        if not rest and shapes & {list, dict}:
            annotation = sections[0]
    return Key(tuple(place), "known", annotation, sections)


def shapes_of(annotation: Any) -> set[Any]:
    """Each type of a union, a generic one without what it is of."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return shapes_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set[Any]().union(*map(shapes_of, get_args(annotation)))
    return {origin or annotation}


def _type_of(section: type[BaseModel]) -> Any:
    field = section.model_fields.get("type")
    return None if field is None else field.default


SWITCHED = {"true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


class Flag(NamedTuple):
    """A flag that was read."""

    name: str
    """The flag as it was given, `--ckpt.interval`."""
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
    """Reads `--no-KEY`; None for other flags, also if a key's own name begins with `no-`."""
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
        unset = ", or None to unset it" if key.is_optional else ""
        raise ConfigError(f"{name}: {path} is no switch ({type_text(key.annotation)}); give {given} VALUE{unset}")
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
        return json_of(name, text, dict if dict in key.shapes else list)
    return text


def _section(name: str, key: Key, text: str | None) -> Any:
    if text is None and (key.is_optional or isinstance(key.place[-1], int)):
        return {}
    if text is None or not text.startswith("{"):
        words = [f"`{name} {word}`" for flag, word in WORDS if flag == name]
        known = f" (or {', '.join(words)}: it is the only word that is known)" if words and text is not None else ""
        given = "" if text is None or not words else f" {text}"
        raise ConfigError(
            f"{name}{given}: [{dotted(key.place)}] is a section; set keys of it, as in {name}."
            f"{key.first.replace('_', '-')} VALUE{known}"
        )
    return json_of(name, text, dict)


def _list(name: str, key: Key, text: str | None, words: deque[str]) -> Any:
    """JSON; or, of what is no tables, the entries as words."""
    if text is None:
        return []
    if text.startswith("["):
        return json_of(name, text, list)
    if key.sections:
        raise ConfigError(
            f"{name}: a list of tables is given as JSON, as in {name} '[{{\"{key.first}\": ..}}]'; a key of one entry "
            f"as {name}.0.{key.first.replace('_', '-')} VALUE"
        )
    entries = [text] if text else []
    while words and not words[0].startswith("--"):
        entries.append(words.popleft())
    return entries


def json_of(name: str, text: str, wanted: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """The value of a flag. Raises ConfigError."""
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
    """Value of a key that is not ours: JSON, if it is valid JSON."""
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
                    f"{flag.name} unsets [{dotted(flag.place)}], and {other.name} gives it; omit one of them"
                )
            if isinstance(flag.value, list) and is_below:
                raise ConfigError(
                    f"{flag.name} gives the whole list, and {other.name} an entry of it; put the entry's keys into the "
                    "list"
                )
