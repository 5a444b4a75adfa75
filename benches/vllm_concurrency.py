"""Tokens a second of vLLM behind the orchestrator, beside what the same server gives to a bare load generator.

    python benches/vllm_concurrency.py [--concurrency 128] [--waves 2] [--rounds 8] [--clock wall|cpu]   # `make vllm`

A vLLM server of the demo's model, in float32. 128 agents, one a rollout, ask the gateway of a real orchestrator, one
request after the other, each a conversation of its own; then as many bare clients ask the server itself, with the same
prompts (the token ids that the gateway gave it), `max_tokens`, stop tokens and log-probabilities, and no seeds, as the
orchestrator sends none. Both in turns, `--rounds` times. The server has one core and all the others share the other.
Goal: 0.95 of the bare clients' tokens a second, in the median round; exits 1 when it is missed. `--clock cpu`, for a
machine that others use as well, divides by the CPU seconds of the server's processes, which leaves out how long they
stood idle. Without `.venv-vllm` nothing is measured, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent / "tests"))

import aiohttp
import msgpack
import tomli_w
from engine_helpers import VLLM_PYTHON, change, model_tensors, running, torch_command, write_checkpoint
from primerl.models.tiny import IM_END, write_model
from primerl.run_key import learn, run_key_header
from primerl.train.loop.client import OrchestratorClient

GOAL = 0.95
NEW_TOKENS = 64
CONTEXT = 256
STARTS_WITHIN_S = 60.0
Ask = Callable[[aiohttp.ClientSession, int], Coroutine[Any, Any, int]]


def cpu_seconds(root: int) -> float:
    """Of a process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    seconds = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(entry))
        seconds[int(entry)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, total = [root], 0.0
    while family:
        pid = family.pop()
        total += seconds.get(pid, 0.0)
        family += parents.get(pid, [])
    return total


def text_of(agent: int) -> str:
    return f"Reverse: {'abcdefghij'[agent % 10 :]}{agent}"


class Agents:
    """128 rollouts of an orchestrator that has this one engine."""

    def __init__(self, engine_url: str, model: Path, folder: Path, concurrency: int) -> None:
        output = folder / "run"
        settings = {
            "output_dir": str(output),
            "max_steps": 1,
            "seq_len": CONTEXT,
            "batch_size": concurrency,
            "group_size": 8,
            "model": {"path": str(model), "name": "m"},
            "sampling": {"max_tokens": NEW_TOKENS},
            "train": {"env": [{"id": "bench"}]},
            "engines": [engine_url],
            "timeouts": {"worker_s": 3600.0, "rollout_s": 3600.0},
        }
        file = folder / "orchestrator.toml"
        file.write_text(tomli_w.dumps(settings), encoding="utf-8")
        said = output / "run" / "orchestrator.json"
        with (folder / "orchestrator.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "primerl", "orchestrator", "@", str(file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not said.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"the orchestrator does not start: {(folder / 'orchestrator.log').read_text(encoding='utf-8')}"
                )
            time.sleep(0.05)
        self.url = json.loads(said.read_text(encoding="utf-8"))["url"]
        learn(self.url, output)
        published = output / "broadcasts" / "step_0"
        write_checkpoint(published, model_tensors(model), 0)
        OrchestratorClient(self.url, 30.0).weights(0, str(published / "manifest.json"))
        self.leases: list[dict[str, Any]] = []
        self.prompts: dict[int, list[int]] = {}

    async def lease(self, session: aiohttp.ClientSession, concurrency: int) -> None:
        async def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
            headers = {"content-type": "application/msgpack", **run_key_header(self.url)}
            async with session.post(f"{self.url}{path}", data=msgpack.packb(body), headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return dict(msgpack.unpackb(await answer.read()))

        registration = {"environment": "bench", "role": "train", "name": "w", "pid": os.getpid(), "examples": 1000}
        worker = (await call("/envs/register", registration))["worker"]
        while len(self.leases) < concurrency:
            answer = await call("/envs/lease", {"worker": worker, "max": concurrency - len(self.leases)})
            self.leases += answer["rollouts"]

    async def ask(self, session: aiohttp.ClientSession, agent: int) -> int:
        lease = self.leases[agent]
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": text_of(agent)}],
            "max_tokens": NEW_TOKENS,
            "logprobs": True,
            "return_token_ids": True,
        }
        # A conversation of its own each time, as the bare request is.
        headers = {"authorization": f"Bearer {lease['api_key']}", "x-session-id": os.urandom(8).hex()}
        async with session.post(f"{lease['base_url']}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        self.prompts[agent] = said["prompt_token_ids"]
        return len(said["choices"][0]["token_ids"])


def bare(url: str, agents: Agents) -> Ask:
    async def ask(session: aiohttp.ClientSession, client: int) -> int:
        sampling = {
            "temperature": 1.0,
            "max_tokens": NEW_TOKENS,
            "logprobs": 0,
            "stop_token_ids": [IM_END],
            "detokenize": False,
        }
        body = {"model": "m", "token_ids": agents.prompts[client], "sampling_params": sampling, "cache_salt": "0"}
        async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        return len(said["choices"][0]["token_ids"])

    return ask


async def load(ask: Ask, concurrency: int, waves: int) -> int:
    """Sampled tokens."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client(number: int) -> int:
            return sum([await ask(session, number) for _ in range(waves)])

        return sum(await asyncio.gather(*map(client, range(concurrency))))


def rate(ask: Ask, server: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second, and a CPU second of the server."""
    cpu, wall = cpu_seconds(server), time.perf_counter()
    tokens = asyncio.run(load(ask, arguments.concurrency, arguments.waves))
    wall = time.perf_counter() - wall
    return tokens / wall, tokens / (cpu_seconds(server) - cpu)


def measure(folder: Path, arguments: argparse.Namespace) -> bool:
    model = folder / "model"
    write_model(model, seed=0)
    settings = f'backend = "vllm"\npython = "{VLLM_PYTHON}"\ndtype = "float32"\n'
    command = torch_command(model, folder, settings)
    file = Path(command[-1])
    sizes = {"max_model_len = 1024": f"max_model_len = {CONTEXT}", "max_num_seqs = 32": "max_num_seqs = 128"}
    for old, new in sizes.items():
        change(file, old, new)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    with running("vllm", command, model, folder / "engine.log") as engine:
        os.sched_setaffinity(0, cores[1:] or cores)
        agents = Agents(engine.url, model, folder, arguments.concurrency)
        try:

            async def lease() -> None:
                async with aiohttp.ClientSession() as session:
                    await agents.lease(session, arguments.concurrency)

            asyncio.run(lease())
            alone = bare(engine.url, agents)
            server = engine.process.pid
            # Warms up, and learns the prompts.
            asyncio.run(load(agents.ask, arguments.concurrency, 1))
            asyncio.run(load(alone, arguments.concurrency, 1))
            pairs = []
            for turn in range(arguments.rounds):
                # Now one first, now the other: what else the machine does changes meanwhile.
                asks = [agents.ask, alone] if turn % 2 else [alone, agents.ask]
                rates = {ask: rate(ask, server, arguments) for ask in asks}
                pairs.append((rates[agents.ask], rates[alone]))
        finally:
            agents.process.terminate()
            agents.process.wait()
    ratios = {}
    for at, clock in enumerate(("wall", "cpu")):
        behind, straight = (median(pair[side][at] for pair in pairs) for side in (0, 1))
        ratios[clock] = median(pair[0][at] / pair[1][at] for pair in pairs)
        each = ", ".join(f"{pair[0][at] / pair[1][at]:.3f}" for pair in pairs)
        print(f"{clock}: {behind:.0f} tokens/s behind the orchestrator, {straight:.0f} to bare clients ({each})")
    ratio = ratios[arguments.clock]
    print(
        f"{ratio:.3f} of the bare clients' throughput at {arguments.concurrency} concurrent requests, by "
        f"{arguments.clock} time (goal {GOAL}; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
    )
    return ratio >= GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args()
    if not VLLM_PYTHON.exists():
        print("nothing is measured: there is no .venv-vllm (`make vllm` makes it)", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
        return 0 if measure(Path(folder), arguments) else 1


if __name__ == "__main__":
    raise SystemExit(main())
