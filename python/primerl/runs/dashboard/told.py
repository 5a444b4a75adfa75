"""Answers about runs, as JSON: `primerl dashboard` shows them, and `primerl run compare` prints them.

What is wrong with one run is in its `problem`; the others are shown as usual.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from primerl._core import RunCurves
from primerl.launch.secrets import note_of_run
from primerl.process.redaction import redact
from primerl.runs import compare, listings
from primerl.runs.costs import cost
from primerl.runs.dashboard.sources import SourceError, Sources
from primerl.runs.listings import UnknownExampleError, environments_of, number_in
from primerl.runs.registry import Registry, Run, UnknownRunError
from primerl.runs.standing import PENDING, RUNNING, in_a_line, standing, summary_of

REWARD = "reward/all/mean"
ENDS = 5
"""Steps that a run's reward is the mean of."""
READERS = 4
LISTED_S = 1.0
"""How long the list is used again, for all who look."""
MOST_RUNS = 30
"""Curves that can be distinguished."""
MOST_NAMES = 16
MOST_ROLLOUTS = 200
UNSURE = "what is shown has the same number, and may be another example"
HAS_NO_KEYS = "has no keys of its examples, as runs of earlier versions"


def listed(run: Run) -> dict[str, Any]:
    """A line of the list; times are seconds since 1970."""
    try:
        how = standing(run)
        status, reason, step = how.status, redact(how.reason), how.step
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        status, reason, step = "UNKNOWN", f"its folder cannot be looked at: {error}", None
    return {
        "id": run.id,
        "name": run.name,
        "kind": run.kind,
        "status": status,
        "reason": reason,
        "reason_line": in_a_line(reason),
        "step": step,
        "model": run.model,
        "environments": run.environments,
        "output_dir": str(run.output_dir),
        "started": run.started,
        "ended": run.ended,
    }


def compared(runs: Sequence[Run], sources: Sources | None = None) -> dict[str, Any]:
    """`{runs, config, evaluations}`: what differs between these runs, by the order in which they are given.

    A run is `{id, name, status, step, reward, cost, checkpoints, health, health_steps, problem, ...}`: its health, what
    rules find in so many steps, is None where its files cannot be read. For `config` and `evaluations` see
    [`differing`][primerl.runs.compare.differing] and [`side_by_side`][primerl.runs.compare.side_by_side].
    """
    sources = sources or Sources()
    with ThreadPoolExecutor(READERS) as pool:
        told = list(pool.map(lambda run: _told(run, sources), runs))
    folders = [run.output_dir for run in runs]
    configs, lines = [one.pop("_config") for one in told], [one.pop("_evaluations") for one in told]
    # A config that cannot be read does not differ in everything.
    known = [config for config in configs if config]
    rows = compare.differing(known) if len(known) > 1 else []
    places = [number for number, config in enumerate(configs) if config]
    for row in rows:
        values = dict(zip(places, row["values"], strict=True))
        row["values"] = [values.get(number) for number in range(len(runs))]
    return {"runs": told, "config": rows, "evaluations": compare.side_by_side(lines, folders)}


def _told(run: Run, sources: Sources) -> dict[str, Any]:
    found: dict[str, Any] = {
        **listed(run),
        "reward": None,
        "cost": {},
        "checkpoints": [],
        "health": None,
        "health_steps": None,
    }
    config, problem = compare.config_of(run)
    problems = [problem]
    lines: list[dict[str, Any]] = []
    try:
        curves = sources.curves(run.output_dir)
        read = json.loads(curves.curves([]))
        lines = compare.evaluations_of(curves)
        found["reward"] = _last_reward(curves, read["steps"][1])
        found["cost"] = cost(run.output_dir)
        found["checkpoints"] = compare.checkpoints(run.output_dir, lines)
        health = json.loads(curves.health())
        found["health"], found["health_steps"] = health["findings"], health["steps"]
        problems.append(_wrong_with_files(run, read, found["status"]))
    except SourceError as error:
        problems.append(str(error))
    except OSError as error:  # its files vanish while they are read, or are not this user's
        problems.append(f"its files cannot be read: {error}")
    told = "; ".join(filter(None, problems))
    return {**found, "problem": redact(told) or None, "_config": config, "_evaluations": lines}


