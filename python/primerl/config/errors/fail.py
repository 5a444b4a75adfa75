"""How a command refuses: one message, in a box on a terminal. Imports nothing that is heavy until there is one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping

from primerl.process.problems import ProblemError
from primerl.process.redaction import redact


class ConfigError(ProblemError):
    """The user's input cannot be used: the message names the field or file and what to do. Exit code 2."""

    __module__ = "primerl"


class Problems:
    """What several checks find, told together: one that fails hides no other."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """A ConfigError of the block is noted, and the next check is made."""
        try:
            yield
        except ConfigError as error:
            self.found += error.problems

    def check(self) -> None:
        """Raises ConfigError with every problem, one a line."""
        if self.found:
            # A file that cannot be read may be one for several checks.
            found = list(dict.fromkeys(self.found))
            raise ConfigError.of(found)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, a ConfigError is about a config that has these keys by other names."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError.of([problem.renamed(names) for problem in error.problems]) from None


def fail(message: str, *, title: str = "Nothing was started") -> int:
    """Prints the message in a box (a plain block where there is no terminal) and returns exit code 2."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    message = redact(message)
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(Panel(Text(message), title=title, title_align="left", border_style="red"))
    else:
        # Unwrapped, so that a log or a test finds the words of a message on one line.
        print(f"{title}:", *(f"  {line}" for line in message.splitlines()), sep="\n", file=sys.stderr)
    return 2
