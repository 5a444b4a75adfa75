"""`primerl top`: the page of a run, drawn for a terminal. It asks what the page asks (`docs/page.md`)."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from primerl import asking
from primerl.run_key import VARIABLE
from primerl.runs.registry import UnknownRunError, folder_of
from primerl.runs.state import StateError

ANSWER_S = 5.0
# A run may be busy; one that has not answered so often is gone.
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


class NoRunError(Exception):
    """The message says where a run was looked for, and what to do."""


class UnreachableError(Exception):
    """The orchestrator does not answer, or not what is asked."""


def find(run: str) -> str:
    """The URL of the orchestrator of a run, given as that, as the run's folder or as its id. Raises NoRunError."""
    if run.startswith(("http://", "https://")):
        return address_of(run)
    try:
        folder = folder_of(run)
    except (UnknownRunError, StateError) as error:
        raise NoRunError(str(error)) from None
    file = folder / "run" / "orchestrator.json"
    try:
        url = str(json.loads(file.read_text())["url"])
    except FileNotFoundError:
        raise NoRunError(f"no orchestrator was started in {folder}: there is no {file}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoRunError(f"{file} cannot be read: {error}") from None
    return address_of(url)


def address_of(url: str) -> str:
    """The URL without a path. Raises NoRunError where it is none of an orchestrator."""
    try:
        address = urlsplit(url)
        # Read here: a port that is none raises when it is asked for.
        is_one = address.scheme == "http" and bool(address.hostname) and address.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise NoRunError(f"{url}: expected the URL of an orchestrator, http://host:port")
    return f"http://{address.netloc}"


def ask(url: str, path: str, **query: object) -> dict[str, Any]:
    """The JSON that the orchestrator answers. Raises UnreachableError."""
    try:
        code, content = asking.ask(url, path, within_s=ANSWER_S, **query)
    except asking.UnansweredError as error:
        raise UnreachableError(
            f"the run is not running: nothing answers at {url} ({error}). `primerl page OUTPUT_DIR` and "
            "`primerl report OUTPUT_DIR` show a run that is over"
        ) from None
    if code == 401:
        raise UnreachableError(f"{url} needs the run's key: set {VARIABLE}")
    if code != 200:
        said = content.get("error")
        raise UnreachableError(f"{url}{path}: {said.get('message', code) if isinstance(said, dict) else code}")
    return content


def look(url: str) -> RenderableType:
    now = ask(url, "/page/now")
    curves = ask(url, "/page/curves", names=",".join(CURVES), points=4 * WIDTH)
    return frame(now, curves["curves"], url)


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


def frame(now: dict[str, Any], curves: dict[str, Any], url: str) -> RenderableType:
    """One picture: `now` as of /page/now, `curves` as of /page/curves."""
    status = now.get("status") or {}
    evaluates = bool(now.get("only_evaluates"))
    parts: list[RenderableType] = [headline(now, status, url)]
    if not evaluates:
        parts.append(sparks(curves))
    if now.get("idle"):
        told = {**now["idle"], "trainer": None} if evaluates else now["idle"]
        parts.append(Panel(idle(told), title="where the time goes", title_align="left", border_style="dim"))
    parts.append(Panel(engines(status), title="engines", title_align="left", border_style="dim"))
    parts.append(Panel(waits(status), title="who waits for what", title_align="left", border_style="dim"))
    return Group(*parts)


def headline(now: dict[str, Any], status: dict[str, Any], url: str) -> Text:
    rollouts = status.get("rollouts", {})
    facts = [
        ("in flight", f"{rollouts.get('in_flight', 0)}/{rollouts.get('limit', 0)}"),
        ("tokens/s", f"{float(status.get('tokens', {}).get('per_second') or 0):,.0f}"),
    ]
    if now.get("only_evaluates"):
        failed = sum(sum(one.get("errors", {}).values()) for one in status.get("environments", []))
        facts = [("measured", f"{rollouts.get('evaluated', 0):,}"), *facts, ("errors", f"{failed:,}")]
    else:
        facts = [*trained(status), *facts]
    text = Text(f"{now.get('folder')}  ", style="bold")
    text.append(f"{url}/\n", style="dim")
    for name, value in facts:
        text.append(f"{name} ", style="dim").append(f"{value}   ", style="bold")
    return text


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
            # Text, not markup: names come from elsewhere.
            Text(str(engine.get("name") or engine["engine"])),
            proved,
            f"{engine['running']}/{engine.get('limit') or '-'}",
            "-" if share is None else f"{100 * share:.0f} %",
            Text(str(engine["doing"])),
        )
    return table


def waits(status: dict[str, Any]) -> RenderableType:
    # Whoever waits as is usual holds nobody up.
    found = sorted(
        status.get("waits") or [], key=lambda wait: (bool(wait.get("usual")), -float(wait.get("since_s") or 0))
    )
    if not found:
        return Text("nobody waits", style="dim")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for wait in found[:LONGEST_WAITS]:
        # Text, not markup: what it says comes from elsewhere.
        table.add_row(
            Text(f"{wait['since_s']:.1f} s"), Text(str(wait["who"]), style="bold"), Text(f"for {wait['for']}")
        )
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
