"""How the dashboard does with many long runs: 100 runs of 10,000 steps.

    python benches/dashboard.py [--runs 100] [--steps 10000] [--columns 40]

A list of runs is made in a folder of its own, with the metrics that such runs would have written (ten different files;
others are links to them), and then asked as a browser asks it. Where a Chromium is installed, it is opened in that,
too.

Goals, with files that were not read before: first paint, the list and the first curves within 1 s, also from the start
of the command. Then each answer (another part of the steps, 30 runs over each other) within 100 ms at p95, while one of
the runs is being written, too. What all runs take in memory is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import httpx

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent / "tests"))

import page_goals as goals
from primerl.runs.dashboard.server import Dashboard
from primerl.runs.registry import Registry

GOAL_S = 1.0
ANSWER_MS = 100.0
PART, FIRST, MOST = 2, 8, 30
DIFFERENT = 10
LOOKS = 60
NAMES = ["reward/all/mean", "entropy/all/mean", "mismatch_kl/all/mean", "loss/mean"]


def write_metrics(file: Path, steps: int, columns: int, seed: int) -> None:
    generator = random.Random(seed)
    others = ", ".join(f'"other/{number}/mean": {generator.random():.16f}' for number in range(columns - len(NAMES)))
    with file.open("w", encoding="utf-8") as written:
        for step in range(1, steps + 1):
            values = ", ".join(f'"{name}": {math.tanh(step / steps) + generator.gauss(0, 0.1)!r}' for name in NAMES)
            written.write(f'{{"step": {step}, "timestamp": {1.7e9 + step}, {values}, {others}}}\n')


def make(folder: Path, runs: int, steps: int, columns: int) -> None:
    for number in range(runs):
        output = folder / f"run-{number}"
        (output / "run").mkdir(parents=True)
        if number < DIFFERENT:
            write_metrics(output / "metrics.jsonl", steps, columns, number)
        else:
            os.link(folder / f"run-{number % DIFFERENT}" / "metrics.jsonl", output / "metrics.jsonl")
        (output / "run" / "summary.json").write_text(
            json.dumps({"exit_code": 0, "reason": "finished"}), encoding="utf-8"
        )
        with Registry() as registry:
            run = registry.begin(
                output,
                f"seed = {number}\n",
                goes_on=True,
                form="full",
                name=f"run-{number}",
                model="/models/m",
                environments=["task"],
            )
            registry.end(run, 0)


def look(url: str, steps: int, measured: goals.Measured) -> None:
    client = httpx.Client(base_url=url, timeout=120, trust_env=False)
    began = time.perf_counter()
    for path in ("/", "/page/assets/style.css", "/assets/main.js", "/assets/runs.js", "/page/assets/chart.js"):
        assert client.get(path).status_code == 200
    ids = [run["id"] for run in client.get("/api/runs").json()["runs"]]
    # As the page does: a few runs at a time, until they were read.
    asked = {"runs": ",".join(ids[:PART]), "names": ",".join(NAMES), "points": "400"}
    found = client.get("/api/curves", params=asked).json()
    measured.goal("list and first curves", time.perf_counter() - began, GOAL_S, "s")
    assert len(found["runs"]) == min(PART, len(ids)), found["problems"]
    assert all(len(curve["x"]) <= 400 for one in found["runs"].values() for curve in one.values())
    began = time.perf_counter()
    asked["runs"] = ",".join(ids[:MOST])
    client.get("/api/curves", params=asked)
    print(f"curves of {min(MOST, len(ids))} runs, files not read before: {time.perf_counter() - began:.2f} s")
    generator = random.Random(0)
    for title, count in (("another part of the steps", FIRST), (f"another part, {MOST} runs", MOST)):
        asked |= {"runs": ",".join(ids[:count]), "points": "400" if count <= 10 else "200"}
        took = []
        for _ in range(LOOKS):
            first = generator.randrange(steps)
            began = time.perf_counter()
            client.get("/api/curves", params={**asked, "from": str(first), "to": str(first + steps // 4)})
            took.append(1e3 * (time.perf_counter() - began))
        took.sort()
        print(f"  {title}: median {median(took):.1f} ms, most {took[-1]:.1f}")
        measured.goal(f"{title}, p95", goals.p95(took), ANSWER_MS, "ms")


def written(url: str, steps: int, measured: goals.Measured) -> None:
    """The newest runs over each other, one of which gets 50 steps a second."""
    client = httpx.Client(base_url=url, timeout=120, trust_env=False)
    listed = client.get("/api/runs").json()["runs"][:FIRST]
    asked = {"runs": ",".join(run["id"] for run in listed), "names": ",".join(NAMES), "points": "400"}
    file = Path(listed[0]["output_dir"]) / "metrics.jsonl"
    content = file.read_bytes()
    file.unlink()  # other runs have a link to it
    file.write_bytes(content)
    over = threading.Event()

    def write() -> None:
        step = steps
        with file.open("a", encoding="utf-8") as metrics:
            while not over.wait(0.02):
                step += 1
                metrics.write(json.dumps({"step": step, **dict.fromkeys(NAMES, 0.5)}) + "\n")
                metrics.flush()

    client.get("/api/curves", params=asked)
    writer = threading.Thread(target=write)
    writer.start()
    took, last = [], 0
    try:
        for _ in range(LOOKS):
            began = time.perf_counter()
            client.get("/api/runs")
            last = client.get("/api/curves", params=asked).json()["steps"][1]
            took.append(1e3 * (time.perf_counter() - began))
    finally:
        over.set()
        writer.join()
    assert last > steps, "what is written is shown"
    print(f"  list and curves while one is written: median {median(took):.1f} ms, most {max(took):.1f}")
    measured.goal("list and curves while one is written, p95", goals.p95(took), ANSWER_MS, "ms")


def remember(url: str) -> None:
    """What the curves of all runs take, in this process."""
    client = httpx.Client(base_url=url, timeout=600, trust_env=False)
    ids = [run["id"] for run in client.get("/api/runs").json()["runs"]]
    before, began = resident_mb(), time.perf_counter()
    for at in range(0, len(ids), MOST):
        client.get("/api/curves", params={"runs": ",".join(ids[at : at + MOST]), "names": NAMES[0]})
    took, grown = time.perf_counter() - began, resident_mb() - before
    print(f"curves of all {len(ids)} runs, which no one asks for at once: {took:.1f} s, {grown:.0f} MB more in memory")


def resident_mb() -> float:
    """Of this process; 0 where /proc does not say it."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(text.split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return 0.0


