"""Engine backends of other packages: chosen by name or import path, with no change to primerl."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import outside
import pytest
from engine_helpers import read_url
from eval_endpoint import evaluate
from primerl.config.command_line.load import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.inference import InferenceConfig as CheckedConfig
from primerl.config.schema.rl import RLConfig
from primerl.evals import results
from primerl.inference import backends
from primerl.inference.settings import InferenceConfig
from primerl.launch.placement.commands import fork_kind
from primerl.launch.preflight import policy
from primerl.models.tiny import TinyConfig, write_model
from primerl.process.plugins import PluginError
from primerl.process.setting_checks import from_mapping
from settings_helpers import filled

ACME = """
import http.server, json, threading
from primerl.inference.backend import EngineBackend, EngineEndedError, UnservableError

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"token_ids": [self.server.token]}]})
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Engine:
    def __init__(self, config):
        self.server = http.server.ThreadingHTTPServer((config.host, config.port), Handler)
        self.server.token = config.options["token"]
        self.url = "http://%s:%d" % self.server.server_address
        self.ended = threading.Event()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
    def wait(self, timeout_s):
        return self.ended.wait(timeout_s)
    def watch(self):
        print("watched", flush=True)
    def stop(self):
        self.server.shutdown()

class Acme(EngineBackend):
    title = "Acme"
    seeds_each_request = True
    starts_slowly = False
    logprobs_modes = ("raw_logprobs",)
    def default_dtype(self, python):
        return "bfloat16"
    def check_options(self, options):
        if "token" not in options:
            raise ValueError("options.token: is missing")
    def check_model(self, folder, python):
        raise UnservableError(f"model.path: Acme does not serve {folder.name}")
    def start(self, config):
        return Engine(config)
"""


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    return outside.install(tmp_path, "acme_engine", ACME, {backends.GROUP: "acme = acme_engine:Acme"})


def run_config(**inference: Any) -> RLConfig:
    environment = {"train": {"env": [{"id": "reverse-text"}]}}
    tree = {"max_steps": 1, "model": {"path": "m"}, "orchestrator": environment, "inference": inference}
    return RLConfig.model_validate(tree)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["acme", "acme_engine:Acme"])
def test_an_outside_backend_serves(acme: Path, name: str) -> None:
    file = acme / "inference.toml"
    file.write_text(f'backend = "{name}"\noptions = {{ token = 7 }}\n[model]\npath = "{acme}"\nname = "m"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "primerl", "inference", "@", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=outside.variables(acme),
        cwd=acme,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "watched\n"
        answer = httpx.post(f"{read_url(process)}/inference/v1/generate", json={}, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == [7]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_run_asks_an_outside_backend(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.use(monkeypatch, acme)
    run = run_config(backend="acme", options={"token": 1}, replicas=2)
    engines = resolve.inference(run, "http://o:1")
    contents = [engine.config.model_dump(mode="json", exclude_none=True) for engine in engines]
    assert [(one["backend"], one["options"], one["seed"]) for one in contents] == [("acme", {"token": 1}, 0)] * 2
    assert from_mapping(InferenceConfig, contents[0]).options == {"token": 1}
    assert resolve.engine_dtype(run) == "bfloat16"
    assert resolve.orchestrator(run).config.timeouts.no_engine_s == 60
    assert resolve.trainer(run, "http://o:1").config.weights.probe, "its digest proves nothing of the model"
    assert fork_kind(engines[0]) is None, "nothing of it is in the fork server"


def test_an_outside_backend_refuses_a_model(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.use(monkeypatch, acme)
    (acme / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    run = run_config(backend="acme", options={"token": 1}).model_copy(deep=True)
    run.model.path = str(acme)
    with pytest.raises(ConfigError, match=f"model.path: Acme does not serve {acme.name}"):
        policy.check(run)


def test_settings_that_an_outside_backend_lacks_are_refused(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.use(monkeypatch, acme)
    with pytest.raises(ValueError, match=r"options\.token: is missing"):
        run_config(backend="acme")
    settings = {"backend": "acme", "options": {"token": 1}, "model": {"path": "m"}}
    config = filled(InferenceConfig, **settings, logprobs_mode="processed_logprobs")
    with pytest.raises(ValueError, match="logprobs_mode: Acme reports raw_logprobs only, not processed_logprobs"):
        backends.named("acme").check_settings(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "vlm"}, "there is no 'vlm'; known are 'vllm', 'torch'"),
        ({"backend": "nowhere:Acme"}, "'nowhere:Acme' cannot be imported: ModuleNotFoundError"),
        ({"backend": "json:Acme"}, "module json has no 'Acme'"),
        ({"backend": "collections:OrderedDict"}, "is no engine backend; derive it from"),
        (
            {"backend": "torch", "options": {"a": 1}},
            "options: are for a backend of your own",
        ),
    ],
)
def test_what_is_no_backend_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        CheckedConfig.model_validate({"model": {"path": "m"}, **settings})


def test_an_entry_point_cannot_take_a_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.use(monkeypatch, outside.install(tmp_path, "takes", "", {backends.GROUP: "torch = takes:Nothing"}))
    assert backends.named("torch").title == "the embedded engine"


def test_an_entry_point_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.use(monkeypatch, outside.install(tmp_path, "broken", "1/0", {backends.GROUP: "broken = broken:Backend"}))
    with pytest.raises(PluginError, match=r"the entry point broken:Backend of .* cannot be loaded: ZeroDivisionError"):
        backends.named("broken")


def test_a_backend_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raises = "class Raises:\n    def __init__(self):\n        raise OSError('no driver')\n"
    points = {backends.GROUP: "raises = rented:Raises\nrented = rented:Rented"}
    outside.use(monkeypatch, outside.install(tmp_path, "rented", RENTED + raises, points))
    with pytest.raises(PluginError, match="'raises' cannot be made: OSError: no driver"):
        backends.named("raises")
    with pytest.raises(ValueError, match="options: 'rented' fails to check them: KeyError: 'paid'"):
        backends.check_options("rented", {}, {})


RENTED = """
from pathlib import Path
from primerl.inference.torch.backend import EmbeddedBackend

class Rented(EmbeddedBackend):
    title = "a rented engine"
    preload = ()
    def check_options(self, options):
        self.paid = options["paid"]
    def start(self, config):
        Path(config.options["note"]).write_text(config.backend)
        return super().start(config)
"""


@pytest.mark.processes
def test_an_evaluation_is_served_by_an_outside_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.install(tmp_path, "rented_engine", RENTED, {backends.GROUP: "rented = rented_engine:Rented"})
    monkeypatch.setenv("PYTHONPATH", outside.variables(tmp_path)["PYTHONPATH"])
    model, note = tmp_path / "tiny", tmp_path / "note"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    options = json.dumps({"paid": True, "note": str(note)})
    engine = ["--inference.backend", "rented", "--inference.options", options]
    done = evaluate(tmp_path / "out", "--model", str(model), *engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(results.counts(tmp_path / "out")) == 1
    assert note.read_text() == "rented"
