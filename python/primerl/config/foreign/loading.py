"""Files of another tool where a command reads its config: which they are, and what the config becomes."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time
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
_TEXTS = {(name,) for name in ("name", "dir", "output_dir", "project", "entity", "group", "id")}
"""Last names of keys whose values are text, whatever they look like."""
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
    """Flags in their words, as places and values, and those in ours. Who runs such a file speaks as the file does: a
    name that both have is theirs where it has a counterpart, so that what follows from it follows from the flag."""
    theirs = table(kind)
    # What our `output_dir` is follows from both of theirs.
    names_the_run = any(place[:1] == ("run",) for place in map(_place, flags))

    def is_theirs(place: Location) -> bool | None:
        """None where it is theirs alone."""
        plain = "".join("[]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
        if look_up(cls, place).kind not in ("known", "any"):
            return None if theirs.knows(plain) or theirs.has_below(plain) else False
        found = theirs.find(plain)
        has_counterpart = found is not None and found[0].ours is not None
        return has_counterpart and (plain != "output_dir" or names_the_run)

    def has_theirs(place: Location, value: Any) -> bool:
        inside = leaves(value) if isinstance(value, dict) and value else [("", ())]
        whose = [is_theirs((*place, *below)) for _, below in inside]
        return None in whose or all(whose)

    return _taken(flags, has_theirs)


def _place(word: str) -> Location:
    return place_of(word.partition("=")[0]) if word.startswith("--") else ()


def entry_of_flags(flags: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What verifiers' flags `--env.taskset.KEY` and `--env.SEAT.KEY` say of an entry of our `env`, and the other flags.

    Raises ConfigError where one has no counterpart.
    """
    from primerl.config.schema.evaluation import MeasuredEnvironment

    ours = MeasuredEnvironment.model_fields.keys() - {"id", "taskset", "harness"}

    def is_theirs(place: Location, _: Any) -> bool:
        # With a number it is an entry of ours, and so are the keys of one.
        return place[0] == "env" and len(place) > 1 and isinstance(place[1], str) and place[1] not in ours

    given, others = _taken(flags, is_theirs)
    if not given:
        return {}, others
    tree: dict[str, Any] = {}
    for place, value in given:
        tree = with_value(tree, place, value, dotted(place))
    made = translate(tree, EVAL)
    if made.refused:
        raise ConfigError("\n".join(f"--{dotted(left.theirs)}: {left.why}" for left in made.refused))
    entry = dict(look(made.tree, ("env", 0), {}))
    # As without these flags, who plays is the chat within the worker.
    entry.pop("harness", None)
    limit = look(made.tree, ("timeouts", "rollout_s"))
    if any(place[-2:] == ("timeout", "rollout") for place, _ in given) and not any(
        _place(word) == ("timeouts", "rollout_s") for word in others
    ):
        others = [*others, f"--timeouts.rollout-s={limit}"]
    return entry, others


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
        place = _place(word)
        value = _value(text, place) if equals or is_value_next else not word.startswith("--no-")
        if not place or not takes(place, value):
            others.append(word)
            continue
        if name.startswith("--no-") and (equals or is_value_next):
            raise ConfigError(f"{name} takes no value; give --{name.removeprefix('--no-')} {text}")
        taken.append((place, value))
        if is_value_next:
            words.pop(0)
    return taken, others


def _value(text: str, place: Location) -> Any:
    """As TOML has it; a table or a list as JSON has it, too; else, and of names, text."""
    if place[-1:] in _TEXTS or "\n" in text:
        return text
    for whole, read in ((f"value = {text}", tomllib.loads), (f'{{"value": {text}}}', json.loads)):
        try:
            value = read(whole)["value"]
        except ValueError:
            continue
        except RecursionError:
            raise ConfigError(f"--{dotted(place)}: the value is nested too deeply; give less") from None
        # A date is what its text says, and JSON's null is none of TOML's words.
        return text if value is None or isinstance(value, date | time) else value
    return {"True": True, "False": False}.get(text, text)
