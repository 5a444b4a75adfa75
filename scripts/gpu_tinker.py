"""Stage of `gpu_check.sh`: `primerl serve --tinker` with trainer and engines on the GPU against the same on the CPU.

tinker      losses, gradients' norms, log-probabilities of trainer and engines and greedy samples after the same calls,
            in fp32 and bf16; a saved state that is trained on; which GPU each process computes on

Calls are plain HTTP: of the SDK, only its messages are needed, which the server needs as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gpu_stages import REHEARSAL, Found
from primerl.net.requests import open_url

IN_FP32, IN_HALF = 1e-4, 0.05
"""Nats of a log-probability, at most and in the mean; of a loss by its tokens; a norm as a share."""
STEPS = 4
POLL_AGAIN = 408
ALIKE = list(range(60, 100))
ROWS = [[72, 105, 32, 116, 104, 101, 114, 101], [65, 98, 99, 100], [49, 50, 51, 52, 53, 54, 55, 56, 57, 48, 49]]
# What they begin with is computed once.
ROWS += [[*ALIKE, 110 + number, 120, 121] for number in range(3)]
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
            server.wait(30)
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


class Client:
    """What the SDK sends, by hand."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = url, model
        self.session = self.asked("create_session", {})["session_id"]
        self._numbers: dict[str, int] = {}
        self._made = 0

    def sent(self, path: str, body: bytes, kind: str = "application/json") -> bytes:
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", body, {"Content-Type": kind})
        with open_url(request, timeout=60) as answer:
            return bytes(answer.read())

    def asked(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return dict(json.loads(self.sent(path, json.dumps(body).encode())))

    def result(self, promise: dict[str, Any]) -> bytes:
        body = json.dumps({"request_id": promise["request_id"]}).encode()
        while True:
            try:
                answer = self.sent("retrieve_future", body)
                break
            except urllib.error.HTTPError as error:
                if error.code != POLL_AGAIN:
                    raise
        if answer.startswith(b'{"error"'):
            raise SystemExit(answer.decode())
        return answer

    def _number(self, model_id: str) -> int:
        self._numbers[model_id] = self._numbers.get(model_id, 0) + 1
        return self._numbers[model_id]

    def trained_model(self, **loaded: Any) -> str:
        """A new training client, or one that is loaded."""
        body = {"session_id": self.session, "model_seq_id": self._made, "base_model": self._model}
        self._made += 1
        lora = {"rank": 4, "seed": 7}
        promise = self.asked("load_weights", body | loaded) if loaded else None
        promise = promise or self.asked("create_model", body | {"lora_config": lora})
        return str(json.loads(self.result(promise))["model_id"])

    def losses(self, model_id: str, rows: Sequence[Sequence[int]], *, forward_only: bool = False) -> Any:
        from tinker.proto import tinker_public_pb2 as pb

        made = pb.ForwardBackwardRequest(model_id=model_id, seq_id=self._number(model_id), loss_fn="cross_entropy")
        made.forward_only = forward_only
        for row in rows:
            datum = made.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(row[:-1], np.int32).tobytes()
            targets = np.array(row[1:], np.int64)
            tensor = pb.Tensor(dense=targets.tobytes(), dtype=pb.DTYPE_INT64, shape=targets.shape)
            datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor)
        promise = json.loads(self.sent("forward_backward", made.SerializeToString(), "application/x-protobuf"))
        return pb.ForwardBackwardOutput.FromString(self.result(promise))

    def called(self, call: str, model_id: str, **body: Any) -> dict[str, Any]:
        promise = self.asked(call, {"model_id": model_id, "seq_id": self._number(model_id), **body})
        return dict(json.loads(self.result(promise)))

    def step(self, model_id: str) -> tuple[float, float]:
        """Loss a token, and norm of the gradient."""
        output = self.losses(model_id, ROWS)
        metrics = self.called("optim_step", model_id, adam_params={"learning_rate": 5e-3})["metrics"]
        return output.metrics["loss:sum"] / sum(len(row) - 1 for row in ROWS), metrics["grad_norm:mean"]

    def sampler(self, number: int, **what: Any) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **what}
        return str(self.asked("create_sampling_session", body)["sampling_session_id"])

    def sample(self, sampler: str, number: int, prompt: Sequence[int], tokens: int, **more: Any) -> Any:
        from tinker.proto import tinker_public_pb2 as pb

        sampling = {"max_tokens": tokens, "temperature": 0.0, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "sampling_params": sampling}
        body |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}, "prompt_logprobs": True}
        body |= more
        return pb.SampleResponse.FromString(self.result(self.asked("asample", body)))


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
    sampler, base = client.sampler(0, model_path=saved), client.sampler(1, base_model=client._model)
    # Both at once: each has an engine of its own.
    with ThreadPoolExecutor(2) as pool:
        of_base = pool.submit(client.sample, base, 0, row, 1)
        answer = client.sample(sampler, 0, row, 1)
    shape = [len(row) - 1, 1]
    targets = {"data": row[1:], "dtype": "int64", "shape": shape}
    answer = client.sample(sampler, 1, row, 1, target_prompt_logprobs=targets, prompt_alt_tokens_k=2)
    seen.named = np.frombuffer(answer.target_prompt_logprobs.dense, np.float32).tolist()
    assert len(np.frombuffer(answer.prompt_alt_tokens.tokens.dense, np.int64)) == 2 * shape[0]
    seen.sampled = np.frombuffer(answer.prompt_logprobs, np.float32)[1:].tolist()
    seen.base = np.frombuffer(of_base.result().prompt_logprobs, np.float32)[1:].tolist()
    answer = client.sample(sampler, 2, PROMPT, 24)
    seen.greedy = np.frombuffer(answer.sequences[0].tokens, np.int32).tolist()
    state = client.called("save_weights", model_id, path="state")["path"]
    loaded = client.trained_model(path=state, optimizer=True)
    for _ in range(2):
        seen.resumed = max(seen.resumed, abs(client.step(loaded)[0] - client.step(model_id)[0]))
    return seen
