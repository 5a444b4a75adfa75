"""Rollouts of one example in several runs: `primerl run compare --example`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from primerl.process.redaction import redacted
from primerl.runs.dashboard.sources import SourceError, Sources
from primerl.runs.dashboard.told import Board
from primerl.runs.registry import Run

PATIENCE_S = 120.0
"""How long journals are read."""
POLL_S = 0.1
TOKENS = 4096
SHOWN = ("rollout", "step", "evaluates", "reason", "reward", "turns", "sampled_tokens", "versions", "example")
STATUS = "fate"  # words: allow
"""The page's name for how a rollout ended."""


def rollouts_of(runs: Sequence[Run], environment: str, example: int, limit: int) -> dict[str, Any]:
    """`{environment, example, runs: {id: {matching, rollouts}}, problems: {id: why}}`, the newest first.

    `example` is its number in the first run. A rollout also has its `prompt`, the text before its first turn, and its
    `answer`, that of its last turn; None where these are not kept. Where the model's tokenizer is gone there is no
    answer, and the prompt is token ids.

    Raises UnknownExampleError.
    """
    board = Board()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = board.rollouts(runs, environment=environment, example=example, of=runs[0], limit=limit)
            if all(one["is_up_to_date"] or one["problem"] for one in found["runs"].values()):
                break
            if time.monotonic() > deadline:
                late = dict.fromkeys(found["runs"], "its journal is still being read")
                found["problems"] = late | found["problems"]
                break
            time.sleep(POLL_S)
        by_id = {run.id: run for run in runs}
        listed = {
            run: {
                "matching": one["matching"],
                "rollouts": [
                    {
                        **{name: row[name] for name in SHOWN},
                        "status": row[STATUS],
                        **_texts(board.sources, by_id[run], row),
                    }
                    for row in one["rollouts"]
                ],
            }
            for run, one in found["runs"].items()
        }
    finally:
        board.close()
    told = {"environment": environment, "example": example, "runs": listed, "problems": found["problems"]}
    return dict(redacted(told))


def _texts(sources: Sources, run: Run, row: dict[str, Any]) -> dict[str, str | None]:
    last, gone = row["turns"] - 1, row["turns_gone"]
    first = _turn(sources, run, row, 0) if gone == 0 and last >= 0 else {}
    end = first if last == 0 else _turn(sources, run, row, last) if last >= gone else {}
    pieces = end.get("pieces")
    return {
        "prompt": (first.get("prompt") or {}).get("text"),
        "answer": None if pieces is None else "".join(pieces),
    }


def _turn(sources: Sources, run: Run, row: dict[str, Any], turn: int) -> dict[str, Any]:
    """Empty where it cannot be read."""
    path = f"/page/rollouts/{row['rollout']}/turns/{turn}?limit={TOKENS}"
    try:
        return dict(json.loads(sources.ask(run.output_dir, path)))
    except SourceError:
        return {}
