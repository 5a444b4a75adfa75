"""Several vLLM servers in one run: started with it, joined later, started by the user; killed, stopped and slowed
down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from end_to_end import Started, launch, primerl, until
from engine_helpers import VLLM_PYTHON, need_vllm
from primerl.run_key import learn, run_key_header

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.end_to_end,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]
VLLM = ["--inference.backend", "vllm", "--inference.python", str(VLLM_PYTHON)]
# More steps than these tests wait for: each ends its run by SIGINT.
ENDLESS = ["--max-steps", "5000", "--keep-broadcasts", "--orchestrator.eval.env", "[]"]
START_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    need_vllm()


def url_of(run: Started) -> str:
    file = run.output / "run" / "orchestrator.json"
    until(lambda: file.exists() or run.launcher.poll() is not None, 60, "the orchestrator's address")
    url = str(json.loads(file.read_text())["url"])
    learn(url, run.output)
    return url


def status(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/status", headers=run_key_header(url), timeout=20.0).json())


def until_status(run: Started, url: str, reached: Any, timeout_s: float, what: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        assert run.launcher.poll() is None, run.ended(5)
        found = status(url)
        return found if reached(found) else None

    return dict(until(look, timeout_s, what))


def serve(found: dict[str, Any], count: int) -> bool:
    """That many engines have proved their weights."""
    return [engine["version"] is not None for engine in found["engines"]] == [True] * count


def answered(engine: dict[str, Any]) -> float:
    """Requests of the run, by vLLM's own count."""
    text = httpx.get(f"{engine['url']}/metrics", timeout=20.0).text
    found = re.findall(r'^vllm:request_success_total{.*finished_reason="(?:stop|length)".*} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def interrupt(run: Started) -> str:
    """Ctrl-C; what the launcher had said."""
    run.launcher.send_signal(signal.SIGINT)
    code, said = run.ended(60)
    assert code == 130, said
    assert run.left() == []
    return said


def lost_nothing(found: dict[str, Any]) -> bool:
    return not found["failures"] and not found["rollouts"]["failed"]


def server_of(run: Started, name: str) -> int:
    """vLLM's server, which leads the process group of all that it has started."""
    parent = run.pid_of(name)
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and f"\nPPid:\t{parent}\n" in Path(f"/proc/{entry}/status").read_text():
                return int(entry)
    raise AssertionError(f"{name} has no server")


def test_one_of_two_is_killed_stopped_and_slowed_down(imitator: Path, tmp_path: Path) -> None:
    run = launch(imitator, tmp_path / "run", *VLLM, *ENDLESS, "--inference.replicas", "2")
    try:
        run.note_mark()
        url = url_of(run)
        found = until_status(run, url, lambda found: serve(found, 2), START_S, "two engines")
        until(lambda: min(map(answered, status(url)["engines"])) > 20, 60, "requests of both")

        parent = run.pid_of("inference_1")
        assert parent is not None
        os.kill(parent, signal.SIGKILL)
        killed = next(engine for engine in found["engines"] if engine["url"] in log_of(run, "inference_1"))
        other = 1 - killed["engine"]
        down = until_status(
            run, url, lambda found: found["engines"][killed["engine"]]["version"] is None, 30, "its loss"
        )
        assert down["engines"][other]["version"] is not None
        sampled = down["tokens"]["sampled"]
        until_status(run, url, lambda found: found["tokens"]["sampled"] > sampled + 2000, 60, "work of the other one")
        # It is started again, at another port, and proves a version of now: in its old place.
        back = until_status(run, url, lambda found: serve(found, 2), START_S, "both engines again")
        assert back["engines"][killed["engine"]]["url"] != killed["url"]
        assert back["engines"][killed["engine"]]["version"] > down["run"]["policy_version"]
        until(lambda: min(map(answered, status(url)["engines"])) > 20, 60, "requests of both again")
        assert lost_nothing(status(url)), status(url)["failures"]

        group = server_of(run, f"inference_{other_name(run, found, other)}")
        assert "health" in out_and_back(run, url, other, Stopped(group))
        slow_and_back(run, url, other, Slowed(group))
        said = interrupt(run)
        assert "inference_1 was killed by SIGKILL; it is started again" in said
        # What the stopped one had begun is in no batch, and all else is what its weights sampled.
        assert "token-exact" in primerl("verify", str(run.output))
    finally:
        run.kill()


@dataclass
class Stopped:
    """By SIGSTOP, until it is left."""

    group: int

    def __enter__(self) -> float:
        os.killpg(self.group, signal.SIGSTOP)
        return time.monotonic()

    def __exit__(self, *_: object) -> None:
        os.killpg(self.group, signal.SIGCONT)


def out_and_back(run: Started, url: str, engine: int, stopped: Stopped) -> str:
    """A stopped engine is named and gets nothing, the other one works; once it goes on, it proves its weights first.
    What was said of it."""
    with stopped as since:
        lost = until_status(run, url, lambda found: found["engines"][engine]["version"] is None, 30, "its loss")
        print(f"a stopped engine was out of rotation after {time.monotonic() - since:.1f} s")
        # So that what it proves when it is back is another version than the one it was stopped with.
        version = lost["run"]["policy_version"]
        until_status(run, url, lambda found: found["run"]["policy_version"] > version, 90, "work of the other one")
    back = until_status(run, url, lambda found: serve(found, 2), 90, "its return")
    assert back["engines"][engine]["version"] > version
    before = answered(back["engines"][engine])
    until(lambda: answered(back["engines"][engine]) > before + 10, 60, "its requests")
    assert lost_nothing(status(url)), status(url)["failures"]
    return str(lost["engines"][engine]["doing"])


class Slowed:
    """It works for 50 ms, and rests for 1.4 s, too short to be taken for a hang, until it is left. By the processor's
    time, so that it gets on with something in each slice, also where others want the processor."""

    WORKS_S, RESTS_S, LONGEST_S = 0.05, 1.4, 0.5

    def __init__(self, group: int) -> None:
        self.group = group
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._slow)

    def __enter__(self) -> None:
        self.thread.start()

    def _slow(self) -> None:
        while not self.left.is_set():
            os.killpg(self.group, signal.SIGSTOP)
            self.left.wait(self.RESTS_S)
            before, until_s = worked_s(self.group), time.monotonic() + self.LONGEST_S
            os.killpg(self.group, signal.SIGCONT)
            while worked_s(self.group) - before < self.WORKS_S and time.monotonic() < until_s:
                self.left.wait(0.01)
        os.killpg(self.group, signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self.thread.join()


def worked_s(group: int) -> float:
    """Seconds of processor that the processes of the group have had."""
    ticks = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # Behind the name, which may have spaces: state, parent, group, ..., and the times 11 places on.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def slow_and_back(run: Started, url: str, engine: int, slowed: Slowed) -> None:
    """A slow engine is named, by its pace or for its old weights, and gets little, but what it has begun ends there.
    Later it is as any other."""

    def counts() -> list[float]:
        return [answered(each) for each in status(url)["engines"]]

    def share_of(requests: float) -> float:
        """The engine's, of that many requests from now on."""
        before = counts()
        enough = sum(before) + requests
        after: list[float] = until(lambda: now if sum(now := counts()) >= enough else None, 120, "requests")
        return (after[engine] - before[engine]) / (sum(after) - sum(before))

    def is_slow(found: dict[str, Any]) -> bool:
        return re.search("slow: |behind: ", found["engines"][engine]["doing"]) is not None

    with slowed:
        began = time.monotonic()
        named = until_status(run, url, is_slow, 120, "what is wrong with it")
        print(f"after {time.monotonic() - began:.1f} s: {named['engines'][engine]['doing']}")
        share = share_of(200)
        print(f"a slow engine has answered {share:.3f} of the requests")
        assert share < 0.2
    until_status(run, url, lambda found: serve(found, 2) and not is_slow(found), 180, "its recovery")
    assert share_of(200) > 0.25
    assert lost_nothing(status(url)), status(url)["failures"]


def log_of(run: Started, name: str) -> str:
    return (run.output / "logs" / f"{name}.log").read_text()


def other_name(run: Started, found: dict[str, Any], engine: int) -> int:
    """The number in the name of the process."""
    return next(index for index in (0, 1) if found["engines"][engine]["url"] in log_of(run, f"inference_{index}"))


@contextlib.contextmanager
def by_hand(model: Path, log: Path, *flags: str, **variables: str) -> Iterator[str]:
    """vLLM as a user starts it: the URL, before it is ready."""
    # Nobody is given the port until vLLM has bound it, which it does with that option, too.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    small = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", "64M", "--max-model-len", "128"]
    whole = ["--max-num-seqs", "32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]
    one = ["--distributed-executor-backend", "uni", "--port", str(port), "--host", "127.0.0.1"]
    quick = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)),
                *("--served-model-name", "reverse-text", *small, *whole, *one, *flags),
            ],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **quick, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        reserved.close()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


