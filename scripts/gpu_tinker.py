"""Stage of `gpu_check.sh`: `primerl serve --tinker` with trainer and engines on the GPU against the same on the CPU.

tinker      losses, gradients' norms, log-probabilities of trainer and engines and greedy samples after the same calls,
            in fp32 and bf16; a saved state that is trained on; which GPU each process computes on
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gpu_stages import REHEARSAL, Found

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tinker_calls import ROWS, Client

IN_FP32, IN_HALF = 1e-4, 0.05
"""Nats of a log-probability, at most and in the mean; of a loss by its tokens; a norm as a share."""
STEPS = 4
PROMPT = [72, 105, 32, 116]


def tinker(folder: Path) -> Found:
    from primerl.models.tiny import TinyConfig, write_model

    model = folder / "model"
    write_model(model, TinyConfig(num_hidden_layers=3, hidden_size=128, intermediate_size=256), seed=1)
    gpu = [] if REHEARSAL else ["--inference.device", "auto"]
    how = {
        "cpu": ["--trainer.dtype", "float32"],
        "fp32": ["--trainer.dtype", "float32", *gpu],
        "bf16": ["--trainer.dtype", "bfloat16", *gpu],
    }
    with ThreadPoolExecutor(len(how)) as pool:
        runs = {
            name: pool.submit(driven, model, folder / name, options, on_cpu=REHEARSAL or name == "cpu")
            for name, options in how.items()
        }
        seen = {name: run.result() for name, run in runs.items()}
    found: Found = {"ok": True}
    for name, one in seen.items():
        found[name] = {"seconds": one.seconds, "computes": one.computes}
        own = {
            "engine_by_trainer": apart(one.trained, one.sampled, mean=name == "bf16"),
            "named_by_trainer": apart(one.trained, one.named),
            "resumed": one.resumed,
        }
        found[name] |= {key: float(f"{value:.2g}") for key, value in own.items()}
        found["ok"] &= max(own.values()) < (IN_HALF if name == "bf16" else IN_FP32)
        if REHEARSAL or name == "cpu":
            continue
        found["ok"] &= all("cuda" in said for said in one.computes)
    for name, limit in (("fp32", IN_FP32), ("bf16", IN_HALF)):
        one, exact = seen[name], seen["cpu"]
        pairs = {key: (getattr(one, key), getattr(exact, key)) for key in ("losses", "trained", "sampled", "base")}
        by_cpu = {f"{key}_by_cpu": apart(*pair, mean=name == "bf16") for key, pair in pairs.items()}
        norm = max(abs(a / b - 1) for a, b in zip(one.norms, exact.norms, strict=True))
        found[name] |= {key: float(f"{value:.2g}") for key, value in (by_cpu | {"norm_by_cpu": norm}).items()}
        found[name]["same_sample"] = one.greedy == exact.greedy
        found["ok"] &= max(by_cpu.values()) < limit and norm < 10 * limit
        found["ok"] &= name == "bf16" or one.greedy == exact.greedy
    return found


def apart(some: Sequence[float], others: Sequence[float], *, mean: bool = False) -> float:
    """The largest difference, or the mean; infinite where one is not a number."""
    differences = np.abs(np.subtract(some, others))
    found = float(differences.mean() if mean else differences.max())
    return found if np.isfinite(found) else float("inf")


@dataclass
class Seen:
    """What one server has answered."""

    losses: list[float] = field(default_factory=list)
    """Nats a token, of each step."""
    norms: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    """Log-probabilities of a row after the last step, by the trainer."""
    sampled: list[float] = field(default_factory=list)
    """The same, by an engine."""
    base: list[float] = field(default_factory=list)
    """By an engine with the base model."""
    named: list[float] = field(default_factory=list)
    """Of the row's own tokens, asked for by name, which the trainer computes."""
    greedy: list[int] = field(default_factory=list)
    resumed: float = 0.0
    """How far the next step's loss of a client that was loaded is from that of the one that was saved."""
    computes: list[str] = field(default_factory=list)
    """Where, by the logs: the trainer and each engine."""
    seconds: float = 0.0


def driven(model: Path, output: Path, options: list[str], *, on_cpu: bool) -> Seen:
    began = time.perf_counter()
    command = [sys.executable, "-m", "primerl", "serve", "--tinker", "--model.path", str(model), "--port", "0"]
    command += ["--output-dir", str(output), "--inference.max-model-len", "128", "--trainer.threads", "1", *options]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    environment.pop("TINKER_API_KEY", None)
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    output.mkdir(parents=True)
    with (output / "printed.txt").open("w+", encoding="utf-8") as printed:
        server = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        try:
            seen = called(Client(_url(server, output / "printed.txt"), str(model)))
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
        if server.wait() != 0:
            raise SystemExit(f"the server ended with code {server.returncode}: {output / 'printed.txt'}")
    logs = [output / "logs" / f"{name}.log" for name in ("server", "engine_0", "engine_1")]
    seen.computes = [_last(r"computes in (\w+ on [\w:]+)", log.read_text(encoding="utf-8")) for log in logs]
    seen.seconds = round(time.perf_counter() - began, 1)
    return seen


def _last(pattern: str, text: str) -> str:
    return str(([*re.findall(pattern, text)] or ["nothing"])[-1])


def _url(server: subprocess.Popen[bytes], printed: Path) -> str:
    while server.poll() is None:
        found = re.search(r"^ready: TINKER_BASE_URL=(\S+)", printed.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(printed.read_text(encoding="utf-8"))


def called(client: Client) -> Seen:
    seen, model_id = Seen(), client.trained_model()
    for _ in range(STEPS):
        loss, norm = client.step(model_id)
        seen.losses.append(loss)
        seen.norms.append(norm)
    row = ROWS[2]
    output = client.losses(model_id, [row], forward_only=True)
    seen.trained = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32).tolist()
    saved = client.called("save_weights_for_sampler", model_id, path="sampled")["path"]
    sampler, base = client.sampler(0, model_path=saved), client.sampler(1, base_model=client.model)
    # Both at once: each has an engine of its own.
    with ThreadPoolExecutor(2) as pool:
        of_base = pool.submit(client.sample, base, 0, row, 1)
        of_sampler = client.sample(sampler, 0, row, 1)
    shape = [len(row) - 1, 1]
    targets = {"data": row[1:], "dtype": "int64", "shape": shape}
    answer = client.sample(sampler, 1, row, 1, target_prompt_logprobs=targets, prompt_alt_tokens_k=2)
    seen.named = np.frombuffer(answer.target_prompt_logprobs.dense, np.float32).tolist()
    assert len(np.frombuffer(answer.prompt_alt_tokens.tokens.dense, np.int64)) == 2 * shape[0]
    seen.sampled = np.frombuffer(of_sampler.prompt_logprobs, np.float32)[1:].tolist()
    seen.base = np.frombuffer(of_base.result().prompt_logprobs, np.float32)[1:].tolist()
    answer = client.sample(sampler, 2, PROMPT, 24)
    seen.greedy = np.frombuffer(answer.sequences[0].tokens, np.int32).tolist()
    state = client.called("save_weights", model_id, path="state")["path"]
    loaded = client.trained_model(path=state, optimizer=True)
    for _ in range(2):
        seen.resumed = max(seen.resumed, abs(client.step(loaded)[0] - client.step(model_id)[0]))
    return seen
