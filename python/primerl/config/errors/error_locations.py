"""Reports what checks find wrong after the config was read (they need files or environments) as mistakes of the config
are: with the key as the user wrote it, its file and line.

Checks say which key of the full form they mean (`primerl.process.problems`) and know nothing of files; environments are
named by their label. Here, and only here, keys become the user's, also those that the words name.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from primerl.config.command_line.arguments import Location, dotted, place_of
from primerl.config.command_line.sources import Written
from primerl.config.describe.fields import plain_path, table_of
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.environment import validation_label
from primerl.process.problems import Problem, ProblemError

WORD = r"[a-z_]\w*(?:\[\d+\])*(?:\.[A-Za-z_]\w*(?:\[\d+\])*)*"
# Within words. Neither part of a path or a flag, nor quoted.
KEY = re.compile(rf"(?<![\w./'\"~@<-]){WORD}(?![\w/'\"]|\.\w|-\w)")
# A line of a file that a process quotes, as TOML's parser does.
FRAME = re.compile(r"\s*\d*\s*\|")

# Made when there is something to tell.
_source: ContextVar[Callable[[], Source] | None] = ContextVar("source", default=None)


class Source:
    """What a command was given: files, flags, the config that they make."""

    def __init__(self, config: BaseModel, arguments: list[str], *, short: bool = False) -> None:
        self._written = Written(arguments)
        self._short = _short_paths() if short else None
        self._full = paths_of(type(config))
        self._environments = dict(environment_places(config))

    def told(self, message: str) -> str:
        """The message with the place of the key that it is about, as a `Problem` says it, and in the user's words."""
        problem = message if isinstance(message, Problem) else Problem(message)
        first, *others = problem.split("\n")
        return "\n".join([self._placed(problem.worded(first)), *map(self._line, others)])

    def _placed(self, problem: Problem) -> str:
        if problem.environment in self._environments:
            return self._of_environment(problem, self._environments[problem.environment])
        known = {key: self._own(place_of(key)) for key in problem.keys if plain_path(key) in self._full}
        if problem.key in known and problem.reason != problem:
            return self._worded(f"{self._shown(known[problem.key])}: ", problem.reason)
        return self._worded("", problem, next(filter(None, map(self._written.at, known.values())), ""))

    def _of_environment(self, problem: Problem, entry: Location) -> str:
        beginning = f"environment {problem.environment!r}: "
        for name in problem.keys:
            key = place_of(name)
            # Settings of the only seat may be the environment's `harness`.
            for inner in (key, ("args", *key), key[1:], ("harness", *key[1:])):
                own = self._own((*entry, *inner))
                if inner[-1:] == key[-1:] and self._written.at(own):
                    said = problem.removeprefix(beginning).removeprefix(f"{name}: ")
                    start = beginning if problem.startswith(beginning) else ""
                    return self._worded(f"{self._shown(own)}: {start}", said)
        for location in ((*entry, "id"), entry):
            own = self._own(location)
            if self._written.at(own):
                return self._worded(f"{self._shown(own)}: ", problem)
        return self._line(problem)

    def _shown(self, own: Location) -> str:
        return f"{dotted(own)}{self._written.at(own)}"

    def _line(self, line: str) -> str:
        return line if FRAME.match(line) else self._worded("", line)

    def _known(self, word: str) -> Location | None:
        """Where a key that is named points, from the whole config; None of what is no key."""
        for path in (word, f"orchestrator.{word}"):
            if plain_path(path) in self._full:
                return place_of(path)
        return None

    def _own(self, location: Location) -> Location:
        """In the form that the user writes; as it is where that has no such key."""
        if self._short is None:
            return location
        from primerl.config.hosted.compile import written_at

        found = written_at(location, self._written.at)
        plain = [part for part in found if isinstance(part, str)]
        # Settings of an environment are any keys.
        is_there = any(".".join(plain[:length]) in self._short for length in range(len(plain), 0, -1))
        return (
            found if is_there and (plain[0] == "env" or plain[:2] == ["eval", "env"] or self._has(plain)) else location
        )

    def _has(self, plain: list[str]) -> bool:
        return self._short is not None and ".".join(plain) in self._short

    def _worded(self, beginning: str, text: str, end: str = "") -> str:
        """With other keys that the text names in the user's form too; lists keys that it has no name for."""
        foreign: dict[str, None] = {}

        def own(match: re.Match[str]) -> str:
            word = match[0]
            location = self._known(word)
            if location is None or self._has([part for part in place_of(word) if isinstance(part, str)]):
                return word
            found = self._own(location)
            if found == location:
                if "." in word:
                    foreign[word] = None
                return word
            return dotted(found)

        if self._short is None:
            return f"{beginning}{text}{end}"
        told = KEY.sub(own, text)
        note = f" ({', '.join(foreign)}: of the full form, see docs/hosted.md)" if foreign else ""
        return f"{beginning}{told}{end}{note}"


def _short_paths() -> frozenset[str]:
    from primerl.config.hosted import HostedConfig

    return paths_of(HostedConfig)


def paths_of(cls: type[BaseModel]) -> frozenset[str]:
    """Dotted paths of all keys and tables of a form, without brackets."""
    root = table_of(cls)
    named = [table.path for table in root.all_tables()] + [knob.path for knob in root.all_knobs()]
    return frozenset(plain_path(path) for path in named if path)


def environment_places(config: Any) -> Iterator[tuple[str, Location]]:
    """Each environment by its label, with its place in the full form."""
    orchestrator = getattr(config, "orchestrator", None)
    found: list[tuple[Any, Location]] = []
    if orchestrator is None:
        found = [(entry, ("env", index)) for index, entry in enumerate(getattr(config, "env", []))]
    else:
        made = [entry for entry in orchestrator.eval.env if entry.label == validation_label(entry.validates or "")]
        given = [entry for entry in orchestrator.eval.env if orchestrator.val is None or entry not in made]
        found += [(entry, ("orchestrator", "train", "env", n)) for n, entry in enumerate(orchestrator.train.env)]
        found += [(entry, ("orchestrator", "eval", "env", n)) for n, entry in enumerate(given)]
        found += [(entry, ("orchestrator", "val")) for entry in made if entry not in given]
    yield from ((entry.label, place) for entry, place in found)


@contextlib.contextmanager
def placed(config: BaseModel, arguments: list[str], *, short: bool = False) -> Iterator[None]:
    """Within the block, what a check raises about `config` is reported with its place in `arguments`.

    Args:
        short: Whether they are in the short form.
    """
    token = _source.set(functools.cache(lambda: Source(config, arguments, short=short)))
    try:
        yield
    except ConfigError as error:
        raise ConfigError(told(error)) from None
    finally:
        _source.reset(token)


def told(error: ProblemError) -> str:
    """What is wrong, as [`placed`][primerl.config.errors.error_locations.placed] tells it; outside of it, as it is."""
    source = _source.get()
    return str(error) if source is None else "\n".join(map(source().told, error.problems))
