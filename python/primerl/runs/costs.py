"""What a run has cost so far."""

from __future__ import annotations

import json
from pathlib import Path

from primerl.launch.report import summary
from primerl.train.checkpoint.files import last_line

HOUR_S = 3600.0


def cost(folder: Path) -> dict[str, float | None]:
    """Seconds, tokens, CPU and GPU hours, over all sessions whose launchers wrote a summary; None of what is not known.

    GPU hours are wall time times the GPUs that the launcher gave to the run's processes, busy or not.
    """
    try:
        content = json.loads((folder / summary.FILE).read_bytes())
        sums = summary.sums(content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        sums = {}
    trained = last_line(folder / "metrics.jsonl").get("progress/num_tokens")
    cpu, gpu = sums.get("cpu_s"), sums.get("gpu_s")
    return {
        "wall_s": sums.get("wall_s"),
        "sampled_tokens": sums.get("sampled_tokens"),
        "trained_tokens": trained if isinstance(trained, int | float) else None,
        "cpu_hours": None if cpu is None else cpu / HOUR_S,
        "gpu_hours": None if gpu is None else gpu / HOUR_S,
    }
