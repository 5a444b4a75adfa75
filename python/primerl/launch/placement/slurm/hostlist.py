"""Slurm's lists of nodes: `n[1-3,07],login` is n1, n2, n3, n07, login."""

from __future__ import annotations

import re

MOST_NODES = 100_000
RANGES = re.compile(r"\[([^\[\]]*)\]")
ONE = re.compile(r"(\d+)(?:-(\d+))?")


def expanded(text: str) -> list[str]:
    """In the list's order. Raises ValueError for what is no such list."""
    names: list[str] = []
    for part in _parts(text):
        names += _expanded(part)
        if len(names) > MOST_NODES:
            raise ValueError(f"{text[:80]!r} names more than {MOST_NODES} nodes")
    return names


def _parts(text: str) -> list[str]:
    """Cut at the commas outside brackets."""
    parts, depth, last = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    parts.append(text[last:])
    found = [part.strip() for part in parts]
    if depth or not all(found):
        raise ValueError(f"{text!r} is no list of nodes, such as `n[1-3],m7`")
    return found


def _expanded(part: str) -> list[str]:
    found = RANGES.search(part)
    if found is None:
        if set("[]") & set(part):
            raise ValueError(f"{part!r} is no list of nodes, such as `n[1-3],m7`")
        return [part]
    before, rest = part[: found.start()], _expanded(part[found.end() :]) if part[found.end() :] else [""]
    return [f"{before}{number}{after}" for number in _numbers(found[1], part) for after in rest]


def _numbers(ranges: str, part: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        match = ONE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{part!r} is no list of nodes, such as `n[1-3],m7`")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) > MOST_NODES:
            raise ValueError(f"{part!r} names more than {MOST_NODES} nodes")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
