"""`primerl report`: a table, the reward curve in the terminal, and reward.png, from what a run wrote.

Sources: `metrics.jsonl` (trainer, one line a step), `evals.jsonl` (orchestrator, one line an evaluation) and
`run/summary.json` (launcher: times, CPU seconds of each process, the last status; sums over the sessions before).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl._core import run_health
from primerl.launch.report import summary
from primerl.launch.report.evaluations import mark
from primerl.process.extras import described
from primerl.runs.standing import INTERRUPTED

# Steps averaged at both ends: single steps are noisy.
ENDS = 5
STALENESS = re.compile(r"^staleness/(\d+)$")


class NoRunError(Exception):
    """There is nothing to report: the message says why, and what to do."""


class DamagedRunError(Exception):
    """A file that a run does not write like this. The message names file, line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Results:
    folder: Path
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]

    def column(self, name: str) -> list[float]:
        return [float(step[name]) for step in self.steps if step.get(name) is not None]


def load(folder: Path) -> Results:
    steps = read_lines(folder / "metrics.jsonl")
    summary_file = folder / "run" / "summary.json"
    sessions = parse(summary_file.read_bytes(), str(summary_file)) if summary_file.is_file() else {}
    if not steps:
        raise NoRunError(without_a_step(folder, sessions))
    results = Results(folder, steps, read_lines(folder / "evals.jsonl"), sessions)
    check(results)
    return results


def without_a_step(folder: Path, sessions: dict[str, Any]) -> str:
    """Why there is no step to report, and where to look."""
    if (folder / "configs" / "eval.toml").is_file():
        return (
            f"{folder} holds an evaluation, which trains no step; its scores are in {folder / 'summary.json'}, and its "
            f"rollouts in {folder / 'results.jsonl'}"
        )
    traced = (folder / "journal").is_dir()
    more = f"; `primerl trace {folder} --dropped` tells what became of its rollouts" if traced else ""
    if ended := ending(sessions):
        return f"{folder}: no step was trained; the run {ended}{more}"
    if traced:
        return f"{folder}: no step is trained yet, and no launcher has written how the run ended{more}"
    return f"{folder} holds no finished step (no metrics.jsonl); give the output_dir of a run"


def ending(sessions: dict[str, Any]) -> str:
    """How the run's last session ended, in a line; empty where that was not written."""
    code, wall_s = sessions.get("exit_code"), sessions.get("wall_s")
    if not isinstance(code, int):
        return ""
    # What follows is the end of a log.
    why = str(sessions.get("reason", "")).partition("\n")[0]
    how = "finished" if code == 0 else "was stopped" if code in INTERRUPTED else "failed"
    after = f" after {wall_s:.0f} s" if isinstance(wall_s, int | float) else ""
    return f"{how}{after}" + (f": {why}" if why and code != 0 else "")


def check(results: Results) -> None:
    """Makes the table of each line by itself, so that a value that does not fit is found with its line."""
    for number, step in enumerate(results.steps, start=1):
        with _damage(f"{results.folder / 'metrics.jsonl'}, line {number}"):
            if not isinstance(step["step"], int):
                raise TypeError(f"step is {step['step']!r}, no number")
            rows(Results(results.folder, [step], [], {}))
    for number, evaluation in enumerate(results.evaluations, start=1):
        with _damage(f"{results.folder / 'evals.jsonl'}, line {number}"):
            _evaluations(replace(results, evaluations=[evaluation]))
    with _damage(str(results.folder / "run" / "summary.json")):
        rows(replace(results, evaluations=[]))


