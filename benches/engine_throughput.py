"""Sampled tokens per second of CPU time of the embedded engine, HTTP included, beside transformers' `generate`.

    python benches/engine_throughput.py [--concurrency 128] [--waves 8] [--new-tokens 28]

Starts `primerl inference` with the demo's model shape in a process of its own with one torch thread, sends waves of
requests and divides the tokens by the CPU seconds of that process. Build the extension with `--release` first.
With as many requests in flight it then updates the weights 20 times and prints how long sampling stood still, from the
pause to the resume, digest included. `generate` gets the same prompts in one batch of the same size, in this process,
and is measured by its CPU time, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from primerl.models.tiny import write_model
from primerl.train.weights.publish import manifest
from safetensors.torch import load_file, save_file

PROMPT_TOKENS = 22


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompts(count: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def send_waves(url: str, concurrency: int, waves: int, new_tokens: int) -> int:
    """Each of `concurrency` clients sends `waves` requests, one after the other, as rollouts do."""
    sampled = 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def client(prompt: list[int]) -> None:
            nonlocal sampled
            sampling = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 0}
            for _ in range(waves):
                body = {"token_ids": prompt, "sampling_params": sampling}
                async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                    answer = await response.json()
                    sampled += len(answer["choices"][0]["token_ids"])

        await asyncio.gather(*[client(prompt) for prompt in prompts(concurrency)])
    return sampled


async def measure_updates(url: str, model: Path, concurrency: int) -> list[float]:
    """Seconds from pause to resume, as the orchestrator does it, with requests in flight."""
    tensors = load_file(model / "model.safetensors")
    folder = model / "broadcast"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    contents = manifest(1, tensors, "model.safetensors", (folder / "model.safetensors").stat().st_size)
    (folder / "manifest.json").write_text(json.dumps(contents), encoding="utf-8")
    calls: list[tuple[str, dict[str, object]]] = [
        ("/pause?mode=keep&clear_cache=false", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": str(folder)}}),
        ("/finish_weight_update", {"weight_version": "1"}),
        ("/collective_rpc", {"method": "primerl_weight_digest", "args": []}),
        ("/resume", {}),
    ]
    seconds = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url=url, connector=connector) as session:
        body = {"sampling_params": {"max_tokens": 480, "ignore_eos": True}}
        flood = [
            asyncio.create_task(session.post("/inference/v1/generate", json={**body, "token_ids": prompt}))
            for prompt in prompts(concurrency)
        ]
        await asyncio.sleep(0.3)
        for _ in range(20):
            began = time.perf_counter()
            for path, call in calls:
                async with session.post(path, json=call) as response:
                    assert response.status == 200, await response.text()
            seconds.append(time.perf_counter() - began)
        assert not all(task.done() for task in flood), "the updates found requests in flight"
        for response in await asyncio.gather(*flood):
            response.close()
    return sorted(seconds)


def measure_engine(model: Path, arguments: argparse.Namespace) -> float:
    settings = f'max_model_len = 512\nmax_num_seqs = {arguments.concurrency}\n[model]\npath = "{model}"\nname = "m"\n'
    file = model / "inference.toml"
    file.write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "primerl", "inference", "@", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, encoding="utf-8") as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]
            asyncio.run(send_waves(url, arguments.concurrency, 1, arguments.new_tokens))
            cpu, wall = cpu_seconds(server.pid), time.perf_counter()
            sampled = asyncio.run(send_waves(url, arguments.concurrency, arguments.waves, arguments.new_tokens))
            cpu, wall = cpu_seconds(server.pid) - cpu, time.perf_counter() - wall
            updates = asyncio.run(measure_updates(url, model, arguments.concurrency))
            idle = cpu_seconds(server.pid)
            time.sleep(2)
            idle = (cpu_seconds(server.pid) - idle) / 2
        finally:
            server.terminate()
    print(
        f"engine:   {sampled / cpu:8.0f} tokens per CPU second ({sampled} tokens, {cpu:.2f} s CPU, {wall:.2f} s wall)"
    )
    median, worst = updates[len(updates) // 2] * 1e3, updates[-1] * 1e3
    print(f"engine:   {median:8.1f} ms from pause to resume (median of {len(updates)}; worst {worst:.1f} ms)")
    print(f"engine:   {idle:8.3f} cores when idle")
    return sampled / cpu


def measure_generate(model: Path, arguments: argparse.Namespace) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    hf = AutoModelForCausalLM.from_pretrained(model)
    token_ids = torch.tensor(prompts(arguments.concurrency))
    best = 0.0
    for _ in range(3):
        cpu = time.process_time()
        out = hf.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=True,
            max_new_tokens=arguments.new_tokens,
            min_new_tokens=arguments.new_tokens,
            pad_token_id=0,
        )
        sampled = (out.shape[1] - token_ids.shape[1]) * out.shape[0]
        best = max(best, sampled / (time.process_time() - cpu))
    print(f"generate: {best:8.0f} tokens per CPU second (best of 3)")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--waves", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=28)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        engine = measure_engine(model, arguments)
        generate = measure_generate(model, arguments)
    print(json.dumps({"engine": round(engine), "generate": round(generate), "ratio": round(engine / generate, 2)}))


if __name__ == "__main__":
    main()
