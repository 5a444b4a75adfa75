"""Runs compared: what differs in their configs, what evaluations say of both, checkpoints and costs.

`primerl run compare` prints it and `primerl dashboard` shows it. Everything is read from the runs' folders; whatever
cannot be read is named, and the rest is shown.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl._core import RunCurves
from primerl.launch.report import summary
from primerl.process.redaction import MARK, redacted
from primerl.runs.registry import Run

SCORE = re.compile(r"(avg|pass)@\d+")
SECRET = re.compile(r"(^|[._-])(api[_-]?key|key|token|password|secret|credentials?|authorization)$", re.IGNORECASE)
"""Last part of a key whose value is never shown. Names of variables (`api_key_env`) are not."""
VARIABLES = re.compile(r"(^|\.)(env_vars|variables|headers|environment_variables)\.")
"""Tables whose values are given to processes or servers: any may be a secret."""
REWARD = "reward"
Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """A mean over examples, with the ends of its interval of 95 %; None where there is none (a single example)."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    by: float
    low: float | None
    high: float | None

    @property
    def is_significant(self) -> bool | None:
        """Whether 0 is outside of the interval; None where there is none."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def difference(before: Score, after: Score) -> Difference:
    """`after - before` with its interval of 95 %, made of the intervals of both.

    With means a and b, and their intervals (la, ua) and (lb, ub), it is
    `b - a - sqrt((b - lb)**2 + (ua - a)**2)` to `b - a + sqrt((ub - b)**2 + (a - la)**2)`: Newcombe's hybrid score
    interval (Statistics in Medicine 17:873, 1998, method 10), which Zou and Donner (Statistics in Medicine 27:1693,
    2008) extend to any two independent estimates. Where both were measured on the same examples, the difference is
    known better than this says: it errs on the side of "not significant".
    """
    by = after.mean - before.mean
    ends = (before.low, before.high, after.low, after.high)
    if any(end is None or not math.isfinite(end) for end in ends):
        return Difference(by, None, None)
    la, ua, lb, ub = (float(end) for end in ends if end is not None)
    down = math.hypot(after.mean - lb, ua - before.mean)
    up = math.hypot(ub - after.mean, before.mean - la)
    return Difference(by, by - down, by + up)


def config_of(run: Run) -> tuple[Config, str | None]:
    """Its stored config by dotted key, without secrets; and why there is none."""
    try:
        text = run.config.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return {}, f"its stored config cannot be read: {error}"
    try:
        return flat(tomllib.loads(text)), None
    except tomllib.TOMLDecodeError as error:
        return {}, f"its stored config, {run.config}, is damaged: {error}"


def flat(config: Config) -> Config:
    """Values by dotted key; entries of a list of tables by their name or id, or else by their number."""
    found: Config = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value):
                name = str(one.get("name") or one.get("id") or number)
                taken = any(known.startswith(f"{prefix}[{name}].") for known in found)
                add(f"{prefix}[{number if taken else name}]", one)
        else:
            found[prefix] = hidden(prefix, value)

    add("", config)
    return found


def hidden(key: str, value: Any) -> Any:
    if value not in (None, "") and (SECRET.search(key) or VARIABLES.search(key)):
        return MARK
    return redacted(json.loads(json.dumps(value, default=str)))


def differing(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """`{key, values}` of every key that is not alike in all; a missing one is None. Secrets look alike."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [{"key": key, "values": [config.get(key) for config in configs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def evaluations_of(curves: RunCurves) -> list[dict[str, Any]]:
    """Lines of `evals.jsonl`, the newest last; those that are not as a run writes them are omitted."""
    lines = json.loads(curves.evaluations())["evaluations"]
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("environment"), str)]


