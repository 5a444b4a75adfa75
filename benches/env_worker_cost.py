"""CPU time that one rollout costs the env worker, start-up aside.

    python benches/env_worker_cost.py [--rollouts 2000] [--concurrent 64] [--environment reverse-text]

A real worker process (verifiers' environment, the in-process harness, the lease client) against a small server on
this machine that hands out leases and answers every chat request at once. CPU time is the worker's alone, user and
system, all threads, between the first and the last of the measured rollouts; goal: at most 5 ms a rollout.
Build the extension with `--release` first: the lease client is part of the cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent / "tests"))

from aiohttp import web
from env_orchestrator import Chat, Orchestrator, completion
from primerl.config.process_files.files import resolved
from primerl.config.schema.env_worker import EnvWorkerConfig

GOAL_MS = 5.0
WARM_UP = 200
MAIN = (
    "import json, sys; from primerl.envs.settings import WorkerConfig; from primerl.envs.worker import run_worker;"
    "from primerl.process.setting_checks import from_mapping;"
    "sys.exit(run_worker(from_mapping(WorkerConfig, json.loads(sys.argv[1]))))"
)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def answer(chat: Chat) -> web.Response:
    return completion(f"<r>{chat.last.removeprefix('Reverse: ')[::-1]}</r>")


def measure(environment: str, rollouts: int, concurrent: int) -> tuple[float, float, float]:
    """CPU milliseconds and wall milliseconds a rollout, and the growth of the worker's memory, MB."""
    with Orchestrator(reply=answer, heartbeat_s=1.0) as orchestrator, tempfile.TemporaryFile() as log:
        config = {
            "orchestrator_url": orchestrator.url,
            "environment": environment,
            "id": environment,
            "max_concurrent": concurrent,
        }
        settings = json.dumps(resolved(EnvWorkerConfig, config))
        worker = subprocess.Popen([sys.executable, "-c", MAIN, settings], stdout=log, stderr=log)
        try:
            for example in range(WARM_UP):
                orchestrator.add(example)
            orchestrator.wait("warm-up", lambda: len(orchestrator.results) == WARM_UP, 120)
            cpu, wall, memory = cpu_seconds(worker.pid), time.perf_counter(), resident_mb(worker.pid)
            for number in range(rollouts):
                orchestrator.add(number % 1024)
            orchestrator.wait("results", lambda: len(orchestrator.results) == WARM_UP + rollouts, 600)
            cpu, wall = cpu_seconds(worker.pid) - cpu, time.perf_counter() - wall
            failed = [outcome for outcome in orchestrator.results.values() if not outcome["ok"]]
            if failed:
                raise SystemExit(f"{len(failed)} rollouts failed: {failed[0]}")
            return cpu / rollouts * 1e3, wall / rollouts * 1e3, resident_mb(worker.pid) - memory
        finally:
            worker.terminate()
            worker.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts measured")
    parser.add_argument("--concurrent", type=int, default=64, help="rollouts in flight")
    parser.add_argument("--environment", default="reverse-text", help="installed environment")
    options = parser.parse_args()
    cpu, wall, memory = measure(options.environment, options.rollouts, options.concurrent)
    print(
        f"{options.environment}: {cpu:.2f} ms CPU a rollout (goal {GOAL_MS:.0f}), {wall:.2f} ms wall, "
        f"{options.rollouts} rollouts, {options.concurrent} at once, memory {memory:+.1f} MB"
    )
    return 0 if cpu <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
