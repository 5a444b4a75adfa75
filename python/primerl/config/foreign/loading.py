"""Files of another tool where a command reads its config: which they are, and what the config becomes."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from primerl.config.command_line.arguments import Location, dotted, place_of
from primerl.config.command_line.flags import look_up
from primerl.config.command_line.load import of_files, with_value
from primerl.config.command_line.sources import Written, sources
from primerl.config.errors.fail import ConfigError
from primerl.config.foreign import listing
from primerl.config.foreign.rows import REST, look
from primerl.config.foreign.table import EVAL, KINDS, Kind, as_read_for, leaves, table
from primerl.config.foreign.translate import Translation, named, translate

FORMS = {"RLConfig": "rl", "SFTConfig": "sft", "EvalConfig": "eval", "GepaConfig": "gepa"}
"""Form that a class reads whose files may be another tool's."""
_told: set[tuple[str, ...]] = set()
"""Files that this process has told about: a command reads its config more than once."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Keys of a file by whose they are, as places; what both have is in neither."""

    theirs: list[Location]
    ours: list[Location]


def shares(tree: dict[str, Any], kind: Kind, cls: type[BaseModel]) -> Shares:
    theirs, ours = [], []
    inside = {kind.within: tree} if kind.within else tree
    for path, place in leaves(inside):
        is_ours = look_up(cls, place).kind in ("known", "any")
        is_theirs = table(kind).knows(path) or (look(inside, place) == {} and table(kind).has_below(path))
        if is_theirs and not is_ours:
            theirs.append(place)
        elif is_ours and not is_theirs:
            ours.append(place)
    return Shares(theirs, ours)


def foreign(tree: dict[str, Any], form: str, cls: type[BaseModel]) -> Kind | None:
    """The kind of another tool's file that the tree is: one with a key of its own, and without a key of ours.

    Args:
        form: What the command reads, `rl`, `sft`, `eval` or `gepa`.
    """
    kind = as_read_for(form, tree)
    if kind is None or kind.form != form:
        return None
    found = shares(tree, kind, cls)
    return kind if found.theirs and not found.ours else None


@dataclass
class Given:
    """What a command line gives."""

    tree: dict[str, Any]
    """In our form, without what flags set."""
    flags: list[str]
    """Those in our words."""
    files: tuple[str, ...] = ()
    made: Translation | None = None
    """Where the files are another tool's."""

    def written_at(self, location: Location) -> Location:
        return location if self.made is None else self.made.written_at(location)

    def check(self) -> None:
        """Says on stderr what has no counterpart. Raises ConfigError where an environment is not installed."""
        if self.made is None:
            return
        missing = listing.not_installed(self.made)
        if missing:
            raise ConfigError(listing.how_to_install(missing))
        if self.files not in _told:
            _told.add(self.files)
            print(listing.summary(self.made, self.files), file=sys.stderr, flush=True)


def is_foreign(cls: type[BaseModel], arguments: list[str]) -> bool:
    """Whether the files are another tool's; those that cannot be read are not."""
    try:
        tree, _ = of_files(arguments)
    except (ConfigError, RecursionError):
        return False
    return _kind(cls, tree) is not None


def given(cls: type[BaseModel], arguments: list[str], tree: dict[str, Any], flags: list[str]) -> Given:
    """What the files of a command line hold, in our form whatever they are of.

    Raises ConfigError where something else would be learnt, or it would run elsewhere.
    """
    kind = _kind(cls, tree)
    if kind is None:
        return Given(tree, flags)
    theirs, ours = _parted(cls, kind, flags)
    for place, value in theirs:
        tree = with_value(tree, place, value, dotted(place))
    made = translate(tree, kind)
    files = tuple(dict.fromkeys(file for file, _ in sources(arguments)))
    _check_refused(made, arguments, files)
    return Given(made.tree, ours, files, made)


