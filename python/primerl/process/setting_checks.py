"""Checks settings that were read from a file: types by the dataclass's annotations, and bounds. Standard library only:
env workers of any interpreter read their settings by it."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# The integers of the orchestrator: of 32 bits and, as far as TOML holds them, of 64.
MOST_COUNT, MOST_LARGE_COUNT = 2**32 - 1, 2**63 - 1
MOST_PORTS = 65535
# An env worker that has imported verifiers and does nothing has taken half of it.
LEAST_MEMORY_MB = 1024
# Beyond any machine's cores; torch crashes where it cannot start that many.
MOST_THREADS = 1024
# A year: more overflows the clocks.
LONGEST_S = 365 * 86_400

WORDS: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}
Ranges = Mapping[str, tuple[float, float]]
"""Least and most value by name; a float has to be above the least."""


def check(section: object, ranges: Ranges, prefix: str = "") -> None:
    """Raises ValueError that names the field. `prefix`: of its name, where the section stands within another."""
    for name, hint in get_type_hints(type(section)).items():
        value = getattr(section, name)
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if value is None and type(None) in choices:
            continue
        choices = tuple(choice for choice in choices if choice is not type(None))
        if not any(_is(value, choice) and _within(value, choice, ranges.get(name)) for choice in choices):
            wanted = " or ".join(_words(choice, ranges.get(name)) for choice in choices)
            raise ValueError(f"{prefix}{name}: must be {wanted}, not {value!r}")


def _is(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_is(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))


def _within(value: Any, hint: Any, limits: tuple[float, float] | None) -> bool:
    if limits is None:
        return True
    least, most = limits
    return bool((value > least if hint is float else value >= least) and value <= most)


def _words(hint: Any, limits: tuple[float, float] | None) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    what = WORDS.get(get_origin(hint) or hint, "a table")
    if get_origin(hint) is list:
        what += " of " + {str: "texts"}.get(get_args(hint)[0], "values")
    if limits is None:
        return what
    least, most = limits
    return f"{what} above {least} and up to {most}" if hint is float else f"{what} from {least} to {most}"
