"""How a command line is read: files for the whole tree or a section of it, and flags. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Location = tuple[int | str, ...]
"""Place of a key in the tree: names, and numbers of entries of lists."""

ASKED = ("-h", "--help", "--help-all")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(argument in ASKED or argument.startswith("--help=") for argument in arguments)


SWITCHES = ("--dry-run", "--clean-output-dir")  # what comes after them is not theirs


WORDS = {("--trainer", "external"): "--trainer.external"}
"""A word in place of a section's file, and the switch that it is short for."""
PUBLISHED = {"--wandb-api-key": "--wandb.api-key"}
"""Flags of `prime rl run` that are spelt otherwise here."""


def names_of(flag: str) -> list[str]:
    """`--orchestrator.train.env[0].max-concurrent=4` -> `["orchestrator", "train", "env", "0", "max_concurrent"]`."""
    text = re.sub(r"\[(\d+)\]", r".\1", flag.removeprefix("--").split("=", 1)[0])
    return text.replace("-", "_").split(".")


def place_of(flag: str) -> Location:
    """`--no-orchestrator.train.env[0].max-concurrent` -> `("orchestrator", "train", "env", 0, "max_concurrent")`."""
    names = names_of(flag.removeprefix("--").removeprefix("no-"))
    return tuple(int(name) if name.isdigit() else name for name in names)


def with_long_names(arguments: list[str], short: Mapping[str, str]) -> list[str]:
    """With the long name of each short flag: `-n 8` and `-n=8` -> `--num-examples 8` and `--num-examples=8`."""
    parted = [argument.partition("=") for argument in arguments]
    return [short.get(name, name) + equals + value for name, equals, value in parted]


def split(arguments: list[str]) -> tuple[list[tuple[str | None, str]], list[str]]:
    """The files, `@ rl.toml` or `@rl.toml`, and what is left.

    Each file has the flag of the section that it is for (`--trainer @ trainer.toml`; empty: the whole). Files come in
    the order in which they count, the last the most: those for the whole first. A file that is missing after the last
    `@` is None.
    """
    files: list[tuple[str | None, str]] = []
    flags: list[str] = []
    words = iter(arguments)
    before = ""
    for word in words:
        is_section = before.startswith("--") and "=" not in before and before not in SWITCHES
        if word.startswith("@"):
            files.append((next(words, None) if word == "@" else word[1:], flags.pop() if is_section else ""))
        elif (before, word) in WORDS:
            flags[-1] = WORDS[before, word]
        else:
            flags.append(word)
        before = word
    return sorted(files, key=lambda entry: entry[1] != ""), flags


def dotted(location: Location) -> str:
    """`("train", "env", 0, "id")` -> `train.env[0].id`"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text
