"""What an evaluation leaves: `results.jsonl`, a line a rollout, `summary.json`, and the table on the terminal.

All of it is read from the journal and from `evals.jsonl`, and written whole: writing it again changes nothing. What the
models wrote goes from the journal to the file rollout by rollout; only numbers are kept for the summary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl._core import evaluated_rollouts
from primerl.config.resolve import write_parts, write_text
from primerl.launch.preflight import holds_run
from primerl.redaction import redacted

RESULTS, SUMMARY, EVALS = "results.jsonl", "summary.json", "evals.jsonl"
# Numbers of a line whose means are in the summary.
SUMMED = ("prompt_tokens", "completion_tokens", "turns")
Decode = Callable[[list[int]], str]
"""Token ids to text."""


def write(folder: Path, environments: Iterable[str], measured: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """Writes both files; returns the summary.

    Args:
        environments: Their names, in the order of the config.
        measured: What was measured, for the summary: the model, the endpoint.
        decode: Of the checkpoint's tokenizer; None for an endpoint, which says texts.
    """
    rollouts: Iterable[dict[str, Any]] = evaluated_rollouts(folder) if holds_run(folder) else ()  # nothing was begun
    tallies = {name: Tally() for name in environments}

    def lines() -> Iterator[str]:
        for rollout in rollouts:
            line = redacted(line_of(rollout, decode))
            tallies[line["environment"]].count(line)
            yield json.dumps(line, ensure_ascii=False) + "\n"

    write_parts(folder / RESULTS, lines())
    own = {name: tally.summary(scores_of(folder, name)) for name, tally in tallies.items()}
    summary = {**measured, "environments": own}
    write_text(folder / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return summary


def line_of(rollout: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """One line of `results.jsonl`. `messages`: a turn each, with the prompt's text where its tokens are known."""
    turns = rollout["turns"]
    error = rollout["error"]
    return {
        "environment": rollout["environment"],
        "example": rollout["example"],
        "number": rollout["slot"],
        "rollout": rollout["rollout"],
        "reward": rollout["reward"],
        "metrics": rollout["metrics"],
        "error": error["kind"] if error else None,
        "message": error["message"] if error else None,
        "failed_before": rollout["attempts_before"],
        "truncated": rollout["truncated"],
        "stop_condition": rollout["stop_condition"],
        "turns": len(turns),
        "prompt_tokens": sum(turn["prompt_tokens"] for turn in turns),
        "completion_tokens": sum(turn["completion_tokens"] for turn in turns),
        "seconds": round(rollout["ended_s"] - rollout["leased_s"], 3),
        "messages": [_message(turn, decode) for turn in turns],
    }


def _message(turn: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    told: dict[str, Any] = {"session": turn["session"], "parent": turn["parent"], "finish": turn["finish"]}
    if turn["message"] is not None:
        return told | {"answer": json.loads(turn["message"])}
    if decode is not None:
        return told | {"prompt": decode(turn["prompt_ids"]), "answer": decode(turn["completion_ids"])}
    return told


def scores_of(folder: Path, environment: str) -> dict[str, float] | None:
    """avg@k and pass@k with their intervals, as the orchestrator reported them; None where it has not."""
    try:
        lines = (folder / EVALS).read_text().split("\n")[:-1]
    except FileNotFoundError:
        return None
    found = [json.loads(line) for line in lines]
    own = next((line for line in found if line["environment"] == environment), None)
    if own is None:
        return None

    def order(name: str) -> tuple[str, int, str]:
        kind, _, rest = name.partition("@")
        k, _, end = rest.partition("/")
        return kind, int(k), end

    return {name: own[name] for name in sorted((name for name in own if "@" in name), key=order)}


def lack_scores(folder: Path, environments: Iterable[str]) -> bool:
    """Whether the orchestrator still owes a report: it writes those after the journal."""
    return any(scores_of(folder, name) is None for name in environments)


@dataclass
class Tally:
    """What the summary needs of the lines of one environment."""

    rollouts: int = 0
    measured: int = 0
    truncated: int = 0
    examples: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    """Over all lines, of `prompt_tokens`, `completion_tokens` and `turns`."""
    metrics: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of values, over the lines without an error."""

    def count(self, line: dict[str, Any]) -> None:
        """Of a line of `results.jsonl`."""
        self.rollouts += 1
        self.truncated += line["truncated"]
        self.examples.add(line["example"])
        for name in SUMMED:
            self.sums[name] += line[name]
        if line["error"] is not None:
            self.errors[line["error"]] += 1
            return
        self.measured += 1
        for name, value in line["metrics"].items():
            total, number = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + value, number + 1)

    def summary(self, scores: dict[str, float] | None) -> dict[str, Any]:
        return {
            "rollouts": self.rollouts,
            "examples": len(self.examples),
            "measured": self.measured,
            "errors": dict(sorted(self.errors.items())),
            "scores": scores,
            "metrics": {name: total / number for name, (total, number) in sorted(self.metrics.items())},
            **{name: self.sums[name] / self.rollouts if self.rollouts else None for name in SUMMED},
            "truncated": self.truncated,
        }


def table(summary: dict[str, Any]) -> str:
    """A row an environment and score; for a terminal of 80 columns and more."""
    rows = [("environment", "score", "mean", "95 % interval", "rollouts", "errors", "tokens")]
    for name, found in summary["environments"].items():
        errors = ", ".join(f"{count} {kind}" for kind, count in found["errors"].items()) or "0"
        tokens = "-" if found["completion_tokens"] is None else f"{found['completion_tokens']:.1f}"
        # Failures alone are no score.
        scores = (found["scores"] or {}) if found["measured"] else {}
        plain = [score for score in scores if "/" not in score] or ["-"]
        for number, score in enumerate(plain):
            low, high = scores.get(f"{score}/low"), scores.get(f"{score}/high")
            interval = "-" if low is None or high is None else f"{low:.3f} to {high:.3f}"
            mean = f"{scores[score]:.3f}" if score in scores else "-"
            rest = (str(found["rollouts"]), errors, tokens) if number == 0 else ("", "", "")
            rows.append((name if number == 0 else "", score, mean, interval, *rest))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def is_measured(summary: dict[str, Any]) -> bool:
    """Whether any rollout was."""
    return any(found["measured"] for found in summary["environments"].values())


def errors_of(folder: Path) -> str | None:
    """What most of the rollouts that failed said, in a line."""
    said: Counter[str] = Counter()
    with (folder / RESULTS).open() as file:
        for text in file:
            line = json.loads(text)
            if line["error"] is not None:
                said[f"{line['error']}: {line['message']}"] += 1
    return said.most_common(1)[0][0] if said else None
