"""What a row of the table of renamings is: a key of another tool, what it is called here, and what becomes of its
value."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

UNSET: Final = object()
OFF: Final = (None, False, "None")
"""Values by which files say that a table is not there."""
ONE, REST, PRESENCE = "*", "**", "{}"


class Omitted(Exception):  # noqa: N818 (no error: a value that needs no key here)
    """The value has no key here, and needs none; the message, if any, is listed."""


class Refused(Exception):  # noqa: N818
    """The value has no counterpart, and the run would not be the same without it. The message says why."""


class Several(dict[str, Any]):
    """Values of several keys, by dotted path of ours."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a rule may look at besides the value."""

    tree: Mapping[str, Any]
    """The whole file, in the other tool's words."""
    place: tuple[int | str, ...]
    """Where the value is."""

    def get(self, path: str, default: Any = None) -> Any:
        """Value at a dotted path without lists."""
        return look(self.tree, path.split("."), default)

    def at(self, place: tuple[int | str, ...]) -> Context:
        return Context(self.tree, place)

    def entry(self, path: str, default: Any = None) -> Any:
        """The same, below the entry of a list that the value is in."""
        last = max((n for n, part in enumerate(self.place) if isinstance(part, int)), default=-1)
        return look(self.tree, [*self.place[: last + 1], *path.split(".")], default)


Rule = Callable[[Any, Context], Any]


def keep(value: Any, _: Context) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """One renaming."""

    theirs: str
    """Dotted path, with `[]` behind lists of tables. `*` is any one name, `**` all that is below, and `{}` at the end
    is the table itself, whatever is in it."""
    ours: str | None
    """Dotted path of ours, in the same way; where it has one `[]` more, every entry that has no value of its own gets
    it. None: no counterpart, for the reason `why`."""
    rule: Rule = field(default=keep, compare=False)
    why: str = ""
    subject: str = ""
    changes: bool = False
    """Without a counterpart: the run would learn something else, or compute elsewhere, so it is refused."""
    neutral: tuple[Any, ...] = ()
    """Values at which the key says nothing that is not so anyway (the other tool's default, mostly)."""
    default: Any = UNSET
    """What the other tool takes for the unset key, where ours takes something else."""
    where: str = ""
    """That default is written if the file has a table of this path."""
    versions: str = ""
    """Versions of the other tool that have it, where not all do."""


def row(theirs: str, ours: str, rule: Rule = keep, **more: Any) -> Row:
    return Row(theirs, ours, rule, **more)


def note(subject: str, theirs: str, why: str, *neutral: Any, versions: str = "") -> Row:
    """Has no counterpart, and what is learnt does not depend on it."""
    return Row(theirs, None, why=why, subject=subject, neutral=neutral, versions=versions)


def refused(subject: str, theirs: str, why: str, *neutral: Any, versions: str = "") -> Row:
    """Has no counterpart, and something else would be learnt, or it would run elsewhere."""
    return Row(theirs, None, why=why, subject=subject, changes=True, neutral=neutral, versions=versions)


def expanded(rows: Iterable[Row]) -> Iterator[Row]:
    """With a row for each name between braces: `a.{b,c}`."""
    for one in rows:
        for theirs in _alternatives(one.theirs):
            yield replace(one, theirs=theirs)


def moved(rows: Iterable[Row], theirs: tuple[str, str], ours: tuple[str, str] = ("", "")) -> Iterator[Row]:
    """The rows whose path begins with `theirs[0]`, which `theirs[1]` replaces; so for ours."""
    for one in rows:
        if one.theirs.startswith(theirs[0]):
            named = one.ours
            if named is not None and named.startswith(ours[0]):
                named = ours[1] + named[len(ours[0]) :]
            where = one.where and theirs[1] + one.where.removeprefix(theirs[0])
            yield replace(one, theirs=theirs[1] + one.theirs[len(theirs[0]) :], ours=named, where=where.rstrip("."))


def _alternatives(path: str) -> Iterator[str]:
    parts = [part.split(",") for part in re.split(r"\{([^}]+)\}", path)]
    pieces = [part if number % 2 else [",".join(part)] for number, part in enumerate(parts)]
    return map("".join, itertools.product(*pieces))


def look(node: Any, parts: Iterable[int | str], default: Any = None) -> Any:
    for part in parts:
        try:
            node = node[part]
        except (LookupError, TypeError):
            return default
    return node


class Table:
    """Rows by path."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(expanded(rows))
        self._exact = {one.theirs: one for one in reversed(self.rows)}
        patterns = [one for one in self.rows if ONE in one.theirs]
        self._patterns = [(_expression(one.theirs), one) for one in patterns]

    def find(self, path: str) -> tuple[Row, tuple[str, ...]] | None:
        """The row of a path, and what stands for its `*` and `**`. An exact one comes first, then the longest."""
        if path in self._exact:
            return self._exact[path], ()
        found = [(one, match.groups()) for expression, one in self._patterns if (match := expression.fullmatch(path))]
        return max(found, key=lambda entry: _closeness(entry[0].theirs), default=None)

    def has_below(self, path: str) -> bool:
        """Whether rows are of keys of this table, or list of tables, or of the table itself."""
        below = (f"{path}.", f"{path}[]")
        return any(one.theirs.startswith(below) or one.theirs == path + PRESENCE for one in self.rows)

    def knows(self, path: str) -> bool:
        """Whether a row is of this key, or of the table that it is in."""
        parts = path.split(".")
        ends = range(len(parts), 0, -1)
        return self.find(path + PRESENCE) is not None or any(self.find(".".join(parts[:end])) for end in ends)


def _closeness(theirs: str) -> tuple[int, int]:
    return len(theirs.replace(ONE, "")), -theirs.count(REST)


def _expression(theirs: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*)", theirs)
    return re.compile("".join({ONE: r"([^.\[\]]+)", REST: r"(.+)"}.get(piece, re.escape(piece)) for piece in pieces))
