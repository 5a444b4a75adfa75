"""`primerl top`: the page of a run, drawn for a terminal. It asks what the page asks (`docs/page.md`)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from primerl.launch.report.evaluations import mark
from primerl.net import requests
from primerl.run_key import FILE, VARIABLE, learn
from primerl.runs import report, served
from primerl.runs.registry import UnknownRunError, folder_of
from primerl.runs.state import StateError

ANSWER_S = 5.0
# A run may be busy; after so many requests without an answer it is gone.
MISSES = 5
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 28
CURVES = {
    "reward/all/mean": "reward",
    "loss/mean": "loss",
    "staleness/mean": "staleness",
    "perf/throughput": "trained tokens/s",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "KL to the engine",
    "optim/grad_norm": "gradient norm",
    "time/step": "seconds a step",
}
# Colours of states, as on the page.
COLOURS = {"busy": "green", "serves": "green", "runs": "green", "loads": "magenta", "lost": "red"}
WAITING = ("waits", "idle", "asks", "unproved")
LONGEST_WAITS = 8
EVALUATIONS = 50
# Between two facts of the headline.
GAP = 3
# What becomes of rollouts that are not trained: title, its reasons in the status, and what is not a rollout of them.
LOST = (("failed", "failures", "turn"), ("cancelled", "cancelled", ""), ("ended well, not trained", "voided", ""))


class NoRunError(Exception):
    """The message says where a run was looked for, and what to do."""


class UnreachableError(Exception):
    """The orchestrator does not answer, or not as expected."""


def find(run: str) -> str:
    """The URL of the orchestrator of a run, given as that, as the run's folder or as its id. Raises NoRunError."""
    if run.startswith(("http://", "https://")):
        return address_of(run)
    try:
        folder = folder_of(run)
    except (UnknownRunError, StateError) as error:
        raise NoRunError(str(error)) from None
    if (server := served.noted_url(folder)) is not None:
        raise NoRunError(f"{folder} is of a server of the Tinker API, which has a page of its own: {server}/")
    file = folder / "run" / "orchestrator.json"
    try:
        url = str(json.loads(file.read_text(encoding="utf-8"))["url"])
    except FileNotFoundError:
        raise NoRunError(f"no orchestrator was started in {folder}: there is no {file}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoRunError(f"{file} cannot be read: {error}") from None
    learn(url, folder)
    return address_of(url)


def ending(run: str) -> str:
    """How a run that does not answer ended, in a line; empty where its last launcher has not written that."""
    if run.startswith(("http://", "https://")):
        return ""
    folder = folder_of(run) / "run"
    try:
        # A summary that is older than the orchestrator is that of an earlier session.
        if (folder / "summary.json").stat().st_mtime < (folder / "orchestrator.json").stat().st_mtime:
            return ""
        sessions = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return report.ending(sessions) if isinstance(sessions, dict) else ""


def address_of(url: str) -> str:
    """The URL without a path. Raises NoRunError where it is none of an orchestrator."""
    try:
        address = urlsplit(url)
        # Read here: an invalid port raises when it is asked for.
        is_one = address.scheme == "http" and bool(address.hostname) and address.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise NoRunError(f"{url}: expected the URL of an orchestrator, http://host:port")
    return f"http://{address.netloc}"


def ask(url: str, path: str, **query: object) -> dict[str, Any]:
    """The JSON that the orchestrator answers. Raises UnreachableError."""
    try:
        code, content = requests.ask(url, path, within_s=ANSWER_S, **query)
    except requests.UnansweredError as error:
        raise UnreachableError(
            f"the run is not running: nothing answers at {url} ({error}). `primerl page OUTPUT_DIR` and "
            "`primerl report OUTPUT_DIR` show a run that is over"
        ) from None
    if code == 401:
        raise UnreachableError(f"{url} needs the run's key: set {VARIABLE} (the content of {FILE} in the run's folder)")
    if code != 200:
        said = content.get("error")
        raise UnreachableError(f"{url}{path}: {said.get('message', code) if isinstance(said, dict) else code}")
    return content


def look(url: str) -> RenderableType:
    now = ask(url, "/page/now")
    curves = ask(url, "/page/curves", names=",".join(CURVES), points=4 * WIDTH)
    measured = ask(url, "/page/evaluations", limit=EVALUATIONS)
    return frame(now, curves["curves"], url, measured["evaluations"])


def once(url: str) -> None:
    # Where the time went is read from the journal, from the first question on.
    deadline = time.monotonic() + ANSWER_S
    while not ask(url, "/page/now")["journal"]["is_up_to_date"] and time.monotonic() < deadline:
        time.sleep(0.1)
    Console().print(look(url))


def watch(url: str, interval_s: float) -> None:
    """Until Ctrl-C, or until the run is over. Raises UnreachableError when it was not there to begin with."""
    with Live(look(url), auto_refresh=False, screen=True) as live:
        missed = 0
        try:
            while missed < MISSES:
                time.sleep(interval_s)
                try:
                    live.update(look(url), refresh=True)
                    missed = 0
                except UnreachableError:
                    missed += 1
        except KeyboardInterrupt:
            return
    print(f"the run has ended, or {url} cannot be reached any more")


def frame(
    now: dict[str, Any], curves: dict[str, Any], url: str, measured: Sequence[dict[str, Any]] = ()
) -> RenderableType:
    """One picture: `now` as of /page/now, `curves` as of /page/curves, `measured` the last evaluations."""
    status = now.get("status") or {}
    evaluates = bool(now.get("only_evaluates"))
    parts: list[RenderableType] = [Text.assemble((f"{now.get('folder')}  ", "bold"), (f"{url}/", "dim"))]
    parts.append(headline(now, status))
    if not evaluates:
        parts.append(sparks(curves))
    if now.get("idle"):
        told = {**now["idle"], "trainer": None} if evaluates else now["idle"]
        parts.append(panel("where the time goes", idle(told)))
    parts.append(panel("engines", engines(status)))
    parts.append(panel("environments", environments(status)))
    if measured:
        parts.append(panel("last evaluations", evaluations(measured)))
    if found := lost(status):
        parts.append(panel("lost rollouts", found))
    parts.append(panel("who waits for what", waits(status)))
    return Group(*parts)


def panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


class Facts:
    """Names with their values, as many on a line as there is room for: none is broken in two."""

    def __init__(self, facts: Sequence[tuple[str, str]]) -> None:
        self.facts = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for fact in self.facts:
            if line and line.cell_len + GAP + fact.cell_len > options.max_width:
                yield line
                line = Text()
            line.append(" " * GAP if line else "").append(fact)
        yield line


def headline(now: dict[str, Any], status: dict[str, Any]) -> Facts:
    rollouts = status.get("rollouts", {})
    facts = [
        ("in flight", f"{rollouts.get('in_flight', 0)}/{rollouts.get('limit', 0)}"),
        ("tokens/s", f"{float(status.get('tokens', {}).get('per_second') or 0):,.0f}"),
    ]
    if now.get("only_evaluates"):
        failed = sum(sum(one.get("errors", {}).values()) for one in status.get("environments", []))
        return Facts([("measured", f"{rollouts.get('evaluated', 0):,}"), *facts, ("errors", f"{failed:,}")])
    return Facts([*trained(status), *facts])


def trained(status: dict[str, Any]) -> list[tuple[str, str]]:
    run, rollouts, step = status.get("run", {}), status.get("rollouts", {}), status.get("last_step") or {}
    return [
        ("step", f"{run.get('step', 0)}/{run.get('max_steps', '?')}"),
        ("reward", number(step.get("reward/all/mean"))),
        ("policy", "none" if run.get("policy_version") is None else f"v{run['policy_version']}"),
        ("trained", f"{rollouts.get('trained', 0):,}"),
        ("lost", f"{sum(rollouts.get(name, 0) for name in ('failed', 'stale', 'cancelled')):,}"),
    ]


def sparks(curves: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, title in CURVES.items():
        values = curves.get(name, {}).get("y", [])
        if values:
            lows, highs = number(min(values)), number(max(values))
            table.add_row(
                Text(title, style="dim"), spark(values), Text(number(values[-1]), style="bold"), f"{lows} to {highs}"
            )
    if not table.row_count:
        table.add_row(Text("no step is trained yet", style="dim"))
    return table


def spark(values: list[float], width: int = WIDTH) -> Text:
    """Means of equal stretches, between the lowest and the highest of them."""
    stretches = min(width, len(values))
    bounds = [round(at * len(values) / stretches) for at in range(stretches + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return Text("".join(BLOCKS[round((mean - low) * scale)] for mean in means), style="cyan")


def idle(idle: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [] if idle["trainer"] is None else [("trainer", idle["trainer"])]
    rows += [(f"engine {engine['engine']}", engine["states"]) for engine in idle["engines"]]
    rows += [(f"workers of {workers['environment']}", workers["states"]) for workers in idle["workers"]]
    for name, states in rows:
        reasons = ", ".join(f"{state['what']} {100 * state['share']:.0f} %" for state in states[:3] if state["share"])
        table.add_row(Text(name), bar(states), Text(reasons, style="dim"))
    return table


def bar(states: list[dict[str, Any]], width: int = 24) -> Text:
    text = Text()
    for state in states:
        name = str(state["state"])
        colour = COLOURS.get(name.split("/")[0], "yellow" if name.startswith(WAITING) else "bright_black")
        text.append("█" * round(width * state["share"]), style=colour)
    return text


def engines(status: dict[str, Any]) -> RenderableType:
    found = status.get("engines") or []
    if not found:
        return Text("none has joined", style="yellow")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("engine", "proved", "requests", "idle", "does"):
        table.add_column(title)
    for engine in found:
        share = engine.get("idle_share")
        proved = "none" if engine.get("version") is None else f"v{engine['version']}"
        table.add_row(
            # Text, not markup: names are not ours.
            Text(str(engine.get("name") or engine["engine"])),
            proved,
            f"{engine['running']}/{engine.get('limit') or '-'}",
            "-" if share is None else f"{100 * share:.0f} %",
            Text(str(engine["doing"])),
        )
    return table


def environments(status: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("environment", "workers", "in flight", "queued"):
        table.add_column(title, overflow="fold" if title == "environment" else "ellipsis")
    table.add_column("errors", overflow="fold")
    for one in status.get("environments") or []:
        errors = counted(one.get("errors"))
        table.add_row(
            # Text, not markup: names are not ours.
            Text(str(one.get("name", ""))),
            str(one.get("workers", 0)),
            str(one.get("in_flight", 0)),
            str(one.get("queued", 0)),
            Text(errors or "none", style="red" if errors else "dim"),
        )
    return table


def counted(counts: dict[str, Any] | None, leaving_out: str = "") -> str:
    """Each name with its count, the most first."""
    found = sorted((counts or {}).items(), key=lambda one: -one[1])
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in found if count and name != leaving_out)


def evaluations(measured: Sequence[dict[str, Any]]) -> Table:
    """The last one of each environment, with how far it is from the previous one."""
    by_environment: dict[str, list[dict[str, Any]]] = {}
    for one in measured:
        by_environment.setdefault(str(one.get("environment")), []).append(one)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, found in by_environment.items():
        reward, *before = (one.get("mean_reward") for one in found[:-3:-1])
        version = found[-1].get("version")
        # Scores of one that was closed before its end are not to be compared.
        comparable = before not in ([], [None]) and all(one.get("complete") is not False for one in found[-2:])
        change = f"{reward - before[0]:+.3g}" if reward is not None and comparable else ""
        table.add_row(
            Text(name),
            Text("" if version is None else f"v{version}{mark(found[-1])}", style="dim"),
            Text.assemble(("reward ", "dim"), (number(reward), "bold")),
            Text(change, style="dim"),
            Text(f"{found[-1].get('rollouts', 0)} rollouts, {found[-1].get('failed', 0)} failed", style="dim"),
        )
    return table


def lost(status: dict[str, Any]) -> Table | None:
    """Why rollouts were not trained; None where all were."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, name, leaving_out in LOST:
        if reasons := counted(status.get(name), leaving_out):
            table.add_row(Text(title), Text(reasons, style="dim"))
    return table if table.row_count else None


def waits(status: dict[str, Any]) -> RenderableType:
    # A wait that is usual delays nothing.
    found = sorted(
        status.get("waits") or [], key=lambda wait: (bool(wait.get("usual")), -float(wait.get("since_s") or 0))
    )
    if not found:
        return Text("nothing waits", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for wait in found[:LONGEST_WAITS]:
        # Text, not markup: its content is not ours.
        table.add_row(
            Text(f"{wait['since_s']:.1f} s"), Text(str(wait["who"]), style="bold"), Text(f"for {wait['for']}")
        )
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
