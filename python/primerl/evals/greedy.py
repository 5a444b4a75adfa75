"""Several rollouts of an example that are all the same."""

from __future__ import annotations

from collections.abc import Iterable


def repeated(entries: Iterable[tuple[str, int, float]]) -> str | None:
    """A warning, where there are any. `entries`: name, rollouts of an example and temperature of each environment."""
    names = [repr(name) for name, rollouts, temperature in entries if rollouts > 1 and temperature == 0]
    if not names:
        return None
    return (
        f"warning: {', '.join(names)}: rollouts_per_example is above 1 at temperature 0 (greedy), where an answer is "
        "the same each time: unless the environment itself draws, the rollouts of an example are one, at so many times "
        "the cost; set temperature (1.0), or leave rollouts_per_example at 1"
    )