OWN = [
    "--enable-scale-out",
    # For adapters of the user's own: the run sends whole weights. Not in the output layer: vLLM would die of the probe.
    *("--enable-lora", "--lora-target-modules", "q_proj"),
    *("--worker-extension-cls", "primerl.inference.vllm.worker.WorkerExtension"),
    *("--weight-transfer-config", '{"backend":"primerl"}'),
]


def test_servers_that_the_user_has_started(imitator: Path, tmp_path: Path, repository: Path) -> None:
    own = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(repository / "python")}
    with (
        by_hand(imitator, tmp_path / "bare.log") as bare,
        by_hand(imitator, tmp_path / "own.log", *OWN, **own) as fit,
    ):
        until(lambda: answers(bare) and answers(fit), START_S, "both servers")
        elsewhere = ["--inference.replicas", "0", "--orchestrator.engines"]
        run = launch(imitator, tmp_path / "bare", *ENDLESS, *elsewhere, json.dumps([bare]))
        try:
            began = time.monotonic()
            code, said = run.ended(120)
            print(f"a server without the flags ended the run after {time.monotonic() - began:.1f} s")
            assert code == 1, said
            for words in (bare, "--enable-scale-out", "VLLM_SERVER_DEV_MODE=1", 'docs/vllm.md, "Your own vLLM"'):
                assert words in said, said
        finally:
            run.kill()
        named = ["--model.name", "another"]
        run = launch(imitator, tmp_path / "named", *ENDLESS, *named, *elsewhere, json.dumps([fit]))
        try:
            code, said = run.ended(120)
            assert code == 1, said
            assert "--served-model-name another" in said, said
        finally:
            run.kill()
        run = launch(imitator, tmp_path / "run", *ENDLESS, *elsewhere, json.dumps([fit]))
        try:
            joins(run, imitator, tmp_path)
        finally:
            run.kill()


def joins(run: Started, model: Path, folder: Path) -> None:
    """A run on the user's server is joined by an engine that is started by hand."""
    run.note_mark()
    url = url_of(run)
    until_status(run, url, lambda found: serve(found, 1), START_S, "the user's server")
    command = [sys.executable, "-m", "primerl", "inference", "--model.path", str(model), "--model.name", "reverse-text"]
    more = ["--max-model-len", "128", *("--backend", "vllm", "--python", str(VLLM_PYTHON)), "--join", url]
    with (folder / "joined.log").open("w") as log:
        joined = subprocess.Popen([*command, *more], stdout=log, stderr=log)
    try:
        until_status(run, url, lambda found: serve(found, 2), START_S, "the engine that joins")
        until(lambda: min(map(answered, status(url)["engines"])) > 20, 60, "requests of both")
        joined.terminate()
        assert joined.wait(30) == 0
        left = until_status(run, url, lambda found: found["engines"][1]["version"] is None, 30, "its end")
        assert left["engines"][0]["version"] is not None
        assert lost_nothing(left), left["failures"]
        interrupt(run)
        assert "token-exact" in primerl("verify", str(run.output))
    finally:
        joined.kill()
        joined.wait()