def newest(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last evaluation of each environment that was measured whole; the last one where none was."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        known = found.get(line["environment"])
        if known is None or line.get("complete") is not False or known.get("complete") is False:
            found[line["environment"]] = line
    return found


def scores(line: dict[str, Any]) -> dict[str, Score]:
    """By name, the mean reward first, which has the interval of `avg@n`."""
    found = {}
    for name, value in line.items():
        if not SCORE.fullmatch(name) or not _is_number(value):
            continue
        low, high = line.get(f"{name}/low"), line.get(f"{name}/high")
        shown = REWARD if name.startswith("avg@") else name
        found[shown] = Score(value, low if _is_number(low) else None, high if _is_number(high) else None)
    if REWARD not in found and _is_number(line.get("mean_reward")):
        found[REWARD] = Score(line["mean_reward"], None, None)
    return dict(sorted(found.items(), key=lambda one: (one[0] != REWARD, len(one[0]), one[0])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def version_of(line: dict[str, Any]) -> Any:
    return line.get("version", line.get("policy_at_the_time"))


def cost(folder: Path, curves: RunCurves) -> dict[str, float | None]:
    """Seconds, tokens, CPU and GPU hours, over all sessions whose launchers wrote a summary; None of what is not known.

    GPU hours are wall time times the GPUs that the launcher gave to the run's processes, busy or not.
    """
    try:
        content = json.loads((folder / summary.FILE).read_bytes())
        sums = summary.sums(content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        sums = {}
    trained = json.loads(curves.curves(["progress/num_tokens"], points=3))["curves"]["progress/num_tokens"]["y"]
    hours = 3600.0
    return {
        "wall_s": sums.get("wall_s"),
        "sampled_tokens": sums.get("sampled_tokens"),
        "trained_tokens": trained[-1] if trained else None,
        "cpu_hours": sums["cpu_s"] / hours if sums.get("cpu_s") is not None else None,
        "gpu_hours": sums["gpu_s"] / hours if sums.get("gpu_s") is not None else None,
    }


def checkpoints(folder: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`{step, kinds, ready, bytes, scores}` by step: what is saved, with evaluations of that very version."""
    from primerl.runs.saved import local_checkpoints

    by_step: dict[int, dict[str, Any]] = {}
    for saved in local_checkpoints(folder):
        row = by_step.setdefault(saved.step, {"step": saved.step, "kinds": [], "ready": True, "bytes": 0, "scores": {}})
        row["kinds"].append(saved.kind)
        row["ready"] = row["ready"] and saved.ready
        row["bytes"] += saved.bytes
    for line in lines:
        version = version_of(line)
        if isinstance(version, int) and version in by_step:
            by_step[version]["scores"][line["environment"]] = as_json(scores(line))
    return [by_step[step] for step in sorted(by_step)]


def as_json(found: dict[str, Score]) -> dict[str, dict[str, float | None]]:
    return {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in found.items()}


def side_by_side(lines: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """`{environment, score, values, differences}` of the newest evaluation of each run, in the order of `lines`.

    A value is `{mean, low, high, version, rollouts, complete}` or None; a difference is `{by, low, high, significant}`
    to the first run that has the score, and None for that one.
    """
    measured = [newest(one) for one in lines]
    rows = []
    for environment in dict.fromkeys(name for one in measured for name in one):
        given = [one.get(environment) for one in measured]
        found = [scores(line) if line else {} for line in given]
        for name in dict.fromkeys(name for one in found for name in one):
            first = next(one[name] for one in found if name in one)
            values, differences = [], []
            for line, one in zip(given, found, strict=True):
                score = one.get(name)
                values.append(None if score is None or line is None else _value(score, line))
                differences.append(None if score is None or score is first else _told(difference(first, score)))
            rows.append({"environment": environment, "score": name, "values": values, "differences": differences})
    return rows


def _value(score: Score, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "mean": score.mean,
        "low": score.low,
        "high": score.high,
        "version": version_of(line),
        "rollouts": line.get("rollouts"),
        "complete": line.get("complete") is not False,
    }


def _told(found: Difference) -> dict[str, Any]:
    return {"by": found.by, "low": found.low, "high": found.high, "significant": found.is_significant}
