"""What is wrong, as a value: words, and the keys of the config that they are about.

A check says which key it means; every layer above hands that on as it is. Only the command, which has what the user
wrote, says where the key stands and by which name. Standard library only: the processes of a run have no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self


class Problem(str):
    """What is wrong, in words, and what of the config it is about."""

    keys: tuple[str, ...]
    """Dotted, of the full form. The first is the key that it is about; where that is not written, the place of the next
    one, whose value the words tell, is shown."""
    environment: str | None
    """Label of the environment that it is about, whose keys `keys` are then."""

    def __new__(cls, words: str, *keys: str, environment: str | None = None) -> Self:
        made = super().__new__(cls, words)
        made.keys = keys
        made.environment = environment
        return made

    @classmethod
    def at(cls, key: str, words: str, *others: str, environment: str | None = None) -> Self:
        """`KEY: words`. `others`: further keys whose values the words tell."""
        return cls(f"{key}: {words}", key, *others, environment=environment)

    @property
    def key(self) -> str | None:
        return self.keys[0] if self.keys else None

    @property
    def reason(self) -> str:
        """The words without the key that they begin with."""
        return self.removeprefix(f"{self.key}: ")

    def worded(self, words: str) -> Problem:
        """The same in other words."""
        return Problem(words, *self.keys, environment=self.environment)

    def renamed(self, names: Mapping[str, str]) -> Problem:
        """For a form of the config that has these keys by other names."""
        keys = [names.get(key, key) for key in self.keys]
        words = f"{keys[0]}: {self.reason}" if keys and self.reason != self else str(self)
        return Problem(words, *keys, environment=self.environment)


class ProblemError(Exception):
    """Raised where something cannot be used; base of such errors of several layers."""

    def __init__(self, message: str, *keys: str, environment: str | None = None, problems: Sequence[str] = ()) -> None:
        """`keys`, `environment`: as in `Problem`. `problems`: those that the message lists, one a line."""
        super().__init__(message)
        found = problems or [
            message if isinstance(message, Problem) else Problem(message, *keys, environment=environment)
        ]
        self.problems = tuple(one if isinstance(one, Problem) else Problem(one) for one in found)

    @property
    def keys(self) -> tuple[str, ...]:
        """The first problem's."""
        return self.problems[0].keys

    @classmethod
    def at(cls, key: str, words: str, *others: str) -> Self:
        """As `Problem.at`."""
        return cls(Problem.at(key, words, *others))

    @classmethod
    def of(cls, problems: Sequence[str]) -> Self:
        """All of them, one a line."""
        return cls("\n".join(problems), problems=problems)

    @classmethod
    def like(cls, error: Exception) -> Self:
        """What another layer has refused, as this layer's error."""
        return cls(str(error), problems=getattr(error, "problems", ()))
