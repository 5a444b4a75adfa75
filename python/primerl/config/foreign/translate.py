"""From a file of another tool to the form of ours, by the table of renamings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from primerl.config.command_line.arguments import Location, dotted
from primerl.config.foreign.rows import OFF, ONE, PRESENCE, REST, UNSET, Context, Omitted, Refused, Row, Several, look
from primerl.config.foreign.table import Kind, leaves, table

NOT_KNOWN = "keys that are not known"


@dataclass(frozen=True, slots=True)
class Taken:
    """A key that has a counterpart."""

    theirs: Location
    ours: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A key that has none."""

    theirs: Location
    why: str
    subject: str


@dataclass(frozen=True, slots=True)
class Default:
    """What is written because an unset key means something else here."""

    ours: str
    value: Any
    why: str


@dataclass
class Translation:
    """What became of a file."""

    kind: Kind
    tree: dict[str, Any] = field(default_factory=dict)
    """In our form."""
    taken: list[Taken] = field(default_factory=list)
    notes: list[Left] = field(default_factory=list)
    """Without a counterpart; nothing that is learnt depends on them."""
    refused: list[Left] = field(default_factory=list)
    """Without a counterpart; the run would learn something else, or compute elsewhere."""
    defaults: list[Default] = field(default_factory=list)
    origins: dict[Location, Location] = field(default_factory=dict)
    """Place of a key of ours -> the place in the file that it came from."""

    def written_at(self, location: Location) -> Location:
        """Where the file has what became the key, or the table, at a place of ours; that place where it has none."""
        found = next((self.origins[place] for place in _above(location) if place in self.origins), None)
        if found is None and any(isinstance(part, int) for part in location):
            # An entry of a list: that which its keys are of.
            end = max(number for number, part in enumerate(location) if isinstance(part, int)) + 1
            inner = next((self.origins[own] for own in self.origins if own[:end] == location[:end]), ())
            found = next((place for place in _above(inner) if isinstance(place[-1], int)), None)
        if not found:
            return location
        return found[1:] if found[0] == self.kind.within else found


def translate(tree: dict[str, Any], kind: Kind) -> Translation:
    """Every key of the file, by the table; then what their program takes for unset keys, where ours takes something
    else. Nothing is read, and nothing is checked that ours checks itself."""
    return _Translator(with_underscores({kind.within: tree} if kind.within else tree), kind).made()


def with_underscores(tree: dict[str, Any]) -> dict[str, Any]:
    """The file with vLLM's options by one spelling: vLLM takes them with dashes or underscores."""
    inference = tree.get("inference")
    if not isinstance(inference, dict):
        return tree
    spelt = {
        name: {option.replace("-", "_"): value for option, value in inner.items()}
        for name, inner in inference.items()
        if name in ("vllm", "vllm_extra") and isinstance(inner, dict)
    }
    return {**tree, "inference": {**inference, **spelt}}


