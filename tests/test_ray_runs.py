"""Runs on a real Ray of two nodes on this host. None of it is in CI: Ray is no part of what it installs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import ray_helpers
from cluster_commands import (
    ENGINES,
    FINE_TUNING,
    TINKER,
    TINKER_KEY,
    a_client_trains_and_samples,
    a_port_that_is_taken_is_named,
    an_engine_is_killed_and_comes_back,
    running,
    write_rows,
)
from docs_pages import shown
from end_to_end import primerl, start, steps_of, until
from long_runs import LongRuns
from primerl.launch.placement.ray import agent, keeper
from ray_helpers import CPUS, HEAD, SECOND, Cluster
from run_helpers import write_run
from slurm_runs import variable

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ray_helpers.missing() is not None, reason=str(ray_helpers.missing())),
]
RAY = """
[deployment]
num_infer_nodes = 1
[ray]
"""
MANY_STEPS = 60
WAIT_S, LIMIT_S = 120, 400
NAMED_S = 30
"""How soon a frozen node is named, at the latest."""


RUNS = LongRuns(MANY_STEPS, WAIT_S, LIMIT_S)


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    with ray_helpers.cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _within(ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with `rl.toml`, on this Ray, without the tests' own fork servers. Nothing may be left behind."""
    file = write_run(tmp_path)
    file.write_text(file.read_text() + RAY)
    monkeypatch.chdir(tmp_path)
    for name, value in ray.variables.items():
        monkeypatch.setenv(name, value)
    with forks.own_servers():
        yield
        until(lambda: left(tmp_path) == [], WAIT_S, "the end of all processes")
        until(lambda: is_whole(ray), WAIT_S, "what was reserved")


def is_whole(ray: Cluster) -> bool:
    """Whether both nodes are there and free. One that was killed is replaced once Ray knows of it, which is seconds
    later."""
    if SECOND not in ray.free():
        ray.ask(add=SECOND)
    return ray.free() == {HEAD: CPUS, SECOND: CPUS}