@contextlib.contextmanager
def _damage(where: str) -> Iterator[None]:
    """JSON that is sound and not what a run writes is found where its values are used."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise DamagedRunError(f"{where}: {problem}; it is not as a run wrote it") from None


def read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    # A run that was killed may have left half a last line.
    lines = file.read_bytes().split(b"\n")[:-1]
    return [parse(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1) if line]


def parse(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # UTF-8 too
        raise DamagedRunError(f"{where}: not JSON: {error}; it is not as a run wrote it") from None
    if not isinstance(found, dict):
        raise DamagedRunError(f"{where}: not a JSON object; it is not as a run wrote it")
    return found


def rows(results: Results) -> list[tuple[str, str]]:
    """What the table shows: name and value."""
    found = [("steps", str(results.steps[-1].get("step", len(results.steps))))]
    if results.summary.get("exit_code"):
        found.append(("the run", ending(results.summary)))
    found += _reward(results) + _evaluations(results) + _speed(results)
    histogram = staleness(results)
    if histogram:
        total = sum(histogram.values())
        shares = "  ".join(f"{lag}: {count / total:.0%}" for lag, count in sorted(histogram.items()))
        found.append(("staleness (share of samples)", shares))
    return found + _shares(results)


def _reward(results: Results) -> list[tuple[str, str]]:
    reward = results.column("reward/all/mean")
    if not reward:
        return []
    count = min(ENDS, len(reward))
    return [
        (f"reward, first {count} steps", f"{mean(reward[:count]):.3f}"),
        (f"reward, last {count} steps", f"{mean(reward[-count:]):.3f}"),
    ]


def _evaluations(results: Results) -> list[tuple[str, str]]:
    by_environment: dict[str, list[dict[str, Any]]] = {}
    for evaluation in results.evaluations:
        by_environment.setdefault(str(evaluation["environment"]), []).append(evaluation)
    found = []
    for name, evaluations in by_environment.items():
        first, last = evaluations[0], evaluations[-1]
        values = {"reward": "mean_reward"}
        measured = {metric: (first["metrics"].get(metric), last["metrics"][metric]) for metric in last["metrics"]}
        passes = {score: (first.get(score), last[score]) for score in last if re.fullmatch(r"pass@\d+", score)}
        measured = {"reward": (first[values["reward"]], last[values["reward"]]), **passes, **measured}
        averaged = next((score for score in last if re.fullmatch(r"avg@\d+", score)), "")
        for metric, (before, after) in measured.items():
            text = f"{after:.3f}" if before is None or first is last else f"{before:.3f} -> {after:.3f}"
            text += _interval(last, averaged if metric == "reward" else metric)
            found.append((f"{name}, {metric} ({_measured(first, last)})", text))
    return found


def _interval(evaluation: dict[str, Any], score: str) -> str:
    """That of 95 %, where the evaluation has one. It need not be as wide to both sides: scores have bounds."""
    low, high = evaluation.get(f"{score}/low"), evaluation.get(f"{score}/high")
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _measured(first: dict[str, Any], last: dict[str, Any]) -> str:
    """Which policy, or which other model, and how much of what there was to be measured where that is not all."""
    if "model" in last:
        return f"{last['model']}{mark(last)}"
    return f"version {first['version']}{mark(first)} -> {last['version']}{mark(last)}"


def _speed(results: Results) -> list[tuple[str, str]]:
    found = []
    if results.summary:
        sums = summary.sums(results.summary)
        starts = f"start {sums['start_s']:.1f} s" if sums["sessions"] == 1 else f"{sums['sessions']} starts"
        found.append(("wall time", f"{sums['wall_s']:.1f} s ({starts})"))
        sampled = sums[summary.SAMPLED_IN_SESSIONS]
        if sampled and sums["run_s"]:
            found.append(("sampled tokens/s", f"{sampled / sums['run_s']:,.0f}"))
    throughput = results.column("perf/throughput")
    if throughput:
        found.append(("trained tokens/s (while training)", f"{mean(throughput):,.0f}"))
    computed = results.column("perf/shared_tokens")
    if computed and min(computed) < 1:
        found.append(("tokens computed (samples share the others)", f"{mean(computed):.0%}"))
    return found


def staleness(results: Results) -> dict[int, int]:
    """Samples by how many steps old their oldest token was when it was trained."""
    histogram: dict[int, int] = {}
    for step in results.steps:
        for name, count in step.items():
            match = STALENESS.match(name)
            if match and count:
                lag = int(match.group(1))
                histogram[lag] = histogram.get(lag, 0) + int(count)
    return histogram


def _shares(results: Results) -> list[tuple[str, str]]:
    found = []
    step_s, wait_s = sum(results.column("time/step")), sum(results.column("time/wait_for_batch"))
    if step_s:
        found.append(("trainer idle", f"{wait_s / step_s:.0%}"))
    status = results.summary.get("status", {})
    idle = [engine["idle_share"] for engine in status.get("engines", []) if engine.get("idle_share") is not None]
    if idle:
        found.append(("engine idle", f"{mean(idle):.0%}"))
    sums = summary.sums(results.summary) if results.summary else {}
    if sums.get("orchestrator_cpu_s"):
        share = sums["orchestrator_cpu_s"] / sums["cpu_s"]
        found.append(("orchestrator's share of CPU time", f"{share:.1%} of {sums['cpu_s']:.1f} s"))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def show(folder: Path) -> None:
    """Prints the table and the curve, and writes reward.png."""
    from rich.console import Console
    from rich.table import Table

    results = load(folder)
    table = Table(title=str(folder), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in rows(results):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    for finding in run_health(folder):
        console.print(f"! {finding['what']} ({finding['curve']})\n  {finding['advice']}", markup=False, soft_wrap=True)
    reward = results.column("reward/all/mean")
    steps = [step["step"] for step in results.steps if step.get("reward/all/mean") is not None]
    if not reward:
        return
    absent = [name for name in ("plotext", "matplotlib") if importlib.util.find_spec(name) is None]
    if absent:
        missing = f"no reward curve: {' and '.join(absent)} missing; install {described('report')}"
        console.print(missing, markup=False, soft_wrap=True)
        return
    print(curve(steps, reward, width=min(100, console.width)))
    console.print(f"reward curve: {picture(folder / 'reward.png', steps, reward)}", markup=False)


def curve(steps: list[int], reward: list[float], *, width: int, height: int = 16) -> str:
    """The reward curve as text."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title("mean reward of each step")
    figure.draw(figure.signal(steps, reward, marker="braille").lines())
    return str(figure.build().string(colorless=True))


def picture(file: Path, steps: list[int], reward: list[float]) -> Path:
    """The reward curve as a PNG. Returns where it is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display is asked for
    axes = figure.subplots()
    axes.plot(steps, reward)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, format="png")
    temporary.rename(file)
    return file