class _Translator:
    def __init__(self, tree: dict[str, Any], kind: Kind) -> None:
        self.source, self.table, self.result = tree, table(kind), Translation(kind)
        self.each: list[tuple[Row, list[str], Any, Location]] = []
        self.largest: dict[str, Any] = {}

    def made(self) -> Translation:
        self._walk(self.source, "", ())
        for path, value in self.largest.items():
            self._set(_parts(path), value, ())
        for one, parts, value, place in self.each:
            self._set_each(one, parts, value, place)
        self._defaults()
        return self.result

    def _walk(self, node: Any, path: str, place: Location) -> None:
        if isinstance(node, list) and node and all(isinstance(entry, dict) for entry in node):
            found = self.table.find(path)
            if found is not None and (REST in found[0].theirs or found[0].theirs == path):
                self._apply(found[0], found[1], node, place)
                return
            for number, entry in enumerate(node):
                self._walk(entry, f"{path}[]", (*place, number))
        elif isinstance(node, dict) and (node or self._is_table(path)):
            self._presence(path, node, place)
            whole = self._whole(node, path)
            if whole is not None:
                self._apply(whole[0], whole[1], node, place)
                return
            for name, inner in node.items():
                self._walk(inner, f"{path}.{name}" if path else name, (*place, name))
        elif not self._presence(path, node, place, only=True):
            self._leaf(node, path, place)

    def _is_table(self, path: str) -> bool:
        return self.table.has_below(path)

    def _presence(self, path: str, node: Any, place: Location, *, only: bool = False) -> bool:
        """The row of the table itself. `only`: it is a value in place of a table, and has no other row."""
        found = self.table.find(path + PRESENCE) if path else None
        if found is None or not found[0].theirs.endswith(PRESENCE) or (only and self.table.find(path) is not None):
            return False
        self._apply(found[0], found[1], node, place)
        return True

    def _whole(self, node: dict[str, Any], path: str) -> tuple[Row, tuple[str, ...]] | None:
        """The row that takes a table as it is: its own, or one of any name where no row is of a key below."""
        found = self.table.find(path) if path else None
        if found is None or found[0].theirs == path:
            return found
        if REST in found[0].theirs or not found[0].theirs.endswith(f".{ONE}"):
            return None
        below = (self.table.find(inner) for inner, _ in leaves(node, path))
        return found if all(other is None or other[0] is found[0] for other in below) else None

    def _leaf(self, value: Any, path: str, place: Location) -> None:
        found = self.table.find(path)
        if found is not None:
            self._apply(found[0], found[1], value, place)
            return
        if self.table.has_below(path):
            if value not in ({}, [], *OFF):
                self._refuse(place, "a table is expected there; correct it")
            return
        parent, _, name = path.rpartition(".")
        near = difflib.get_close_matches(name, self._known_in(parent), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        why = f"{self.result.kind.tool} has no such key in the versions known here{hint}"
        self.result.refused.append(Left(place, why, NOT_KNOWN))

    def _known_in(self, parent: str) -> list[str]:
        found = (one.theirs.removesuffix(PRESENCE).rpartition(".") for one in self.table.rows)
        return sorted({name for table, _, name in found if table == parent and ONE not in name})

    def _apply(self, one: Row, captures: tuple[str, ...], value: Any, place: Location) -> None:
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in one.neutral):
            return
        if one.ours is None:
            kept = self.result.refused if one.changes else self.result.notes
            kept.append(Left(place, one.why, one.subject))
            return
        try:
            made = one.rule(value, Context(self.source, place))
        except Omitted as omitted:
            if str(omitted):
                self.result.notes.append(Left(place, str(omitted), one.subject or _subject(place)))
            return
        except Refused as refused:
            self._refuse(place, str(refused), one.subject)
            return
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            # A rule reads the value as the type that the other tool takes.
            self._refuse(place, f"{self.result.kind.tool} takes no such value there; correct it", one.subject)
            return
        parts, left_over = _with_numbers(_ours(one, captures, place), place)
        if left_over:
            self.each.append((one, parts, made, place))
        elif isinstance(made, Several):
            self._set_several(made, parts, place)
        else:
            self._set(parts, made, place)
            self.result.taken.append(Taken(place, dotted(tuple(parts)), one.why))

    def _refuse(self, place: Location, why: str, subject: str = "") -> None:
        self.result.refused.append(Left(place, why, subject or _subject(place)))

    def _set_several(self, made: Several, parts: list[Any], place: Location) -> None:
        last = max((number for number, part in enumerate(parts) if isinstance(part, int)), default=-1)
        for path, value in made.items():
            if path.startswith("^"):
                self.largest[path[1:]] = max(value, self.largest.get(path[1:], value))
                continue
            relative = path.startswith("./")
            target = [*parts[: last + 1], *_parts(path[2:])] if relative else _parts(path)
            self._set(target, value, place)
            self.result.taken.append(Taken(place, dotted(tuple(target))))

    def _set(self, parts: list[Any], value: Any, place: Location) -> None:
        """Keys of a table that is there already are added; two values of one key are refused."""
        node: Any = self.result.tree
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            empty: Any = [] if isinstance(following, int) else {}
            if isinstance(part, int):
                while len(node) <= part:
                    node.append({})
            elif following is not None and part not in node:
                node[part] = empty
            if following is not None:
                node = node[part]
            if not isinstance(node, list if isinstance(following, int) else dict):
                self._refuse(place, f"{dotted(tuple(parts))} would be within what is no table; correct the file")
                return
        last, location = parts[-1], tuple(parts)
        if isinstance(last, int) or (value == {} and isinstance(node.get(last), dict)):
            return
        before = self.result.origins.get(location)
        if last in node and node[last] != value and before is not None and place[: len(before)] != before:
            why = f"{dotted(before)} gives {dotted(location)} another value, and there is one for both"
            self._refuse(place, why)
            return
        node[last] = value
        self.result.origins[location] = place

    def _set_each(self, one: Row, parts: list[Any], value: Any, place: Location) -> None:
        at = parts.index("[]")
        entries = look(self.result.tree, parts[:at], [])
        for number in range(len(entries)):
            target = [*parts[:at], number, *parts[at + 1 :]]
            if look(self.result.tree, target, UNSET) is UNSET:
                self._set(target, value, place)
        shown = dotted(tuple(part for part in parts if part != "[]"))
        self.result.taken.append(Taken(place, shown, one.why or "of each environment"))

    def _defaults(self) -> None:
        for one in self.table.rows:
            if one.default is UNSET or one.ours is None or "[]" in one.theirs:
                continue
            theirs = tuple(one.theirs.split("."))
            is_given = look(self.source, theirs, UNSET) is not UNSET
            has_table = not one.where or look(self.source, one.where.split("."), UNSET) not in (UNSET, *OFF)
            if is_given or not has_table:
                continue
            try:
                value = one.rule(one.default, Context(self.source, theirs))
            except (Omitted, Refused, TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
                continue  # another key of the file was refused already
            self._set_default(one, value)

    def _set_default(self, one: Row, value: Any) -> None:
        named = _ours(one, (), tuple(one.theirs.split(".")))
        values = value.items() if isinstance(value, Several) else [(named, value)]
        for path, given in values:
            for target in self._targets(_parts(path)):
                if look(self.result.tree, target, UNSET) is UNSET:
                    self._set(target, given, ())
                    self.result.origins.pop(tuple(target), None)
                    self.result.defaults.append(Default(dotted(tuple(target)), given, one.why))

    def _targets(self, parts: list[Any]) -> Iterator[list[Any]]:
        if "[]" not in parts:
            yield parts
            return
        at = parts.index("[]")
        for number in range(len(look(self.result.tree, parts[:at], []))):
            yield [*parts[:at], number, *parts[at + 1 :]]


def _ours(one: Row, captures: tuple[str, ...], place: Location) -> str:
    path = one.ours or ""
    name = next(str(part) for part in reversed(place) if isinstance(part, str))
    path = path + name if path == "" or path.endswith(".") else path
    for capture in captures:
        path = (
            path.replace(REST, capture, 1)
            if REST in path and path.find(REST) == path.find(ONE)
            else path.replace(ONE, capture, 1)
        )
    if path.startswith("inference.vllm."):
        # vLLM's options have dashes.
        path = "inference.vllm." + path.removeprefix("inference.vllm.").replace("_", "-")
    return path


def named(one: Row, theirs: Location) -> str:
    """What a key is called here, for a message."""
    return _ours(one, (), theirs).replace("[]", "").replace(f".{ONE}", "")


def _parts(path: str) -> list[Any]:
    parts: list[Any] = []
    for part in path.split("."):
        name, bracket, number = part.partition("[")
        parts.append(name)
        if bracket:
            parts.append("[]" if number == "]" else int(number[:-1]))
    return parts


def _with_numbers(path: str, place: Location) -> tuple[list[Any], bool]:
    """The path with the numbers of the entries that the value is in, and whether it has more lists than these."""
    numbers = iter(part for part in place if isinstance(part, int))
    parts = [next(numbers, "[]") if part == "[]" else part for part in _parts(path)]
    return parts, "[]" in parts


def _above(location: Location) -> Iterator[Location]:
    """The place, and those of the tables that it is in, the nearest first."""
    return (location[:end] for end in range(len(location), 0, -1))


def _subject(place: Location) -> str:
    return next(str(part) for part in place if isinstance(part, str))