def left(folder: Path) -> list[str]:
    """Command lines of processes of a run, with their ids."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace") if entry.isdigit() else ""
            if str(folder) in words or "placement.ray.driver" in words or "ray/keeper.py" in words:
                found.append(f"{entry} {words}".replace("\0", " "))
    return found


def parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        found.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def processes_of(word: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and word in Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace"):
                found.append(int(entry))
    return found


def on_node(pid: int, address: str) -> bool:
    """Whether a Ray worker belongs to the node."""
    with contextlib.suppress(OSError):
        return f"--node-ip-address={address}" in " ".join(
            Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ") for one in parents(pid)
        )
    return False


def agents(address: str) -> list[int]:
    return [pid for pid in processes_of("ray::Agent") if on_node(pid, address)]


def test_a_whole_run_over_two_nodes(ray: Cluster, tmp_path: Path) -> None:
    plan, whole, verify, *_ = shown(__file__, "docs/ray.md")
    planned = primerl(*plan[1:])
    assert re.search(rf"trainer +{HEAD} ", planned)
    assert re.search(rf"inference +{SECOND} ", planned)
    output = tmp_path / "outputs" / "small"
    # A dry run writes configs, starts nothing and reserves nothing.
    assert (output / "configs").is_dir()
    assert not (output / "logs").exists()
    assert ray.free() == {HEAD: CPUS, SECOND: CPUS}
    run = start(output, *whole[2:])
    key_file = output / "run" / "key"
    until(lambda: key_file.is_file() or run.launcher.poll() is not None, WAIT_S, "the run's key")
    key, seen = key_file.read_text().strip(), left(tmp_path)
    printed = RUNS.has_finished(run, 2)
    assert f"Ray has reserved {HEAD}: " in printed
    assert seen
    assert not any(key in line for line in seen)
    assert "inference: process" in (output / "logs" / f"node_{SECOND}.log").read_text()
    assert "trainer: process" in (output / "logs" / f"node_{HEAD}.log").read_text()
    [listed] = [one for one in json.loads(primerl("run", "list", "--json")) if one["output_dir"] == str(output)]
    assert (listed["status"], listed["step"]) == ("COMPLETED", 2)
    primerl(*verify[1:])


def test_the_other_commands_of_the_page(ray: Cluster, tmp_path: Path) -> None:
    _, _, _, detached, *looking = shown(__file__, "docs/ray.md")
    run_id = primerl(*detached[1:]).split()[0]
    for words in looking:
        said = primerl(*(run_id if word == "3f9a1c2e" else word for word in words[1:]))
        if words[2] == "list":
            assert run_id in said
    assert steps_of(tmp_path / detached[detached.index("--output-dir") + 1]) == [1, 2]


def test_what_cannot_be_placed_is_named_before(ray: Cluster, tmp_path: Path) -> None:
    for key, value, said in [
        ("--deployment.num-infer-nodes", "7", "8 nodes are asked for (num_train_nodes 1 + num_infer_nodes 7), and the"),
        ("--trainer.threads", "9", f"trainer needs a node with 9 CPUs; the cluster has 2 nodes ({HEAD}: 6 CPUs; "),
        (
            "--ray.address",
            "ray://127.0.0.2:10001",
            "start the command on a node of the cluster, or",
        ),
        ("--ray.address", "127.0.0.2:1", "no Ray cluster can be reached by '127.0.0.2:1': no answer within 30 s"),
    ]:
        assert said in primerl("rl", "@", "rl.toml", "--output-dir", "o", key, value, code=2)
        assert not (tmp_path / "o").exists()
        assert left(tmp_path) == []


def test_each_role_is_killed(ray: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o") as run:
        for name in ("trainer", "inference", "orchestrator", "env_reverse-text_0"):
            pid = until(lambda name=name: run.pid_of(name), WAIT_S, name)
            os.kill(pid, signal.SIGKILL)
            until(lambda name=name, pid=pid: run.pid_of(name) not in (None, pid), WAIT_S, f"another {name}")
            began = run.steps()
            until(lambda began=began: run.steps() > began + 1, WAIT_S, "more steps")
        printed = RUNS.has_finished(run)
    for name in ("trainer", "inference", "orchestrator", "env_reverse-text_0"):
        assert f"{name} was killed by SIGKILL" in printed


def test_a_keeper_and_an_agent_are_killed(ray: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o") as run:
        for kill in ("keeper", "agent"):
            engine = until(lambda: run.pid_of("inference"), WAIT_S, "the engine")
            if kill == "keeper":
                keepers = processes_of("ray/keeper.py")
                victims = [pid for pid in parents(engine) if pid in keepers]
            else:
                victims = agents(SECOND)
            os.kill(victims[0], signal.SIGKILL)
            until(lambda engine=engine: run.pid_of("inference") not in (None, engine), WAIT_S, "another engine")
            began = run.steps()
            until(lambda began=began: run.steps() > began + 1, WAIT_S, "more steps")
        printed = RUNS.has_finished(run)
    assert f"inference was lost on node {SECOND}: its keeper has ended without a report" in printed
    assert f"inference was lost on node {SECOND}: its agent has died" in printed


def test_a_node_dies_and_its_roles_go_elsewhere(ray: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o") as run:
        ray.ask(kill=SECOND)
        printed = RUNS.has_finished(run)
    assert f"inference was lost on node {SECOND}" in printed
    assert "inference: process" in (run.output / "logs" / f"node_{HEAD}.log").read_text()


def test_a_node_of_the_trainer_dies_and_another_one_joins(ray: Cluster, tmp_path: Path) -> None:
    nodes = ["--deployment.num-train-nodes", "2", "--deployment.num-infer-nodes", "0", "--trainer.ranks", "2"]
    with RUNS.running(tmp_path / "o", *nodes) as run:
        assert (run.output / "logs" / "trainer" / "node_1.log").is_file()
        ray.ask(kill=SECOND)
        until(lambda: run.pid_of("trainer") is None, WAIT_S, "the end of the other rank")
        ray.ask(add=SECOND)
        printed = RUNS.has_finished(run)
    assert f"trainer was lost on node {SECOND}" in printed


def test_a_frozen_node_is_named_and_ends_once_it_thaws(ray: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o", total=4000) as run:
        engine = until(lambda: run.pid_of("inference"), WAIT_S, "the engine")
        # Up to its keeper: the tests themselves are among the parents of Ray's processes.
        own = [*processes_of("ray/keeper.py"), *processes_of("guard.py"), engine]
        frozen = [*agents(SECOND), *[pid for pid in parents(engine) if pid in own]]
        raylets = [pid for pid in processes_of("raylet/raylet") if on_node(pid, SECOND)]
        assert raylets
        began = time.monotonic()
        log = run.output / "logs" / f"node_{SECOND}.log"
        try:
            for pid in [*raylets, *frozen]:
                os.kill(pid, signal.SIGSTOP)
            until(lambda: "has not answered for 25 s" in log.read_text(), NAMED_S, "that it is named")
            assert time.monotonic() - began < NAMED_S
            elsewhere = run.output / "logs" / f"node_{HEAD}.log"
            until(lambda: "inference: process" in elsewhere.read_text(), WAIT_S, "another engine")
        finally:
            for pid in [*raylets, *frozen]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        until(lambda: not Path(f"/proc/{engine}").exists(), WAIT_S, "the end of what was frozen")
        began_at = run.steps()
        until(lambda: run.steps() > began_at + 2, WAIT_S, "more steps")


@pytest.mark.parametrize("how", ["launcher", "driver", "stop", "ctrl-c"])
def test_a_run_that_is_ended_leaves_nothing_and_can_be_resumed(ray: Cluster, tmp_path: Path, how: str) -> None:
    with RUNS.running(tmp_path / "o") as run:
        [run_id] = [one["id"] for one in json.loads(primerl("run", "list", "--json")) if one["status"] == "RUNNING"]
        if how == "launcher":
            run.launcher.kill()
        elif how == "driver":
            [driver] = processes_of("placement.ray.driver")
            os.kill(driver, signal.SIGKILL)
        elif how == "stop":
            primerl("run", "stop", run_id)
        else:
            run.launcher.send_signal(signal.SIGINT)
        code, printed = run.ended(LIMIT_S)
    assert code not in (0, 2), printed
    if how == "driver":
        assert "the connection to the Ray cluster has ended: code -9" in printed
    until(lambda: left(tmp_path) == [], 20, "the end of all processes")
    until(lambda: ray.free() == {HEAD: CPUS, SECOND: CPUS}, 20, "what was reserved")
    primerl("run", "resume", run_id, "--max-steps", str(len(steps_of(run.output)) + 5))
    found = steps_of(run.output)
    assert found == list(range(1, len(found) + 1))
    assert "every invariant holds" in primerl("trace", str(run.output), "--check")


def test_engines_on_two_nodes_serve_until_they_are_stopped(ray: Cluster, tmp_path: Path) -> None:
    (tmp_path / "inference.toml").write_text(
        f"threads = {CPUS - 2}\n{ENGINES}[ray]\n".replace("= 2\n[ray]", "= 0\n[ray]")
    )
    with running(tmp_path / "i", "inference", "@", "inference.toml") as run:
        an_engine_is_killed_and_comes_back(run, "inference_1", WAIT_S)
        # Longer than a keeper whose agent is silent waits before it ends its process.
        time.sleep(keeper.agent.ORPHAN_S + 3 * agent.ALIVE_S)
        for node in (HEAD, SECOND):
            assert "process" in (run.output / "logs" / f"node_{node}.log").read_text()
        run.launcher.send_signal(signal.SIGTERM)
        code, printed = run.ended(LIMIT_S)
    assert code == 130, printed
    assert "inference_1 was killed by SIGKILL; it is started again" in printed
    assert "was lost" not in printed


def test_a_tinker_server_with_engines_on_another_node(
    ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", TINKER_KEY)
    (tmp_path / "serve.toml").write_text(f"{TINKER}[ray]\n")
    command = ["serve", "--tinker", "@", "serve.toml"]
    planned = primerl(*command, "--output-dir", "dry", "--dry-run")
    assert re.search(rf"trainer +{HEAD} ", planned)
    assert re.search(rf"engine_1 +{SECOND} ", planned)
    refused = primerl(*command, "--trainer.threads", str(CPUS + 1), "--dry-run", code=2)
    assert "the trainer is in this command's own process: start that on a node" in " ".join(refused.lower().split())
    with running(tmp_path / "t", *command) as run:
        url = a_client_trains_and_samples(run, WAIT_S)
        assert ray.free() == {HEAD: CPUS - 1, SECOND: CPUS - 2}
        [listed] = [one for one in json.loads(primerl("run", "list", "--json")) if one["output_dir"] == str(run.output)]
        assert (listed["kind"], listed["status"]) == ("serve", "RUNNING")
        assert f"ready: TINKER_BASE_URL={url}" in primerl("run", "logs", listed["id"], "-c", "server")
        assert "engine_1: process" in (run.output / "logs" / f"node_{SECOND}.log").read_text()
        assert "with the states that its clients have saved" in primerl("run", "stop", listed["id"])
        code, printed = run.ended(LIMIT_S)
    assert code == 0, printed
    assert "engine_1 was killed by SIGKILL; it is started again" in printed


def test_a_fine_tuning_on_two_nodes(ray: Cluster, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "sft.toml").write_text(f"{FINE_TUNING}[ray]\n")
    planned = primerl("sft", "@", "sft.toml", "--dry-run")
    assert re.search(rf"sft +({HEAD}, {SECOND}|{SECOND}, {HEAD}) ", planned)
    assert "2 ranks on 2 nodes" in primerl("sft", "@", "sft.toml")
    assert steps_of(tmp_path / "o") == list(range(1, 61))
    assert (tmp_path / "o" / "logs" / "sft" / "node_1.log").is_file()
    # All ranks on one node: what is started there starts them.
    one = ["--deployment.num-train-nodes", "1", "--output-dir", "one", "--max-steps", "3"]
    assert "2 ranks on 1 node" in primerl("sft", "@", "sft.toml", *one)
    assert steps_of(tmp_path / "one") == [1, 2, 3]


def test_a_fine_tuning_that_fails_says_so(ray: Cluster, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "sft.toml").write_text(f"{FINE_TUNING}[ray]\n")
    with running(tmp_path / "o", "sft", "@", "sft.toml", "--max-steps", "100000") as run:
        until(lambda: run.steps() >= 2, WAIT_S, "its first steps")
        [rank] = [pid for pid in processes_of("configs/sft.toml") if variable(pid, "RANK") == "1"]
        os.kill(rank, signal.SIGKILL)
        code, printed = run.ended(LIMIT_S)
    assert code not in (0, 2), printed
    assert "sft was killed by SIGKILL" in printed


def test_an_evaluation_over_two_nodes(ray: Cluster, tmp_path: Path) -> None:
    size = ["-n", "4", "--max-tokens", "16", "--seq-len", "128", "--inference.threads", str(CPUS - 1)]
    printed = primerl("eval", "reverse-text", "-m", "tiny", *size, "--deployment.type", "ray", "--output-dir", "e")
    assert "4 rollouts are in" in printed
    assert any("inference: process" in log.read_text() for log in (tmp_path / "e" / "logs").glob("node_*.log"))


def test_a_port_that_is_taken_on_another_node_is_named(ray: Cluster, tmp_path: Path) -> None:
    a_port_that_is_taken_is_named(tmp_path, LIMIT_S)
