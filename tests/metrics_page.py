"""The names of metrics that docs/metrics.md has rows for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path

IN_BACKTICKS = re.compile(r"`([^`\s]+/[^`\s]+)`")
BRACES = re.compile(r"\{([^}]*)\}")
PUT_IN = re.compile(r"\{\w*\}")
PLACEHOLDER = re.compile(r"<[^>]*>")


def rows(repository: Path) -> set[str]:
    """With `<...>` for what differs between runs."""
    page = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    found: set[str] = set()
    for line in page.splitlines():
        if line.startswith("| `"):
            found |= names_in(line.split(" | ")[0])
    return found


def names_in(text: str) -> set[str]:
    """`.../b` in place of `a/<name>` means `a/b`."""
    found: set[str] = set()
    first = ""
    for name in IN_BACKTICKS.findall(text):
        if name.startswith("..."):
            name = first.rpartition("/")[0] + name.removeprefix("...")
        else:
            first = name
        alternatives = [choice.split(",") for choice in BRACES.findall(name)]
        form = BRACES.sub("{}", name)
        found |= {form.format(*chosen) for chosen in product(*alternatives)}
    return found


def without_row(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Names of metrics that no row is for. A name may have `{...}` for what the sources put in. A row for whatever
    metrics a user's own function returns counts for no other name."""
    own = [row for row in known if not row.startswith("<")]
    return sorted(name for name in names if not any(_covers(row, name) for row in own))


def _covers(row: str, name: str) -> bool:
    parts, given = row.split("/"), name.split("/")
    return len(parts) == len(given) and all(map(_covers_part, parts, given))


def _covers_part(row: str, given: str) -> bool:
    if "{" in given:
        return re.fullmatch(_pattern(PUT_IN, given), PLACEHOLDER.sub("x", row)) is not None
    return re.fullmatch(_pattern(PLACEHOLDER, row), given) is not None


def _pattern(gaps: re.Pattern[str], text: str) -> str:
    return ".*".join(map(re.escape, gaps.split(text)))
