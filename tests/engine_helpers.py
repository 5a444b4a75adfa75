"""Engines as processes on ports the operating system chose, and checkpoints to feed them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch
from primerl.inference.torch.step import StepBackend
from primerl.models.tiny import write_model
from primerl.train.weights.publish import manifest
from safetensors.torch import load_file, save_file
from torch import Tensor

T = TypeVar("T")

GENERATE = "/inference/v1/generate"
KINDS = ["mock", "torch"]
VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
# Tokens of a request that is to be caught in flight, which takes about a second. What waits for it to run waits for its
# end as well (`start_together`): on a busy machine nothing may look at it meanwhile.
LONG = 900
EOS = 256
VOCABULARY = 264
PROMPT = [258, 260, 198, 49, 68, 85, 68, 256, 198, 258, 261, 198]
START_DEADLINE_S = 90.0
REPOSITORY = Path(__file__).resolve().parent.parent
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.01)


@dataclass
class Engine:
    """A running engine; `model` is what it serves, if it has one."""

    kind: str
    process: subprocess.Popen[str]
    url: str
    model: Path | None
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # After a failed call vLLM closes the connection without saying so: each call has one of its own.
        limits = httpx.Limits(max_keepalive_connections=0 if self.kind == "vllm" else None)
        self.client = httpx.Client(base_url=self.url, timeout=60.0, limits=limits)

    def post(self, path: str, body: Any = None, **query: Any) -> httpx.Response:
        return self.client.post(path, json={} if body is None else body, params=query)

    def generate(self, prompt: list[int] | None = None, *, id_: str | None = None, **sampling: Any) -> dict[str, Any]:
        response = self.post("/inference/v1/generate", request(prompt, id_=id_, **sampling))
        assert response.status_code == 200, response.text
        return dict(response.json())

    def tokens(self, prompt: list[int] | None = None, **sampling: Any) -> list[int]:
        return list(self.generate(prompt, **sampling)["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        """Sum over a metric's samples, labels aside."""
        text = self.client.get("/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"{name} is not among the metrics"
        return sum(map(float, values))

    def digest(self) -> str:
        answer = self.post("/collective_rpc", {"method": "primerl_weight_digest", "args": []})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["results"][0]["digest"])

    def label(self) -> str:
        return str(self.client.get("/weight_info").json()["weight_version"])

    def update(self, folder: Path, label: str) -> None:
        assert self.post("/start_weight_update").json() == {"message": "Weight update started"}
        answer = self.post("/update_weights", {"update_info": {"path": str(folder)}})
        assert answer.status_code == 200, answer.text
        assert self.post("/finish_weight_update", {"weight_version": label}).status_code == 200

    def running(self) -> int:
        return int(self.metric("vllm:num_requests_running"))

    def load(self) -> int:
        """Requests that its server has, whether they run or wait."""
        return int(self.client.get("/load").json()["server_load"])

    def calm(self) -> None:
        """Leaves nothing behind for the next test."""
        self.post("/abort_requests")
        self.post("/resume")
        self.post("/finish_weight_update")
        wait_until(lambda: self.running() + self.load() == 0, "the last requests' end")


def request(prompt: list[int] | None = None, *, id_: str | None = None, **sampling: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"token_ids": PROMPT if prompt is None else prompt, "sampling_params": sampling}
    return body if id_ is None else {**body, "request_id": id_}


def read_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://\S+", line)
    assert match, f"the engine did not start: {line!r}\n{process.stderr.read() if process.stderr else ''}"
    return match[0]


@contextlib.contextmanager
def running(kind: str, command: list[str], model: Path | None, log: Path) -> Iterator[Engine]:
    """Starts an engine that prints its URL, and ends it with SIGTERM; its log goes to a file."""
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        engine = Engine(kind, process, read_url(process), model)
    except AssertionError as error:
        process.kill()
        raise AssertionError(f"{error}\n{log.read_text()}") from None
    try:
        yield engine
    finally:
        engine.client.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def mock_command(binary: Path, *flags: str) -> list[str]:
    # Slow enough that a test can act while requests are in flight.
    latency = [] if "--step-latency-ms" in flags else ["--step-latency-ms", "1"]
    return [str(binary), "--served-model-name", "m", "--max-model-len", "1024", *latency, *flags]


def torch_command(model: Path, folder: Path, settings: str = "") -> list[str]:
    file = folder / "inference.toml"
    file.write_text(f'max_model_len = 1024\nmax_num_seqs = 32\n{settings}\n[model]\npath = "{model}"\nname = "m"\n')
    return [sys.executable, "-m", "primerl", "inference", "@", str(file)]


def change(file: Path, old: str, new: str) -> None:
    """Raises ValueError where there is no `old` to be replaced."""
    text = file.read_text()
    if old not in text:
        raise ValueError(f"{file} has no {old!r}")
    file.write_text(text.replace(old, new))


