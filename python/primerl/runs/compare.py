"""Runs compared: what differs in their configs, what evaluations say of both, checkpoints and costs.

`primerl run compare` prints it and `primerl dashboard` shows it. Everything is read from the runs' folders; whatever
cannot be read is named, and the rest is shown.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from primerl._core import RunCurves
from primerl.process.redaction import MARK, redacted
from primerl.runs.differences import Difference, Score, by_intervals, by_pairs
from primerl.runs.examples import Examples, Key, examples_of, paired
from primerl.runs.registry import Run

SCORE = re.compile(r"(avg|pass)@\d+")
SECRET = re.compile(r"(^|[._-])(api[_-]?key|key|token|password|secret|credentials?|authorization)$", re.IGNORECASE)
"""Last part of a key whose value is never shown. Names of variables (`api_key_env`) are not."""
VARIABLES = re.compile(r"(^|\.)(env_vars|variables|headers|environment_variables)\.")
"""Tables whose values are given to processes or servers: any may be a secret."""
REWARD = "reward"
Config = dict[str, Any]


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
        if isinstance(value, dict):  # an empty table says what a missing one does
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


def checkpoints(folder: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`{step, kinds, ready, bytes, scores}` by step: what is saved, with evaluations of that very version."""
    from primerl.runs.saved import local_checkpoints

    by_step: dict[int, dict[str, Any]] = {}
    for saved in local_checkpoints(folder):
        row = by_step.setdefault(saved.step, {"step": saved.step, "kinds": [], "ready": True, "bytes": 0, "scores": {}})
        row["kinds"].append(saved.kind)
        row["ready"] = row["ready"] and saved.ready
        row["bytes"] += saved.bytes
    measured = scores_by_version(lines)
    for step, row in by_step.items():
        row["scores"] = measured.get(step, {})
    return [by_step[step] for step in sorted(by_step)]


def scores_by_version(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """`{version: {environment: {score: {mean, low, high}}}}`; the last one where a version was measured again."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        version = version_of(line)
        if isinstance(version, int):
            found.setdefault(version, {})[line["environment"]] = as_json(scores(line))
    return found


def as_json(found: dict[str, Score]) -> dict[str, dict[str, float | None]]:
    return {name: {"mean": one.mean, "low": one.low, "high": one.high} for name, one in found.items()}


def side_by_side(lines: Sequence[list[dict[str, Any]]], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """`{environment, score, values, differences}` of the newest evaluation of each run, in the order of `lines`.

    A value is `{mean, low, high, version, rollouts, complete}` or None. A difference is to the first run that has the
    score, and None for that one: `{by, low, high, significant, test, p, pairs, unpaired}`. Where both measured the same
    examples it is tested by pairs of them; `unpaired` says why it is not.
    """
    measured = [newest(one) for one in lines]
    rows = []
    for environment in dict.fromkeys(name for one in measured for name in one):
        given = [one.get(environment) for one in measured]
        found = [scores(line) if line else {} for line in given]
        kept = [
            examples_of(folder, line, version_of(line)) if line else None
            for folder, line in zip(folders, given, strict=True)
        ]
        for name in dict.fromkeys(name for one in found for name in one):
            first = next(number for number, one in enumerate(found) if name in one)
            values, differences = [], []
            for number, (line, one) in enumerate(zip(given, found, strict=True)):
                score = one.get(name)
                is_compared = score is not None and number != first
                values.append(None if score is None or line is None else _value(score, line))
                differences.append(_difference(name, found, kept, first, number) if is_compared else None)
            rows.append({"environment": environment, "score": name, "values": values, "differences": differences})
    return rows


def _difference(
    name: str, found: Sequence[dict[str, Score]], kept: Sequence[Examples | None], first: int, number: int
) -> dict[str, Any]:
    pairs = paired(_examples(kept[first], name), _examples(kept[number], name))
    if isinstance(pairs, str):
        return _told(by_intervals(found[first][name], found[number][name]), pairs)
    return _told(by_pairs(*pairs), None)


def _examples(kept: Examples | None, name: str) -> Mapping[Key, float]:
    """The mean reward has the name of `avg@n`, whatever n is."""
    if kept is None:
        return {}
    own = next((one for one in kept.scores if one.startswith("avg@")), name) if name == REWARD else name
    return kept.of(own)


def _value(score: Score, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "mean": score.mean,
        "low": score.low,
        "high": score.high,
        "version": version_of(line),
        "rollouts": line.get("rollouts"),
        "complete": line.get("complete") is not False,
    }


def _told(found: Difference, unpaired: str | None) -> dict[str, Any]:
    return {
        "by": found.by,
        "low": found.low,
        "high": found.high,
        "significant": found.is_significant,
        "test": found.test,
        "p": found.p,
        "pairs": found.pairs,
        "unpaired": unpaired,
    }
