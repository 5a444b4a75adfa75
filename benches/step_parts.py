"""What a trainer's lines of metrics say of where a step's time goes, for `step_overhead.py` and `sft_throughput.py`."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

WARM_UP = 3
"""First steps that are left out."""
INSIDE = ("time/forward_backward", "time/optimizer")
MOST_OUTSIDE = 0.03
"""Goal: share of a step beside these."""


def report(name: str, lines: list[dict[str, Any]]) -> bool:
    """Prints the shares of the median step; returns whether the goal is met."""
    lines = lines[WARM_UP:]
    steps = [line["time/step"] for line in lines]
    outside = [1.0 - sum(line[part] for part in INSIDE) / line["time/step"] for line in lines]
    parts = sorted({part for line in lines for part in line if part.startswith("time/")} - {"time/step", *INSIDE})
    load = os.getloadavg()[0]
    print(
        f"{name}: a step takes {median(steps) * 1e3:.1f} ms; beside forward, backward, optimizer: "
        f"{median(outside):.2%} ({min(outside):.2%} at least; load of the machine {load:.1f} on {os.cpu_count()} cores)"
    )
    for part in parts:
        spent, least = (of([line.get(part, 0.0) for line in lines]) for of in (median, min))
        beside = ", in a thread beside the step" if part.endswith("_thread") else f" ({spent / median(steps):.2%})"
        print(f"    {part:<26} {spent * 1e3:8.2f} ms{beside}, {least * 1e3:.2f} at least")
    return median(outside) <= MOST_OUTSIDE
