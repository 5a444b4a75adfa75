"""How the live page does on a long run: 10,000 steps, 100,000 rollouts.

    python benches/page.py [--steps 10000] [--rollouts 10]     # a step

A run folder is made whose journal holds what such a run would have written (the core plays it event by event when
the page is opened, and the bench fails where it does not agree with every one), then the page is served from it, and
asked as a browser asks it. Where a Chromium is installed, it is opened in that, too.

Goals: first paint within 1 s, each answer within 100 ms, curves of at most 1,000 points, and all that the page holds in
memory below 150 MB (20 MB for its index of rollouts, the rest for the core that plays and the columns of metrics).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from primerl._core import PageServer
from primerl.models.tiny import write_model

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent / "tests"))

import page_goals as goals
import page_journal as journal
from page_journal import Event

FIRST_PAINT_S = 1.0
ANSWER_MS = 100.0
MEMORY_MB = 150.0
MOST_POINTS = 1_000
LOOKS = 100
COLUMNS = 100
CURVES = "reward/all/mean,loss/mean,perf/throughput,staleness/mean,staleness/max,time/step,entropy/all/mean"


def events(steps: int, rollouts: int) -> Iterator[Event]:
    generator = random.Random(0)
    yield from journal.start()
    for step in range(1, steps + 1):
        first = (step - 1) * rollouts
        yield journal.lease(step, rollouts)
        for rollout in range(first, first + rollouts):
            yield journal.turned(generator, rollout, step - 1)
        for rollout in range(first, first + rollouts):
            yield journal.finished(rollout, generator.random())
        yield from journal.trained(steps + step, step)


def write_metrics(output: Path, steps: int) -> None:
    generator = random.Random(1)
    names = CURVES.split(",")
    names += [f"other/{number}/mean" for number in range(COLUMNS - len(names))]
    with (output / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            values = {name: math.tanh(step / steps) + generator.gauss(0, 0.1) for name in names}
            file.write(json.dumps({"step": step, "timestamp": 1.7e9 + step, **values}) + "\n")


def memory_mb() -> float:
    """Held by this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def timed(ask: Callable[[], httpx.Response]) -> tuple[float, Any]:
    """Milliseconds, and the answer."""
    began = time.perf_counter()
    answer = ask()
    took = 1e3 * (time.perf_counter() - began)
    assert answer.status_code == 200, answer.text
    return took, answer.json() if answer.headers["content-type"] == "application/json" else answer.text


def look(url: str, rollouts: int, measured: goals.Measured) -> None:
    client = httpx.Client(base_url=url, timeout=60, trust_env=False)
    began = time.perf_counter()
    first = [timed(lambda path=path: client.get(path))[0] for path in ("/", "/page/now")]  # type: ignore[misc]
    first.append(timed(lambda: client.get("/page/curves", params={"names": CURVES, "points": 600}))[0])
    measured.goal("first data, files not read before", sum(first) / 1e3, FIRST_PAINT_S, "s")
    while not (now := client.get("/page/now").json())["journal"]["is_up_to_date"]:
        assert now["journal"]["problem"] is None, now["journal"]
        time.sleep(0.1)
    took = time.perf_counter() - began
    print(f"journal of {now['journal']['events']:,} events read: {took:.1f} s, beside answers", flush=True)
    matching = client.get("/page/rollouts", params={"fate": "trained"}).json()["matching"]
    assert matching == rollouts, f"{matching} of {rollouts} rollouts are trained: the core does not agree"

    generator = random.Random(2)
    took_ms: dict[str, list[float]] = {}
    cursor: int | None = None
    for _ in range(LOOKS):
        number = generator.randrange(rollouts)
        from_step = generator.randrange(1, 9000)
        for name, path, query in (
            ("list, older page", "/page/rollouts", {"cursor": cursor, "fate": "trained"} if cursor else {}),
            ("list by reward", "/page/rollouts", {"order": "highest_reward", "limit": 100}),
            ("list of a step", "/page/rollouts", {"step": number // 10 + 1}),
            ("rollout", f"/page/rollouts/{number}", {}),
            ("turn with its tokens", f"/page/rollouts/{number}/turns/0", {}),
            ("now", "/page/now", {}),
            ("curves", "/page/curves", {"names": CURVES, "points": 600}),
            ("curves of some steps", "/page/curves", {"names": CURVES, "from": from_step, "to": from_step + 900}),
        ):
            spent, answer = timed(lambda path=path, query=query: client.get(path, params=query))  # type: ignore[misc]
            took_ms.setdefault(name, []).append(spent)
            if name == "list, older page":
                cursor = answer["next"]
            if "curves" in answer:
                assert all(len(curve["x"]) <= MOST_POINTS for curve in answer["curves"].values())
    for name, spans in took_ms.items():
        spans.sort()
        print(f"  {name}: median {median(spans):.1f} ms, p95 {goals.p95(spans):.1f}, most {spans[-1]:.1f}")
    measured.goal("slowest question, p95", max(map(goals.p95, took_ms.values())), ANSWER_MS, "ms")


def paint(url: str, measured: goals.Measured) -> None:
    with goals.opened(url) as tab:
        if tab is None:
            return
        tab.until("document.querySelectorAll('.chart path').length >= 6")
        drawn = tab.evaluate("performance.now()")
        painted = goals.painted_ms(tab)
        print(f"browser: first paint after {painted:.0f} ms, six curves drawn after {drawn:.0f} ms at most")
        measured.goal("first paint", painted / 1e3, FIRST_PAINT_S, "s")
        measured.goal("curves drawn", drawn / 1e3, FIRST_PAINT_S, "s")
        began = time.perf_counter()
        tab.evaluate("location.hash = '#/rollouts'")
        tab.until("document.querySelectorAll('.list tbody tr').length === 100")
        print(f"browser: list of rollouts shown after {1e3 * (time.perf_counter() - began):.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=10, help="a step; even")
    arguments = parser.parse_args()
    steps, rollouts = arguments.steps, arguments.rollouts
    measured = goals.Measured()
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
        model, output = Path(folder) / "model", Path(folder) / "run"
        write_model(model, seed=0)
        journal.begin(output, model, steps=steps, batch=rollouts, group=rollouts // 2)
        writer = journal.Journal(output)
        writer.write(events(steps, rollouts))
        count = writer.count
        write_metrics(output, steps)
        print(
            f"{steps:,} steps, {steps * rollouts:,} rollouts, {count:,} events (load of the machine "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)",
            flush=True,
        )
        before = memory_mb()
        server = PageServer(output, model)
        try:
            look(server.url, steps * rollouts, measured)
            paint(server.url, measured)
            measured.goal("memory", memory_mb() - before, MEMORY_MB, "MB")
        finally:
            server.stop()
    return 0 if measured.held else 1


if __name__ == "__main__":
    raise SystemExit(main())