def _wrong_with_files(run: Run, read: dict[str, Any], status: str) -> str | None:
    """`read`: of `RunCurves.curves`."""
    told = damage(read["damaged"], is_over=is_over(status)), cut_short(run, read["last"])
    return "; ".join(filter(None, told)) or None


def is_over(status: str) -> bool:
    return status not in (PENDING, RUNNING)


def damage(files: Sequence[dict[str, Any]], *, is_over: bool) -> str | None:
    """What is wrong with a run's files, of `RunCurves.curves`; None where nothing is. `is_over`: nothing is written any
    more, so a file ends with a whole line."""
    return "; ".join(filter(None, (_damage(one, is_over=is_over) for one in files))) or None


def _damage(file: dict[str, Any], *, is_over: bool) -> str | None:
    found = []
    if file["lines"] == 1:
        found.append(f"line {file['first']} is not as a run writes it, and omitted")
    elif file["lines"]:
        which = f"{file['lines']} lines, the first of them line {file['first']}"
        found.append(f"{which}, are not as a run writes them, and omitted")
    if file["missing"] == 1:
        found.append(f"step {file['first_missing']} is missing")
    elif file["missing"]:
        found.append(f"{file['missing']} steps are missing, the first of them {file['first_missing']}")
    if file["is_cut"] and is_over:
        found.append("it ends within a line, which is omitted")
    return f"its {file['file']} is damaged: {', '.join(found)}" if found else None


def cut_short(run: Run, last: dict[str, int]) -> str | None:
    """Whether its files end before the last step, in a run that has finished. Of others nothing is certain: a trainer
    may end between a policy and its line, and one that resumes drops the lines after its checkpoint, while the policies
    of before stay published. `last`: where the files end, of `RunCurves.curves`; a script that speaks HTTP by itself
    need not write any."""
    summary = summary_of(run) or {}
    if summary.get("exit_code") != 0:
        return None
    seen = (summary.get("status") or {}).get("run") or {}
    known = {"metrics.jsonl": seen.get("published_version"), "steps.jsonl": seen.get("step")}
    ends = ((file, step, known[file]) for file, step in last.items())
    found = [f"its {file} is damaged: it ends with step {at} of {of}" for file, at, of in ends if of and at < of]
    return "; ".join(found) or None


def _last_reward(curves: RunCurves, last: int | None) -> float | None:
    if last is None:
        return None
    values = json.loads(curves.curves([REWARD], first=max(0, last - ENDS + 1)))["curves"][REWARD]["y"]
    return sum(values) / len(values) if values else None