def vllm_command(model: Path, folder: Path, settings: str = "") -> list[str]:
    return torch_command(model, folder, f'backend = "vllm"\npython = "{VLLM_PYTHON}"\n{settings}')


def need_vllm() -> None:
    """Skips where there is no environment with vLLM (`make vllm`)."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"there is no {VLLM_PYTHON.relative_to(REPOSITORY)}; `make vllm` makes it")


def build_mock(repository: Path) -> Path:
    # As the extension was built, with the same features: all but the program itself is compiled already.
    command = ["cargo", "build", "--quiet", "--locked", "-p", "primerl-py", "-p", "primerl-engine-server"]
    command += ["--bin", "primerl-mock-engine", "--message-format", "json"]
    is_release = (repository / ".make" / "extension").exists()
    command += ["--release"] if is_release else ["--features", "primerl-py/testing"]
    output = subprocess.run(command, cwd=repository, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [json.loads(line).get("executable") for line in output.splitlines()]
    return next(Path(path) for path in found if path and path.endswith("primerl-mock-engine"))


def new_model(folder: Path, seed: int) -> Path:
    write_model(folder, seed=seed)
    return folder


def model_tensors(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], version: int) -> dict[str, Any]:
    """A published checkpoint in the format of docs/architecture.md; returns its manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    contents = manifest(version, tensors, "model.safetensors", (folder / "model.safetensors").stat().st_size)
    (folder / "manifest.json").write_text(json.dumps(contents))
    return contents


def any_tensors(engine: Engine, seed: int) -> dict[str, Tensor]:
    """Tensors that the engine can load, other ones for each seed."""
    generator = torch.Generator().manual_seed(seed)
    if engine.model is None:
        return {"weight": torch.randn(4, 3, generator=generator)}
    return {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model_tensors(engine.model).items()
    }


def start_many(engine: Engine, pool: ThreadPoolExecutor, count: int, **sampling: Any) -> list[Future[dict[str, Any]]]:
    """Requests that are running, or queued behind those, when this returns."""
    options = {"max_tokens": LONG, "ignore_eos": True, "logprobs": 0} | sampling
    requests = [partial(engine.generate, id_=f"r{index}", seed=index, **options) for index in range(count)]
    return start_together(engine, pool, requests)


def start_together(engine: Engine, pool: ThreadPoolExecutor, requests: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Calls each in a thread; the engine begins with none before it has all. On a busy machine the first would
    otherwise end before the last one has come, and so many never run at a time."""
    engine.post("/pause", mode="keep", clear_cache=False)
    answers = [pool.submit(ask) for ask in requests]
    wait_until(lambda: engine.load() == len(requests), f"{len(requests)} requests")
    engine.post("/resume")

    def begun() -> bool:
        ended = [answer.result() for answer in answers if answer.done()]
        return engine.running() + len(ended) >= len(requests)

    wait_until(begun, f"{len(requests)} running requests")
    return answers


def column(values: Any, dtype: Any = np.int64) -> bytearray:
    return bytearray(np.asarray(values, dtype=dtype).tobytes())


def step(backend: StepBackend, parts: list[tuple[int, int, list[int]]], cuts: list[int], top: int = 0) -> Any:
    """One forward call. `parts` are (slot, first position, token ids); `cuts` are the sizes of the segments."""
    max_len = backend.decoder.max_len
    positions = [list(range(start, start + len(ids))) for _, start, ids in parts]
    segments, first = [], 0
    for count in cuts:
        members = parts[first : first + count]
        longest = max(len(ids) for _, _, ids in members)
        segments.append((first, count, longest, max(start + len(ids) for _, start, ids in members)))
        first += count
    ends = np.cumsum([len(ids) for _, _, ids in parts])
    sampled, *_ = backend.forward(
        token_ids=column([token for _, _, ids in parts for token in ids]),
        positions=column([position for row in positions for position in row]),
        cache_rows=column([p + max_len * part[0] for part, row in zip(parts, positions, strict=True) for p in row]),
        segments=segments,
        slots=column([slot for slot, _, _ in parts]),
        query_lens=column([len(ids) for _, _, ids in parts]),
        context_lens=column([start + len(ids) for _, start, ids in parts]),
        sample_rows=column(ends - 1),
        uniforms=column([0.5] * len(parts), np.float64),
        temperatures=column([0.0] * len(parts), np.float32),
        top_p=None,
        top_k=None,
        min_p=None,
        banned=None,
        allowed=None,
        top=top,
        prompt_rows=None,
        prompt_targets=None,
        prompt_top=0,
    )
    assert sampled is not None
    return sampled


def whole_vocabulary(sampled: Any, rows: int) -> Tensor:
    """Log-probabilities [rows, V] from scores that were asked for with the whole vocabulary."""
    _, (_, _, ids, logprobs, width) = sampled
    index = torch.frombuffer(bytearray(ids), dtype=torch.int64).view(rows, width)
    values = torch.frombuffer(bytearray(logprobs), dtype=torch.float32).view(rows, width)
    return torch.empty(rows, width).scatter_(1, index, values)