def start(measured: goals.Measured) -> None:
    """From the command to the list and the first curves, as somebody sees it who starts it again."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "primerl", "dashboard"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2].rstrip("/")
            listens = time.perf_counter() - began
            client = httpx.Client(base_url=url, timeout=120, trust_env=False)
            ids = [run["id"] for run in client.get("/api/runs").json()["runs"]]
            client.get("/api/curves", params={"runs": ",".join(ids[:PART]), "names": ",".join(NAMES), "points": "400"})
            took = time.perf_counter() - began
        finally:
            process.terminate()
    print(f"the command listens after {listens:.2f} s")
    measured.goal("from the command to the list and first curves", took, GOAL_S, "s")


def paint(url: str, measured: goals.Measured) -> None:
    with goals.opened(url) as tab:
        if tab is None:
            return
        tab.until("document.querySelectorAll('.chart path').length >= 4")
        first = tab.evaluate("performance.now()")
        tab.until(f"document.querySelectorAll('.chart path:not(.band)').length >= {len(NAMES) * FIRST}")
        drawn = tab.evaluate("performance.now()")
        painted = goals.painted_ms(tab)
        measured.goal("browser: first paint", painted / 1e3, GOAL_S, "s")
        measured.goal("browser: list and first curves drawn", first / 1e3, GOAL_S, "s")
        print(f"browser: curves of {FIRST} runs drawn: {drawn / 1e3:.2f} s")
        began = time.perf_counter()
        tab.evaluate("location.hash = '#/?from=2000&to=4000'")
        tab.until("[...document.querySelectorAll('.chart text')].some((one) => one.textContent === '3,000')")
        print(f"browser: zoomed after {1e3 * (time.perf_counter() - began):.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=40)
    chosen = parser.parse_args()
    measured = goals.Measured()
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as name:
        folder = Path(name)
        os.environ["PRIMERL_STATE_DIR"] = str(folder / "state")
        make(folder, chosen.runs, chosen.steps, chosen.columns)
        load = os.getloadavg()[0]
        print(f"{chosen.runs} runs of {chosen.steps:,} steps, load {load:.1f} on {os.cpu_count()} cores", flush=True)
        # In a browser first: nothing has been read before.
        for check in (
            paint,
            lambda url, measured: look(url, chosen.steps, measured),
            lambda url, _: remember(url),
            lambda url, measured: written(url, chosen.steps, measured),
        ):
            server = Dashboard()
            try:
                check(server.url, measured)
            finally:
                server.stop()
        start(measured)
    return 0 if measured.held else 1


if __name__ == "__main__":
    raise SystemExit(main())
