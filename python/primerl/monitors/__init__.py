"""Monitors: services to which a run is reported. `docs/monitors.md` shows how to write one.

    metrics.jsonl, evals.jsonl, distributions.jsonl, journal     written by the run itself, monitored or not
            │ collect
            ▼
    monitor/records.jsonl    what there is to tell, numbered, in one order that no restart changes
            │ a thread and a cursor for each monitor
            ▼
    W&B, Prime, your own

All of it is one process of the run (`primerl monitor`), which training never waits for.
"""

from __future__ import annotations

from primerl.monitors.monitor import Distribution, Monitor, RefusedError, Run, Sample

__all__ = ["Distribution", "Monitor", "RefusedError", "Run", "Sample"]
