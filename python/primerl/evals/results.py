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
from primerl.config.process_files.files import write_parts, write_text
from primerl.launch.preflight.output_folder import holds_run
from primerl.process.redaction import redacted

RESULTS, SUMMARY, EVALS = "results.jsonl", "summary.json", "evals.jsonl"
# Numbers of a line whose means are in the summary.
SUMMED = ("prompt_tokens", "completion_tokens", "turns")
# Keys of a line of evals.jsonl that are no scores.
TOLD = ("expected", "unmeasured", "complete")
# With a larger share of failures, scores say more about the evaluation than about the model.
ERRORS_TOLD = 0.02
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
    own = {name: tally.summary(report_of(folder, name)) for name, tally in tallies.items()}
    if measured.get("finished"):
        for found in own.values():
            # Nothing is reported where nothing had ended.
            found["complete"] = found["scores"] is not None and found.get("complete", True)
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
        "error": rollout["error_kind"],
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


def reports(folder: Path) -> list[dict[str, Any]]:
    """What the orchestrator has reported, a line an environment."""
    try:
        lines = (folder / EVALS).read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Counts:
    """Rollouts of an environment whose evaluation is over."""

    measured: int
    failed: int
    unmeasured: int


def counts(folder: Path) -> list[Counts]:
    return [
        Counts(line["rollouts"] - line["failed"], line["failed"], line.get("unmeasured", 0)) for line in reports(folder)
    ]


def report_of(folder: Path, environment: str) -> dict[str, Any] | None:
    """None if the orchestrator has not reported."""
    return next((line for line in reports(folder) if line["environment"] == environment), None)


def scores_of(own: dict[str, Any] | None) -> dict[str, float] | None:
    """avg@k and pass@k with their intervals, of a report; None where there is none."""
    if own is None:
        return None

    def order(name: str) -> tuple[str, int, str]:
        kind, _, rest = name.partition("@")
        k, _, end = rest.partition("/")
        return kind, int(k), end

    return {name: own[name] for name in sorted((name for name in own if "@" in name), key=order)}


def lack_scores(folder: Path, environments: Iterable[str]) -> bool:
    """Whether the orchestrator still owes a report: it writes those after the journal."""
    return any(report_of(folder, name) is None for name in environments)


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
        """From a line of `results.jsonl`."""
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

    def summary(self, report: dict[str, Any] | None) -> dict[str, Any]:
        """`report`: what the orchestrator says of all of them, once it does."""
        told = {} if report is None else {name: report[name] for name in TOLD if name in report}
        return {
            "rollouts": self.rollouts,
            **told,
            "examples": len(self.examples),
            "measured": self.measured,
            "errors": dict(sorted(self.errors.items())),
            "scores": scores_of(report),
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
            rest = (rollouts_of(found), errors, tokens) if number == 0 else ("", "", "")
            rows.append((name if number == 0 else "", score, mean, interval, *rest))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def rollouts_of(found: dict[str, Any]) -> str:
    """`72`, or `32 of 72` where the others were not measured."""
    return f"{found['rollouts']} of {found['expected']}" if found.get("unmeasured") else str(found["rollouts"])


def is_measured(summary: dict[str, Any]) -> bool:
    """Whether any rollout was measured."""
    return any(found["measured"] for found in summary["environments"].values())


def is_complete(summary: dict[str, Any]) -> bool:
    """Whether an evaluation that is over has measured all that there was."""
    return all(found.get("complete", True) for found in summary["environments"].values())


def warnings(folder: Path, summary: dict[str, Any]) -> Iterator[str]:
    """What the scores of an evaluation that is over do not say: that much of it failed, or was not measured."""
    for name, found in summary["environments"].items():
        failed, rollouts = sum(found["errors"].values()), found["rollouts"]
        if found["measured"] and failed > rollouts * ERRORS_TOLD:
            yield (
                f"warning: {failed} of {rollouts} rollouts of {name!r} failed and count with reward 0, most with "
                f"{errors_of(folder, name)}; the same command with --retry-errors measures them again"
            )
        if not found.get("complete", True):
            late = f"{found['unmeasured']} of {found['expected']}" if found.get("unmeasured") else "all"
            yield (
                f"incomplete: of {name!r} {late} rollouts had not ended by timeouts.evaluation_s: the scores are of "
                "those that had; the same command with --retry-errors, and a later end, measures the others"
            )


def errors_of(folder: Path, environment: str | None = None) -> str | None:
    """What most of the rollouts that failed said, in a line; of one environment, or of all."""
    said: Counter[str] = Counter()
    with (folder / RESULTS).open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            if line["error"] is not None and environment in (None, line["environment"]):
                said[f"{line['error']}: {line['message']}"] += 1
    return said.most_common(1)[0][0] if said else None
