"""A run over machines that share no loopback: network namespaces with a cable between them, which is cut once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_pages import page_of, shown
from end_to_end import primerl, read_lines, steps_of, until
from primerl.launch.report import addresses
from primerl.net.addresses import address_towards, told_to
from run_helpers import write_run

KEY = "the-runs-key"
WAIT_S = 150.0
ORCHESTRATOR, WORKERS = "10.77.0.1", "10.77.0.2"
PAGE = "docs/recipes/several-machines.md"
URL = f"http://{ORCHESTRATOR}:8000"


# Which address is told


def test_an_address_that_others_reach_is_told() -> None:
    assert told_to("http://127.0.0.1:5", "http://127.0.0.1:8000") == "http://127.0.0.1:5"
    assert told_to("http://0.0.0.0:5", "http://127.0.0.1:8000") == "http://127.0.0.1:5"
    assert told_to("http://0.0.0.0:5", "http://0.0.0.0:8000") == "http://127.0.0.1:5"
    # What was given is not guessed anew, and a name needs no look-up.
    assert told_to("http://10.9.8.7:5", "http://nowhere.invalid:1") == "http://10.9.8.7:5"
    assert told_to("http://node:5", "http://nowhere.invalid:1") == "http://node:5"
    with pytest.raises(OSError, match=r".+"):
        told_to("http://0.0.0.0:5", "http://nowhere.invalid:1")
    with pytest.raises(OSError, match=r".+"):
        address_towards("http://nowhere.invalid:1")


def test_a_run_names_addresses_with_brackets_and_none_that_nobody_reaches() -> None:
    assert addresses.reached_at("fd77::1", 8000) == "http://[fd77::1]:8000"
    assert addresses.reached_at("node-1", 8000) == "http://node-1:8000"
    for everywhere in addresses.ANY:
        assert addresses.reached_at(everywhere, 8000) == f"http://{socket.gethostname()}:8000"


# Machines


class Machine:
    """A network, a host name and mounts of its own, which are gone when `holder` is."""

    def __init__(self) -> None:
        command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", "echo ready; exec sleep 600"]
        self.holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.holder.stdout is not None
        self.is_made = self.holder.stdout.readline() == b"ready\n"
        self.started: list[subprocess.Popen[bytes]] = []

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--uts", "--", *command]

    def run(self, *command: str) -> None:
        subprocess.run(self.enter(*command), check=True, capture_output=True, timeout=30)

    def start(self, folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """`primerl <arguments>` there, with its output in `folder/name`."""
        variables = {
            **os.environ,
            "PRIMERL_API_KEY": KEY,
            "PRIMERL_STATE_DIR": os.fspath(folder / f"state-{name}"),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        }
        with (folder / name).open("wb") as file:
            process = subprocess.Popen(
                self.enter(sys.executable, "-m", "primerl", *arguments),
                cwd=folder,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
        for process in self.started:
            process.wait()
        self.holder.kill()
        self.holder.wait()
        if self.holder.stdout is not None:
            self.holder.stdout.close()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two, with a cable between them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("network namespaces are made by root, on Linux")
    made: list[Machine] = []
    try:
        try:
            made += [Machine()]
            made += [Machine()]
        except FileNotFoundError as missing:
            pytest.skip(f"no namespaces: {missing}")
        one, other = made
        if not one.is_made or not other.is_made:
            pytest.skip("this machine lets nobody make namespaces")
        pair = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(other.holder.pid)]
        try:
            one.run(*pair)
        except (OSError, subprocess.SubprocessError) as refused:
            pytest.skip(f"no cable between namespaces: {refused}")
        for machine, address in ((one, ORCHESTRATOR), (other, WORKERS)):
            machine.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
            machine.run("ip", "link", "set", "lo", "up")
        yield one, other
    finally:
        for machine in made:
            machine.end()


ASK = """
import json, sys
from primerl.net.requests import ask
print(json.dumps(ask(sys.argv[1], "/status", within_s=5.0)[1]))
"""


def status(machine: Machine) -> dict[str, Any]:
    """What the orchestrator says to its own machine; empty while it does not answer."""
    variables = {**os.environ, "PRIMERL_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = machine.enter(sys.executable, "-c", ASK, URL)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def config_of_the_page(folder: Path) -> Path:
    [config] = [block.text for block in page_of(PAGE).blocks if block.file == "machines.toml"]
    file = folder / "machines.toml"
    file.write_text(config)
    return file


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
def test_a_run_over_two_machines_outlives_a_cable_that_is_cut(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    here, there = machines
    write_run(tmp_path)
    output = tmp_path / "run"
    file = config_of_the_page(tmp_path)
    changes = {
        "--model.path": os.fspath(tmp_path / "tiny"),
        "--output-dir": os.fspath(output),
        # More than it comes to before the cable is cut, by far: it is stopped by the test.
        "--max-steps": "100000",
        "--orchestrator.batch-size": "8",
        "--orchestrator.group-size": "4",
    }
    # The key is in the environment of both, as it is on the page.
    meant = {"PRIMERL_API_KEY=...": None, "machines.toml": os.fspath(file), "http://node-1:8000": URL, "4": "1"}
    (_, *first), (_, *second), *_ = shown(__file__, "docs/recipes/several-machines.md", meant)
    run = here.start(tmp_path, "rl.log", *first, *[word for pair in changes.items() for word in pair])
    # Of the run's folder the other machine has nothing.
    output.mkdir(exist_ok=True)
    there.run("mount", "-t", "tmpfs", "none", os.fspath(output))
    lonely = ["--model.path", os.fspath(tmp_path / "tiny"), "--join", URL]
    refused = there.start(tmp_path, "engine.log", "inference", *lonely)
    workers = there.start(tmp_path, "workers.log", *second)

    def steps() -> int:
        assert run.poll() is None, (tmp_path / "rl.log").read_text()
        return len(read_lines(output / "metrics.jsonl"))

    until(lambda: steps() >= 2, WAIT_S, "training over the network")
    assert refused.wait(WAIT_S) == 2
    assert "host: 127.0.0.1 is reached from this machine alone" in (tmp_path / "engine.log").read_text()

    here.run("ip", "link", "set", "eth0", "down")
    # Nothing tells the orchestrator that the connections are dead.
    until(lambda: status(here).get("workers") == [], WAIT_S, "the worker is missed")
    stood = steps()
    here.run("ip", "link", "set", "eth0", "up")
    until(lambda: steps() >= stood + 2, WAIT_S, "training again")

    # Not SIGINT, which is ignored where the tests are run in a shell's background.
    run.terminate()
    assert run.wait(WAIT_S) == 130, (tmp_path / "rl.log").read_text()
    workers.terminate()
    assert workers.wait(WAIT_S) == 0, (tmp_path / "workers.log").read_text()
    trained = steps_of(output)
    assert trained == list(range(1, len(trained) + 1))
    assert "every invariant holds" in primerl("trace", "--check", os.fspath(output))


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
def test_an_engine_that_shares_no_folder_pulls_the_weights(machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    here, there = machines
    write_run(tmp_path)
    output, pulled = tmp_path / "run", tmp_path / "pulled"
    copy = shutil.copytree(tmp_path / "tiny", tmp_path / "local" / "tiny")
    meant = {"PRIMERL_API_KEY=...": None, "machines.toml": os.fspath(config_of_the_page(tmp_path))}
    meant |= {"http://node-1:8000": URL, "/local/model": os.fspath(copy), "/local/weights": os.fspath(pulled)}
    (_, *first), _, (_, *dry), (_, *engine) = shown(__file__, "docs/recipes/several-machines.md", meant)
    changes = {
        "--model.path": os.fspath(tmp_path / "tiny"),
        "--output-dir": os.fspath(output),
        "--max-steps": "3",
        "--orchestrator.batch-size": "8",
        "--orchestrator.group-size": "4",
        "--orchestrator.train.env.0.num-workers": "1",
        "--inference.replicas": "0",
        "--orchestrator.engines": json.dumps([f"http://{WORKERS}:8001"]),
    }
    output.mkdir()
    there.run("mount", "-t", "tmpfs", "none", os.fspath(output))
    there.run("mount", "-t", "tmpfs", "none", os.fspath(tmp_path / "tiny"))
    # Before there is an orchestrator, and as one that it could not reach.
    early = there.start(tmp_path, "early.log", *dry)
    assert early.wait(WAIT_S) == 2
    assert f"no orchestrator answers at {URL}" in (tmp_path / "early.log").read_text()
    run = here.start(tmp_path, "rl.log", *first, *[word for pair in changes.items() for word in pair])
    until(lambda: run.poll() is not None or status(here), WAIT_S, "the orchestrator")
    there.run("ip", "address", "add", "10.78.0.9/24", "dev", "lo")
    for host, code, said in [
        ("0.0.0.0", 0, f"{URL} is reached from here, and reaches this machine at http://{WORKERS}:8001"),
        ("127.0.0.1", 2, "127.0.0.1 is reached from this machine alone"),
        ("10.78.0.9", 2, f"the orchestrator at {URL} does not reach this machine at http://10.78.0.9:8001"),
    ]:
        asked = there.start(tmp_path, "dry.log", *[host if word == "0.0.0.0" else word for word in dry])
        assert asked.wait(WAIT_S) == code, (tmp_path / "dry.log").read_text()
        assert said in (tmp_path / "dry.log").read_text()
    serving = there.start(tmp_path, "engine.log", *engine)
    assert run.wait(WAIT_S) == 0, (tmp_path / "rl.log").read_text() + (tmp_path / "engine.log").read_text()
    assert steps_of(output) == [1, 2, 3]
    serving.terminate()
    assert serving.wait(WAIT_S) == 0, (tmp_path / "engine.log").read_text()
    # Each of them was proved by its hashes, or it had sampled nothing.
    assert {path.name for path in pulled.iterdir()} <= {".lock", "step_1", "step_2", "step_3"}
    assert "bytes pulled from" in (tmp_path / "engine.log").read_text()
    assert "every invariant holds" in primerl("trace", "--check", os.fspath(output))