def hint(cls: type[BaseModel], location: Location, given: Any = None) -> str | None:
    """What a key that the class does not have is called here, or why there is none; None where no tool has such a key.

    Args:
        given: What stands there. The words are about the keys of a table.
    """
    path = "".join("[]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    found = _meant(cls, path, location)
    if found is not None or not isinstance(given, dict | list):
        return found
    below = [(inner, place) for inner, place in leaves(given, path) if place]
    told = [(inner, _meant(cls, inner, (*location, *place))) for inner, place in below]
    words_of = [f"of {inner.removeprefix(path).lstrip('.[]')}, {words}" for inner, words in told if words is not None]
    return "; ".join(dict.fromkeys(words_of)) or None


def _meant(cls: type[BaseModel], path: str, location: Location) -> str | None:
    form = FORMS.get(cls.__name__)
    for kind in KINDS:
        found = table(kind).find(path) if kind.form == form and not kind.within else None
        if found is not None and REST not in found[0].theirs:
            ours = found[0].ours
            return found[0].why if ours is None else f"it is {named(found[0], location)}"
    return None


def _kind(cls: type[BaseModel], tree: dict[str, Any]) -> Kind | None:
    form = FORMS.get(cls.__name__)
    return foreign(tree, form, cls) if form and tree else None


def _check_refused(made: Translation, arguments: list[str], files: tuple[str, ...]) -> None:
    written = Written(arguments)
    problems = [
        f"{dotted(place)}{written.at(place)}: {left.why}"
        for left in made.refused
        for place in [listing.within_file(left.theirs, made.kind)]
    ]
    if problems:
        named = " and ".join(files)
        advice = (
            f"{named} is a file of {made.kind.name}, and these keys have no counterpart here; remove them, or let "
            f"`primerl convert {' '.join(files)}` write the file without them"
        )
        raise ConfigError("\n".join([advice, *problems]))


def _parted(cls: type[BaseModel], kind: Kind, flags: list[str]) -> tuple[list[tuple[Location, Any]], list[str]]:
    """Flags in their words, as places and values, and those in ours. A name that both have is ours, but for the
    model: who runs such a file speaks of it as the file does."""
    # What our `output_dir` is follows from both of theirs.
    as_theirs = {"model.name", "model", "data.batch_size"}
    if any(word.partition("=")[0] in ("--run.name", "--run.dir") for word in flags):
        as_theirs.add("output_dir")

    def is_theirs(place: Location) -> bool:
        plain = "".join("[]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        is_ours = look_up(cls, place).kind in ("known", "any") and plain not in as_theirs
        return not is_ours and (table(kind).knows(plain) or table(kind).has_below(plain))

    def has_theirs(place: Location, value: Any) -> bool:
        inside = leaves(value) if isinstance(value, dict) and value else [("", ())]
        return any(is_theirs((*place, *below)) for _, below in inside)

    return _taken(flags, has_theirs)


def entry_of_flags(flags: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What verifiers' flags `--env.taskset.KEY` and `--env.SEAT.KEY` say of an entry of our `env`, and the other flags.

    Raises ConfigError where one has no counterpart.
    """

    def is_theirs(place: Location, _: Any) -> bool:
        # With a number it is an entry of ours.
        return place[0] == "env" and len(place) > 1 and isinstance(place[1], str)

    given, others = _taken(flags, is_theirs)
    if not given:
        return {}, others
    tree: dict[str, Any] = {}
    for place, value in given:
        tree = with_value(tree, place, value, dotted(place))
    seats = [inner for name, inner in tree["env"].items() if name != "taskset" and isinstance(inner, dict)]
    if not any("harness" in inner for inner in seats):
        # As without these flags: the chat within the worker.
        tree = with_value(tree, ("env", "agent", "harness", "id"), "null", "")
    made = translate(tree, EVAL)
    if made.refused:
        raise ConfigError("\n".join(f"--{dotted(left.theirs)}: {left.why}" for left in made.refused))
    return look(made.tree, ("env", 0), {}), others


def _taken(flags: list[str], takes: Callable[[Location, Any], bool]) -> tuple[list[tuple[Location, Any]], list[str]]:
    """Flags whose place is to be taken, as places and values, and the other words."""
    taken: list[tuple[Location, Any]] = []
    others: list[str] = []
    words = list(flags)
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        is_value_next = not equals and words and not words[0].startswith("--")
        text = words[0] if is_value_next else text
        value = _value(text) if equals or is_value_next else not word.startswith("--no-")
        place = place_of(name) if word.startswith("--") else ()
        if not place or not takes(place, value):
            others.append(word)
            continue
        taken.append((place, value))
        if is_value_next:
            words.pop(0)
    return taken, others


def _value(text: str) -> Any:
    """As TOML has it; a table or a list as JSON has it, too; else text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        pass
    try:
        return json.loads(text) if text.startswith(("{", "[")) else {"True": True, "False": False}.get(text, text)
    except ValueError:
        return text