class Board:
    """Answers of the dashboard. Threads may share it."""

    def __init__(self) -> None:
        self.sources = Sources()
        self._lock = threading.Lock()
        self._listed: tuple[float, list[Run], list[dict[str, Any]]] | None = None
        self._noted: set[Path] = set()
        self._pool = ThreadPoolExecutor(READERS)

    def runs(self) -> list[dict[str, Any]]:
        """The newest first. Raises StateError where the list cannot be read."""
        return self._list()[1]

    def _list(self) -> tuple[list[Run], list[dict[str, Any]]]:
        with self._lock:
            if self._listed is None or time.monotonic() - self._listed[0] > LISTED_S:
                with Registry(reading=True) as registry:
                    runs = registry.all()
                for run in runs:
                    if run.output_dir not in self._noted:
                        self._noted.add(run.output_dir)
                        note_of_run(run.output_dir)
                self._listed = (time.monotonic(), runs, [listed(run) for run in runs])
            return self._listed[1:]

    def chosen(self, ids: Sequence[str]) -> list[Run]:
        """Runs by their ids. Raises UnknownRunError, StateError."""
        known = {run.id: run for run in self._list()[0]}
        for given in ids:
            if given not in known:
                raise UnknownRunError(f"run {given!r} does not exist, or was removed")
        return [known[given] for given in ids]

    def curves(self, runs: Sequence[Run], names: list[str], *, first: int, last: int, points: int) -> dict[str, Any]:
        """`{steps: [first, last], names, runs: {id: {name: {x, y, mean}}}, problems: {id: why}}`."""

        def read(run: Run) -> dict[str, Any]:
            curves = self.sources.curves(run.output_dir)
            return dict(json.loads(curves.curves(names, first=first, last=last, points=points)))

        found, problems = self._each(runs, read)
        status = {one["id"]: one["status"] for one in self.runs()}
        for run in runs:
            if run.id in found:
                wrong = _wrong_with_files(run, found[run.id], status.get(run.id, RUNNING))
                if wrong is not None:
                    problems[run.id] = wrong
        bounds = [step for one in found.values() for step in one["steps"] if step is not None]
        return {
            "steps": [min(bounds), max(bounds)] if bounds else [None, None],
            "names": sorted({name for one in found.values() for name in one["names"]}),
            "runs": {run: one["curves"] for run, one in found.items()},
            "problems": problems,
        }

    def compared(self, runs: Sequence[Run]) -> dict[str, Any]:
        return compared(runs, self.sources)

    def rollouts(
        self, runs: Sequence[Run], *, environment: str, example: int | None, of: Run | None, limit: int
    ) -> dict[str, Any]:
        """`{environments, runs: {id: page's list}, problems: {id: why}}`: rollouts of an environment, and of one
        example of it: the one that has this number in the run `of`, whatever it is in the others.

        Raises UnknownExampleError where that run has no such example."""
        query: dict[str, Any] = {"limit": limit}
        query |= {"environment": environment} if environment else {}
        key, why = self._key(of, environment, example)
        unsure: dict[str, str] = {}

        def read(run: Run) -> Any:
            number = example
            if of is not None and environment and example is not None and run.id != of.id:
                found = None if key is None else number_in(run.output_dir, environment, key)
                if found is None:
                    unsure[run.id] = f"{why or f'it {HAS_NO_KEYS}'}: {UNSURE}"
                number = example if found is None else found
            elif environment and example is not None and (known := listings.listed(run.output_dir, environment)):
                known.check(environment, example)
            wanted = query | ({"example": number} if number is not None else {})
            return json.loads(self.sources.ask(run.output_dir, f"/page/rollouts?{urlencode(wanted)}"))

        found, problems = self._each(runs, read)
        problems |= {run: why for run, why in unsure.items() if run in found}
        problems |= {
            run: f"the journal cannot be read: {one['problem']}" for run, one in found.items() if one["problem"]
        }
        environments = {name for run in runs for name in (*run.environments, *environments_of(run.output_dir))}
        return {"environments": sorted(environments), "runs": found, "problems": problems}

    @staticmethod
    def _key(of: Run | None, environment: str, example: int | None) -> tuple[str | None, str | None]:
        """The key of the example that has this number in the run `of`; or why it is not known."""
        if of is None or not environment or example is None:
            return None, None
        if not of.output_dir.is_dir():
            return None, f"the example is not known, because the folder of {of.id}, {of.output_dir}, is gone"
        known = listings.listed(of.output_dir, environment)
        if known is None:
            return None, f"{of.id} {HAS_NO_KEYS}"
        known.check(environment, example)
        if example >= len(known.keys):
            return None, f"only the first {len(known.keys)} examples of {of.id} are known by what they are"
        return known.keys[example], None

    def _each(self, runs: Sequence[Run], read: Callable[[Run], Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """What is read of each, and why it cannot be."""

        def one(run: Run) -> tuple[Any, str | None]:
            try:
                return read(run), None
            except (SourceError, UnknownExampleError) as error:
                return None, redact(str(error))
            except OSError as error:
                return None, redact(f"its files cannot be read: {error}")

        answers = dict(zip([run.id for run in runs], self._pool.map(one, runs), strict=True))
        found = {run: answer for run, (answer, problem) in answers.items() if problem is None}
        return found, {run: problem for run, (_, problem) in answers.items() if problem is not None}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.sources.close()
