"""`primerl inference` as a process: joining, bad settings, signals; and the binding under it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_helpers import read_url, request, running, torch_command, wait_until
from primerl import _core
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch.backend import engine_settings
from primerl.inference.torch.step import TorchBackend
from settings_helpers import filled, refusal


class Orchestrator:
    """Answers `/engines/join`, with an error as often as it is told to."""

    def __init__(self, refusals: int, status: int = 503) -> None:
        self.joined: list[dict[str, Any]] = []
        self.generated: list[int] = []
        double = self
        left = [refusals]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                left[0] -= 1
                if left[0] < 0:
                    double.joined.append({"path": self.path, **body})
                    answer = httpx.post(
                        f"{body['url']}/inference/v1/generate", json=request([1], max_tokens=1), timeout=60
                    )
                    double.generated.append(answer.status_code)
                self.send_response(status if left[0] >= 0 else 200)
                self.end_headers()
                self.wfile.write(b'{"engine": 3}')

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def orchestrator() -> Iterator[Orchestrator]:
    double = Orchestrator(refusals=2)
    yield double
    double.server.shutdown()
    double.server.server_close()


@pytest.mark.processes
def test_joins_once_it_can_generate(model: Path, tmp_path: Path, orchestrator: Orchestrator) -> None:
    command = torch_command(model, tmp_path, f'join = "{orchestrator.url}"')
    with running("torch", command, model, tmp_path / "log") as engine:
        wait_until(lambda: bool(orchestrator.generated), "the join")
        assert orchestrator.joined == [{"path": "/engines/join", "url": engine.url}]
        assert orchestrator.generated == [200]
    assert engine.process.returncode == 0


@pytest.mark.processes
def test_an_engine_without_the_runs_key_ends_at_once(model: Path, tmp_path: Path) -> None:
    double = Orchestrator(refusals=1, status=401)
    command = torch_command(model, tmp_path, f'join = "{double.url}"')
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    double.server.shutdown()
    double.server.server_close()
    assert result.returncode == 1
    assert f"{double.url}/engines/join refuses this engine: HTTP Error 401" in result.stderr + result.stdout


@pytest.mark.processes
def test_joins_past_a_proxy(
    model: Path, tmp_path: Path, orchestrator: Orchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = torch_command(model, tmp_path, f'join = "{orchestrator.url}"\nstart_s = 30')
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))  # nobody answers there
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        # The orchestrator's own answer comes from this process.
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={k: v for k, v in os.environ.items() if k != "NO_PROXY"}
        )
        try:
            read_url(process)
            wait_until(lambda: bool(orchestrator.generated), "the join")
            assert orchestrator.generated == [200]
        finally:
            process.kill()
            process.communicate()


@pytest.mark.processes
def test_interrupt_while_joining(model: Path, tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        command = torch_command(model, tmp_path, f'join = "http://127.0.0.1:{nobody.getsockname()[1]}"')
        with running("torch", command, model, tmp_path / "log") as engine:
            engine.process.send_signal(signal.SIGINT)
            assert engine.process.wait(20) == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("made_up = 1", "made_up (in "),
        ("max_num_seqs = 0", "line 1): Input should be greater than 0 (it is 0)"),
        ('dtype = "float8"', "Input should be 'float32' or 'bfloat16' (it is 'float8')"),
        ("kv_cache_tokens = 100", "kv_cache_tokens: 100 does not hold one sequence"),
        ("max_model_len = 4096", "max_model_len: 4096 is more than the model's 2048 positions"),
    ],
)
def test_bad_settings_end_with_code_2(model: Path, tmp_path: Path, settings: str, words: str) -> None:
    command = torch_command(model, tmp_path, settings)
    file = tmp_path / "inference.toml"
    if settings.startswith("max_"):
        lines = [line for line in file.read_text().splitlines() if line.split(" =")[0] != settings.split(" =")[0]]
        file.write_text("\n".join([settings, *lines]))
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_missing_model_and_port_in_use_end_with_code_2(model: Path, tmp_path: Path) -> None:
    result = subprocess.run(torch_command(tmp_path / "none", tmp_path), capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "config.json does not exist" in result.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(torch_command(model, tmp_path, f"port = {port}"), capture_output=True, text=True)
    assert result.returncode == 2
    assert f"port: cannot listen on 127.0.0.1:{port}" in result.stderr


def test_settings_name_a_key_that_is_wrong() -> None:
    for given, message in [
        ({"model": {"name": "x"}}, "model.path: missing"),
        ({"model": {"path": "x", "seed": 1}}, "model.seed: unknown key"),
        ({"model": {"path": "x"}, "max_num_seqs": 0}, "max_num_seqs: Input should be greater than 0 (it is 0)"),
        ({"model": {"path": "x"}, "max_num_seqs": 65_537}, "max_num_seqs: Input should be less than or equal to 65536"),
    ]:
        assert message in refusal(InferenceConfig, given)
    assert filled(InferenceConfig, model={"path": "a/b"}).served_name == "b"


# The binding --------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model: Path) -> Iterator[_core.InferenceEngine]:
    config = filled(InferenceConfig, model={"path": str(model)}, max_model_len=256, max_num_seqs=4)
    backend = TorchBackend(model, dtype="float32", max_num_seqs=4, max_model_len=256)
    engine = _core.InferenceEngine(engine_settings(config, 256), backend, host="127.0.0.1", port=0)
    yield engine
    engine.stop()


def test_engine_in_this_process(engine: _core.InferenceEngine) -> None:
    answer = httpx.post(
        f"{engine.url}/inference/v1/generate", json=request([1, 2], max_tokens=4, ignore_eos=True), timeout=60
    )
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
    assert not engine.wait(0.01)
    engine.stop()
    engine.stop()
    assert engine.wait(1.0)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{engine.url}/health")


@pytest.mark.processes
def test_a_forked_child_is_told(engine: _core.InferenceEngine) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.wait(0.1)
            os.write(write, b"nothing was raised")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert b"create a separate engine in the child" in os.read(read, 1000)
    os.close(read)
    os.close(write)
    assert httpx.get(f"{engine.url}/health", timeout=60).status_code == 200


def test_waiting_can_be_interrupted(engine: _core.InferenceEngine) -> None:
    class Interrupted(Exception):  # noqa: N818 (stands for a signal)
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            engine.wait(60)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - began < 30


def test_an_exception_of_the_model_ends_the_engine(model: Path) -> None:
    class Broken(TorchBackend):
        def forward(self, **columns: Any) -> Any:
            raise ZeroDivisionError("the model is broken")

    backend = Broken(model, dtype="float32", max_num_seqs=4, max_model_len=256)
    config = filled(InferenceConfig, model={"path": str(model)}, max_num_seqs=4)
    engine = _core.InferenceEngine(engine_settings(config, 256), backend, host="127.0.0.1", port=0)
    answer = httpx.post(f"{engine.url}/inference/v1/generate", json=request([1], max_tokens=1), timeout=60)
    assert answer.status_code == 500
    assert "the model is broken" in answer.json()["error"]["message"]
    with pytest.raises(_core.EngineError, match="the model is broken"):
        engine.wait(10)
    engine.stop()


def test_bad_engine_settings_are_named(model: Path) -> None:
    backend = TorchBackend(model, dtype="float32", max_num_seqs=4, max_model_len=256)
    with pytest.raises(ValueError, match="max_num_seqs: 8 is more than the backend's 4 KV slots"):
        _core.InferenceEngine({"max_num_seqs": 8, "max_model_len": 256}, backend, host="127.0.0.1", port=0)


@pytest.mark.processes
def test_interpreter_exit_stops_a_running_engine(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from primerl import _core\n"
        "from primerl.inference.torch.step import TorchBackend\n"
        f"backend = TorchBackend(Path({str(model)!r}), dtype='float32', max_num_seqs=4, max_model_len=256)\n"
        "settings = {'max_num_seqs': 4, 'max_model_len': 256, 'max_num_batched_tokens': 256}\n"
        "engine = _core.InferenceEngine(settings, backend, host='127.0.0.1', port=0)\n"
        "print(engine.url, flush=True)\n"
        "input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = read_url(process)
    body = {**request([1], max_tokens=200, ignore_eos=True), "stream": True}
    with httpx.stream("POST", f"{url}/inference/v1/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        # The script ends while its engine is in the middle of a request.
        _, errors = process.communicate("\n", timeout=20)
        rest = [line for line in lines if line]
    assert process.returncode == 0, errors
    assert rest[-1] == "data: [DONE]"
