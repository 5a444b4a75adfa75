"""What a config asks of any environment, whichever generation it is of: another system prompt, and some examples only.

Both travel among the environment's arguments, under a name that environments do not get to see: so they reach workers
of this and of another machine, and the check before the start, in the same way. They are applied to the list of
examples. The messages of a rollout are made from its example, so the prompt's tokens follow as usual.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from primerl.envs.interface import EnvironmentRefusedError, Generation

RESERVED = "primerl"
"""Name among the arguments."""


def reserved(system_prompt: str | None, examples: Sequence[int] | None = None) -> dict[str, Any]:
    """The arguments to add; none where nothing is asked for."""
    asked = {"system_prompt": system_prompt, "examples": None if examples is None else list(examples)}
    found = {name: value for name, value in asked.items() if value is not None}
    return {RESERVED: found} if found else {}


@dataclass(frozen=True)
class Overrides:
    system_prompt: str | None = None
    examples: tuple[int, ...] | None = None
    """Places in the list, in the order in which they are to be used."""

    def applied(self, generation: Generation, environment_id: str, examples: Sequence[Any]) -> Sequence[Any]:
        """Raises EnvironmentRefusedError: an example is not there, or has no place for a system prompt."""
        if self.examples is not None:
            beyond = next((place for place in self.examples if place >= len(examples)), None)
            if beyond is not None:
                raise EnvironmentRefusedError(
                    f"environment {environment_id!r} has {len(examples)} examples, and example_places names {beyond} "
                    "(the first is 0); name those that there are",
                    "example_places",
                )
        if self.system_prompt is None:
            return examples if self.examples is None else Changed(examples, self.examples, lambda example: example)
        change = getattr(generation, "with_system_prompt", None)
        if change is None:
            raise EnvironmentRefusedError(
                f"environment {environment_id!r}: system_prompt is for environments of verifiers, and this one is of "
                "another package; omit it, or set the prompt in its args",
                "system_prompt",
                "args",
            )
        prompt = self.system_prompt
        order = range(len(examples)) if self.examples is None else self.examples
        changed = Changed(examples, order, lambda example: change(example, prompt))
        changed[0]  # refused now, not in each rollout
        return changed


class Changed(Sequence[Any]):
    """Examples of a list, each changed when it is asked for."""

    def __init__(self, examples: Sequence[Any], order: Sequence[int], change: Callable[[Any], Any]) -> None:
        self._examples = examples
        self._order = order
        self._change = change

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return self._change(self._examples[self._order[index]])

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], Overrides]:
    """The environment's own arguments, and what is asked besides."""
    own = {name: value for name, value in arguments.items() if name != RESERVED}
    asked = arguments.get(RESERVED, {})
    examples = asked.get("examples")
    return own, Overrides(asked.get("system_prompt"), None if examples is None else tuple(examples))
