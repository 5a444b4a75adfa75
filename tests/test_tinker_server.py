"""The Tinker SDK against a real server: its whole surface, learning, kills, and what is refused."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import browser
import pytest
from docs_pages import shown
from end_to_end import REPOSITORY, until
from primerl.cli import main
from primerl.launch.supervise.lock import LOCK
from tinker_calls import ROWS, Client

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
EXAMPLES = REPOSITORY / "examples" / "tinker"
KEY = "tml-test"
TINY = ["--inference.max-model-len", "128", "--trainer.threads", "1", "--trainer.max-tokens", "512"]


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    output: Path
    model: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def start(model: Path, output: Path, *more: str, port: int = 0) -> Server:
    file = output.with_suffix(".toml")
    # JSON strings and lists are TOML's.
    names = json.dumps(["tiny", "owner/alias"])
    text = f"output_dir = {json.dumps(str(output))}\n[model]\npath = {json.dumps(str(model))}\nnames = {names}\n"
    file.write_text(text, encoding="utf-8")
    [[_, *words]] = shown(__file__, "docs/tinker.md", {"examples/tinker/serve.toml": str(file)})
    command = [sys.executable, "-m", "primerl", *words, *TINY, "--port", str(port), *more]
    environment = {**os.environ, "TINKER_API_KEY": KEY}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.match(r"ready: TINKER_BASE_URL=(\S+)", line):
            return Server(process, found[1], output, model)
    raise AssertionError("".join(said))


@pytest.fixture(scope="module")
def server(imitator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    one = start(imitator, tmp_path_factory.mktemp("served") / "tinker")
    yield one
    one.kill()


SCENARIOS = [
    "supervised_training_reaches_the_datas_floor",
    "samples_are_those_of_the_trained_weights",
    "texts_and_tokens_end_samples",
    "adapters_are_exported_for_peft",
    "what_users_get_wrong_is_a_result_and_the_client_goes_on",
    "weights_that_overflow_are_left_as_the_message_says",
    "a_killed_engine_is_started_again",
]


def scenarios(server: Server, home: Path, *names: str) -> dict[str, str | None]:
    """Why each failed, or None."""
    with _scenario(server, home, *names) as process:
        try:
            printed, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0, printed + errors
    return dict(json.loads(printed.splitlines()[-1]))


def _scenario(server: Server, home: Path, *names: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).with_name("tinker_scenarios.py"))]
    # The SDK keeps files in the user's home.
    environment = {**os.environ, "HOME": str(home), "TINKER_TELEMETRY": "0"}
    arguments = [server.url, str(server.output), str(server.model), *names]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *arguments], env=environment, text=True, **pipes)


@pytest.fixture(scope="module")
def results(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return scenarios(server, tmp_path_factory.mktemp("home"), *SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sdk(name: str, results: dict[str, str | None]) -> None:
    """`tinker_scenarios.py` says what each asserts."""
    assert results[name] is None, results[name]


def test_states_outlive_a_killed_server(
    imitator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the server is one run in the list, which is killed, started again, stopped."""
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))

    def listed() -> dict[str, Any]:
        assert main(["run", "list", "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)
        return dict(one)

    ids = set()
    for name in ("states_are_saved", "states_are_there"):
        server = start(imitator, tmp_path / "tinker")
        try:
            assert scenarios(server, tmp_path, name) == {name: None}
            run = listed()
            assert (run["kind"], run["status"], run["step"], run["model"]) == ("serve", "RUNNING", None, str(imitator))
            ids.add(run["id"])
            if name == "states_are_there":
                assert main(["run", "stop", run["id"]]) == 0
                assert "with the states that its clients have saved" in capsys.readouterr().out
                assert server.process.wait(timeout=30) == 0
        finally:
            server.kill()
        assert listed()["status"] == ("FAILED" if name == "states_are_saved" else "STOPPED")
    assert len(ids) == 1
    assert main(["run", "logs", *ids, "-c", "server"]) == 0
    assert capsys.readouterr().out.count(f"ready: TINKER_BASE_URL={server.url}") == 1
    assert main(["run", "metrics", *ids]) == 0
    table = capsys.readouterr().out.splitlines()
    # Of the client that was lost with its server, and of the one that went on from its state.
    assert [line.split()[1] for line in table] == ["step", "5", "5"]
    assert main(["run", "metrics", *ids, "--json", "--limit", "1"]) == 0
    (last,) = json.loads(capsys.readouterr().out)
    assert (last["step"], last["learning_rate"]) == (5, 5e-3)
    assert main(["run", "checkpoints", *ids]) != 0
    assert str(tmp_path / "tinker/states") in " ".join(capsys.readouterr().err.split())
    assert main(["page", *ids]) != 0
    assert f"{server.url}/" in capsys.readouterr().err


@pytest.mark.long
def test_every_call_of_a_killed_server_fails_once_it_is_back(imitator: Path, tmp_path: Path) -> None:
    """While it is away the SDK asks again, at most 30 s apart; then each call gets an error, and saved states load."""
    server = start(imitator, tmp_path / "tinker")
    port = int(server.url.rpartition(":")[2])
    client = _scenario(server, tmp_path, "calls_of_a_killed_server_fail")
    try:
        pending = server.output / "pending"
        until(lambda: pending.exists() or client.poll() is not None, 120, "a call of each kind that waits")
        assert pending.exists(), client.communicate()
        server.kill()
        server = start(imitator, tmp_path / "tinker", port=port)
        printed, errors = client.communicate(timeout=60)
        assert json.loads(printed.splitlines()[-1]) == {"calls_of_a_killed_server_fail": None}, printed + errors
        assert printed.count(" failed ") == 8
        name = "what_was_saved_before_the_kill_is_there"
        assert scenarios(server, tmp_path, name) == {name: None}
    finally:
        client.kill()
        client.wait()
        server.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 24 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    # An engine that ends may still have a file there.
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.long
def test_a_full_disk_is_named_and_costs_nothing(imitator: Path, small_disk: Path, tmp_path: Path) -> None:
    server = start(imitator, small_disk / "tinker")
    try:
        name = "a_full_disk_is_named"
        assert scenarios(server, tmp_path, name) == {name: None}
    finally:
        server.kill()


@pytest.fixture
def busy(server: Server) -> Iterator[str]:
    """A client that has trained two steps by raw requests: its id."""
    import numpy as np
    from tinker.proto import tinker_public_pb2 as pb

    mine, api = {"X-API-Key": KEY}, f"{server.url}/api/v1"

    def call(path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        status, text = _post(f"{api}/{path}", body, **mine)
        assert status == 200, text
        return dict(json.loads(text))

    session = call("create_session", {})["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    promise = call("create_model", model)
    call("retrieve_future", {"request_id": promise["request_id"]})
    name = promise["model_id"]
    for step in (1, 2):
        message = pb.ForwardBackwardRequest(model_id=name, seq_id=2 * step - 1, loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], np.int32).tobytes()
        targets = pb.Tensor(dense=np.array([6, 7, 8]).tobytes(), dtype=pb.DTYPE_INT64, shape=[3])
        datum.loss_fn_inputs["target_tokens"].CopyFrom(targets)
        call("forward_backward", message.SerializeToString())
        done = call("optim_step", {"model_id": name, "seq_id": 2 * step, "adam_params": {}})
        assert "error" not in call("retrieve_future", {"request_id": done["request_id"]})
    yield name
    call(f"sessions/{session}/finish", {"reason": {"type": "success"}})


def _asked(server: Server, path: str, key: str | None = KEY) -> tuple[int, str, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as got:
            return got.status, got.headers["Content-Type"], got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_the_pages_data_are_clients_losses_and_samples(
    server: Server, busy: str, results: dict[str, str | None]
) -> None:
    """`results`: other clients have been there, and have gone."""
    code, kind, text = _asked(server, "/", None)
    assert (code, kind) == (200, "text/html; charset=utf-8")
    script = _asked(server, "/page/assets/tinker.js", None)[2]
    named = re.findall(r"/page/assets/[\w.]+", text) + [
        f"/page/assets/{one}" for one in re.findall(r'"./([\w.]+)"', script)
    ]
    assert len(named) == 5
    assert {_asked(server, path, None)[0] for path in named} == {200}
    assert "://" not in text
    code, _, refused = _asked(server, "/page/now", None)
    assert (code, "TINKER_API_KEY" in json.loads(refused)["error"]["message"]) == (401, True)
    assert _asked(server, "/page/assets/nothing.js")[0] == 404
    now = json.loads(_asked(server, "/page/now")[2])
    (model,) = [one for one in now["status"]["models"] if one["model_id"] == busy]
    assert (model["base_model"], model["rank"], model["steps"], model["queued"]) == ("tiny", 2, 2, 0)
    assert 0 <= model["heard_s"] < 60
    losses = now["losses"][busy]
    assert losses["x"] == [1, 2]
    assert losses["y"][0] == pytest.approx(model["loss_sum"] / 3, rel=0.1)
    assert now["folder"] == "tinker"
    assert {one["name"] for one in now["status"]["engines"]} == {"engine_0", "engine_1"}
    newest = now["samples"][0]
    assert (newest["tokens"], newest["of"]) == (6, 1)
    assert ":sample:" in newest["sampler"]


@pytest.mark.skipif(browser.installed() is None, reason="no chromium is installed (Debian: apt install chromium)")
def test_the_page_in_a_browser(server: Server, busy: str, results: dict[str, str | None], tmp_path: Path) -> None:
    program = browser.installed()
    assert program is not None
    with browser.tab(program, tmp_path / "profile") as tab:
        tab.size(1280, 900)
        tab.goto(f"{server.url}/#key={KEY}")
        tab.until("document.querySelectorAll('table').length >= 3")
        tab.until("document.querySelector('.chart path') !== null")
        text = tab.text()
        for words in (busy, "engine_0", "Nothing waits.", "Last samples", "serves tiny"):
            assert words in text, text
        assert "key=" not in tab.evaluate("location.href")
        tab.picture(tmp_path / "page.png")
        assert tab.complaints == []
        tab.evaluate("sessionStorage.clear()")
        tab.goto(f"{server.url}/")
        tab.until("document.querySelector('#problem form') !== null")


def _post(url: str, body: dict[str, Any] | bytes, **headers: str) -> tuple[int, str]:
    """Bytes are a protobuf message."""
    kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_fails_is_named_with_its_client_and_logged(server: Server) -> None:
    """Weights that overflow: the call, a sampler of them, and what can still be done; and a state of other weights."""
    client = Client(server.url, "tiny", KEY)
    model = client.trained_model()
    client.losses(model, ROWS)
    client.called("optim_step", model, adam_params={"learning_rate": 1e30})
    named = rf"{model} after its optim_step 1 \(learning_rate 1e\+30\): its weights give log-probabilities that are not"
    with pytest.raises(SystemExit, match=named):
        client.losses(model, ROWS)
    saved = client.called("save_weights_for_sampler", model, path="broken")["path"]
    words = rf"{saved}, of step 1: its weights give log-probabilities that are not finite.*from_state"
    with pytest.raises(SystemExit, match=words):
        client.sample(client.sampler(0, model_path=saved), 0, [5, 6, 7], 3)
    assert len(client.sample(client.sampler(1, base_model="tiny"), 0, [5, 6, 7], 3).sequences[0].tokens) == 12
    facts = server.output / "states" / model / "sampler_weights" / "broken" / "primerl.json"
    facts.write_text(facts.read_text().replace('"alpha": 32.0', '"alpha": 8.0'))
    for path, status in ((saved, 422), (saved.replace("broken", "gone"), 404)):
        body = {"session_id": client.session, "sampling_session_seq_id": 2, "model_path": path}
        found, text = _post(f"{server.url}/api/v1/create_sampling_session", body, **{"X-API-Key": KEY})
        assert found == status, text
    log = (server.output / "logs" / "server.log").read_text()
    assert re.search(rf"forward_backward of {model} failed: {named}", log)
    assert re.search(rf"asample of {client.session}:sample:0 \({saved}, of step 1\) failed: {words}", log)
    assert re.search(r"POST /api/v1/create_sampling_session of 127\.0\.0\.1:\d+ is refused with 404: there is no", log)


def test_what_no_sdk_sends_is_refused(server: Server) -> None:
    api = f"{server.url}/api/v1"
    mine = {"X-API-Key": KEY}
    session = json.loads(_post(f"{api}/create_session", {}, **mine)[1])["session_id"]
    for path, body, headers, status, words in (
        ("create_session", {}, {"X-API-Key": "tml-other"}, 401, "set TINKER_API_KEY"),
        ("create_session", {}, {}, 401, "set TINKER_API_KEY"),
        ("forward_backward", {"model_id": "m"}, mine, 415, "from version 0.25 on"),
        ("billing", {}, mine, 404, "not part of this server"),
        ("optim_step", {"model_id": "m", "seq_id": 1}, mine, 404, "model 'm' is not known"),
        ("asample", {"sampling_session_id": "s", "seq_id": 1}, mine, 404, "sampler 's' is not known"),
        ("create_model", {"session_id": "s"}, mine, 422, "the body lacks base_model"),
        ("session_heartbeat", {"session_id": "s"}, mine, 410, "session 's' is not known"),
        ("retrieve_future", {"request_id": "r"}, mine, 410, "not known"),
        ("asample", {"sampling_session_id": "s", "seq_id": 1e999}, mine, 404, "not known"),
        ("create_model", {"session_id": "SESSION", "base_model": "tiny", "model_seq_id": "../x"}, mine, 422, "../x"),
    ):
        given = {name: session if value == "SESSION" else value for name, value in body.items()}
        found, text = _post(f"{api}/{path}", given, **headers)
        assert (found, words in text) == (status, True), (path, found, text)
    assert _post(f"{server.url}/engines/join", {"name": "engine_0", "url": "http://evil"}, **mine)[0] == 401


def test_a_repeated_call_runs_once(server: Server) -> None:
    api, mine = f"{server.url}/api/v1", {"X-API-Key": KEY}

    def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = _post(f"{api}/{path}", body, **mine)
        assert status == 200, text
        return dict(json.loads(text))

    session = call("create_session", {})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    first, again = call("create_model", body), call("create_model", body)
    assert first == again
    assert call("retrieve_future", {"request_id": first["request_id"]}) == {"model_id": f"{session}:train:0"}
    step = {"model_id": first["model_id"], "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
    promises = [call("optim_step", step) for _ in range(3)]
    assert len({one["request_id"] for one in promises}) == 1
    call("retrieve_future", {"request_id": promises[0]["request_id"]})
    status = json.loads(urllib.request.urlopen(_status_of(server), timeout=30).read())
    (model,) = [one for one in status["models"] if one["model_id"] == first["model_id"]]
    assert (model["steps"], model["calls"]) == (1, 1)
    call(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert _post(f"{api}/get_info", {"model_id": first["model_id"]}, **mine)[0] == 404


def _status_of(server: Server) -> urllib.request.Request:
    return urllib.request.Request(f"{server.url}/status", headers={"X-API-Key": KEY})


def test_the_example_learns(server: Server) -> None:
    """Reinforcement learning on the example environment's reward."""
    command = [sys.executable, str(EXAMPLES / "reverse.py"), "--base-model", "tiny", "--steps", "15"]
    letters = ["--letters", "a-j", "--min-length", "3", "--max-length", "6"]
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
    done = subprocess.run([*command, *letters], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(rewards) == 15
    assert sum(rewards[-4:]) / 4 >= sum(rewards[:2]) / 2 + 0.15


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", ""], "host"),
        (["--host", "0.0.0.0"], "host: 0.0.0.0 can be reached from other machines, and TINKER_API_KEY is not set"),
        (["--model.path", "/nowhere"], "there is no folder /nowhere"),
        (["--trainer.max-rnk", "4"], "max_rank"),
        (["--inference.max-model-len", "100000000"], "the model attends to"),
        (["--inference.logprobs-mode", "processed_logprobs"], "inference.logprobs_mode"),
        (
            ["--host", "127.0.0.1", "--deployment.num-infer-nodes", "1", "--slurm.dry-run"],
            "host: 127.0.0.1 is reached from the trainer's node alone, and engine_0",
        ),
    ],
)
def test_bad_input_starts_nothing(
    arguments: list[str],
    words: str,
    imitator: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    given = ["--model.path", str(imitator), "--output-dir", str(tmp_path / "out"), *arguments]
    assert main(["serve", "--tinker", *given]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_port_that_is_taken_costs_nothing_that_was_saved(
    imitator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "out" / "states" / "s" / "weights" / "one"
    lock = tmp_path / "out" / LOCK
    for folder in (saved, lock.parent):
        folder.mkdir(parents=True)
    lock.touch()
    given = ["--model.path", str(imitator), "--output-dir", str(tmp_path / "out"), "--clean-output-dir"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "--tinker", *given, "--port", str(port)]) == 2
    assert f"port: 127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
    assert saved.is_dir()
