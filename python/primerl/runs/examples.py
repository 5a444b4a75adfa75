"""Scores of each example of an evaluation, as the orchestrator has written them, and pairs of two evaluations.

`<output_dir>/evaluations/v<version>/<environment>.json` holds `{rollouts, mean_reward, examples, keys, scores: {name:
[...]}}`, lists as long as `examples`. The first two numbers are those of the line in `evals.jsonl` that it belongs to.
A key is the same for the same example in any run, whatever the order is that the run's seed makes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Key = tuple[str, int]
"""An example that is listed twice is two."""
LEAST_SHARED = 0.5
"""Share of the smaller evaluation's examples that have to be in the other one."""


@dataclass(frozen=True, slots=True)
class Examples:
    scores: Mapping[str, Mapping[Key, float]]

    def of(self, name: str) -> Mapping[Key, float]:
        return self.scores.get(name, {})


def examples_of(folder: Path, line: dict[str, Any], version: Any) -> Examples | None:
    """The scores behind this line of `evals.jsonl`; None where they are damaged, or missing as in older runs."""
    try:
        text = (folder / "evaluations" / f"v{version}" / f"{line['environment']}.json").read_text(encoding="utf-8")
        content = json.loads(text)
        if (content["rollouts"], content["mean_reward"]) != (line.get("rollouts"), line.get("mean_reward")):
            return None
        return Examples({name: _by_key(content["keys"], values) for name, values in content["scores"].items()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _by_key(keys: list[Any], values: list[Any]) -> dict[Key, float]:
    seen: Counter[str] = Counter()
    found = {}
    for key, value in zip(keys, values, strict=True):
        if not isinstance(key, str):
            continue
        seen[key] += 1
        if isinstance(value, int | float) and math.isfinite(value):
            found[key, seen[key]] = float(value)
    return found


def paired(before: Mapping[Key, float], after: Mapping[Key, float]) -> tuple[list[float], list[float]] | str:
    """Scores of the examples of both, in one order; or why they cannot be paired."""
    if not before or not after:
        return "scores of single examples were not kept"
    shared = sorted(before.keys() & after.keys())
    least = min(len(before), len(after))
    if len(shared) < 2 or len(shared) < LEAST_SHARED * least:
        return f"{len(shared)} of {least} examples are the same"
    return [before[key] for key in shared], [after[key] for key in shared]
