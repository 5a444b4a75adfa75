"""Ranks of a training script: they agree by a store, and one that is gone is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import primerl as primerl_package
import pytest
import torch
from end_to_end import REPOSITORY, SMALL, launch, read_lines, until, write_small
from primerl.cli import main
from primerl.launch.preflight.output_folder import claimed
from primerl.launch.supervise.failures import RunFailedError
from primerl.own_trainer import peers as module
from primerl.own_trainer.connection import Connection
from primerl.own_trainer.peers import Peers
from primerl.own_trainer.policy import unwrapped
from primerl.train.distributed.ranks import SILENT_S
from primerl.train.loop.client import OrchestratorError

RANKS = 3
SCRIPT = REPOSITORY / "examples" / "bring-your-own-trainer" / "with_ranks.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def ranks() -> Iterator[list[Peers]]:
    """As many in one process, each with a connection of its own to one store."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connected(rank: int) -> Peers:
        store = torch.distributed.TCPStore("127.0.0.1", server.port, is_master=False)
        prefixed: Any = torch.distributed.PrefixStore("test", store)  # type: ignore[attr-defined]
        return Peers(rank, RANKS, prefixed)

    made = [connected(rank) for rank in range(RANKS)]
    yield made
    for one in made:
        one.leave(orderly=False)


def in_each(ranks: list[Peers], call: Callable[[Peers], Any]) -> list[Any]:
    """What each returns, or the error."""

    def caught(one: Peers) -> Any:
        try:
            return call(one)
        except Exception as error:  # noqa: BLE001 (compared by the test)
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def test_rank_0_does_it_and_all_get_what_came_of_it(ranks: list[Peers]) -> None:
    did = []

    def make() -> dict[str, int]:
        did.append(threading.get_ident())
        return {"version": 3}

    assert in_each(ranks, lambda one: one.agree("publishing", make)) == [{"version": 3}] * RANKS
    assert len(did) == 1
    assert [one.leads for one in ranks] == [True, False, False]


def test_what_fails_in_rank_0_fails_in_all(ranks: list[Peers]) -> None:
    def make() -> None:
        raise OSError("no space left")

    first, *others = in_each(ranks, lambda one: one.agree("saving", make))
    assert isinstance(first, OSError)
    assert all(isinstance(other, RunFailedError) for other in others)
    assert {str(other) for other in others} == {"rank 0: OSError: no space left"}


def test_what_was_refused_may_be_tried_again(ranks: list[Peers]) -> None:
    answers = iter([ValueError("a metric is no number"), "published", "published again"])

    def make() -> str:
        answer = next(answers)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    refused = in_each(ranks, lambda one: one.agree("publishing policy 1", make))
    assert [str(one).removeprefix("rank 0: ValueError: ") for one in refused] == ["a metric is no number"] * RANKS
    for said in ("published", "published again"):
        assert in_each(ranks, lambda one: one.agree("publishing policy 1", make)) == [said] * RANKS


def test_each_hears_what_all_say(ranks: list[Peers]) -> None:
    said = in_each(ranks, lambda one: one.all_of("batch of step 1", f"rank {one.rank}"))
    assert said == [["rank 0", "rank 1", "rank 2"]] * RANKS
    # Another name is another question.
    assert in_each(ranks, lambda one: one.all_of("batch of step 2", "there")) == [["there"] * RANKS] * RANKS


def test_a_rank_that_falls_silent_is_named_with_what_it_did(
    ranks: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ranks
    third.at("training, after policy 4")
    monkeypatch.setattr(module.Heartbeats, "silent_s", lambda _, rank: SILENT_S if rank == 2 else 0.0)
    in_each([first, second], lambda one: one.agree("registering", lambda: 1))
    second._store.set("said/batch/1", "there")
    with pytest.raises(RunFailedError, match=r"no heartbeat for 20 s: rank 2 is gone or hangs, .*after policy 4"):
        first.all_of("batch", "there")


def test_an_error_of_torch_about_a_rank_names_it(ranks: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl.train.distributed import ranks as distributed

    monkeypatch.setattr(distributed, "SAID_WITHIN_S", 0.0)
    first, second, third = ranks
    third.at("training, after policy 7")
    second._store.set("gave_up/1", "")
    named = first.named(RuntimeError("[../third_party/gloo/tcp/pair.cc] Connection closed by peer [127.0.0.1]"))
    assert named is not None
    assert "rank 2 is gone or hangs" in str(named)
    assert "training, after policy 7" in str(named)
    assert first.named(RuntimeError("shapes do not fit")) is None
    assert first.named(ValueError("gloo")) is None


def test_one_process_asks_no_other() -> None:
    alone = Peers(0, 1)
    assert alone.agree("publishing", lambda: 7) == 7
    assert alone.all_of("batch", "there") == ["there"]
    alone.at("training")
    alone.leave(orderly=True)


def test_a_run_that_ends_before_its_last_step_is_no_end_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = object.__new__(Connection)
    connection.max_steps, connection._peers = 6, Peers(0, 1)  # type: ignore[misc]
    monkeypatch.setattr(Connection, "doing", lambda *_: None)
    monkeypatch.setattr(Connection, "_ask", lambda *_: (None, None))
    monkeypatch.setattr(Connection, "status", lambda _: {"run": {"finished": "inference exited with code 1"}})
    with pytest.raises(RunFailedError, match="ended before step 3 of 6: inference exited with code 1"):
        connection._take(3)


def test_an_orchestrator_that_is_gone_with_its_launcher_is_told_with_the_runs_end(tmp_path: Path) -> None:
    connection = object.__new__(Connection)
    connection.output_dir = tmp_path
    gone = OrchestratorError("orchestrator did not answer for 60 s")
    assert str(connection._failed(gone)) == str(gone)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text('{"exit_code": 130, "reason": "interrupted"}')
    assert str(connection._failed(gone)) == f"the run in {tmp_path} has ended (interrupted): {gone}"
    with claimed(str(tmp_path), clean=False, kind="rl"):
        assert str(connection._failed(gone)) == str(gone)


def test_ranks_that_do_not_meet_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RunFailedError, match=r"rank 1 of 2 does not find rank 0: .*MASTER_ADDR"):
        Peers.join()


def test_a_model_that_is_divided_is_refused_by_name(tmp_path: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        assert unwrapped(model) is model
        assert unwrapped(DistributedDataParallel(model)) is model
        divided = torch.nn.Linear(2, 2)
        fully_shard(divided, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"weight is divided among the ranks, .*full_state_dict=True"):
            unwrapped(divided)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_killed_rank_is_named_and_the_same_command_resumes(
    tmp_path: Path, runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    output, steps = tmp_path / "run", 8
    model = write_small(tmp_path / "tiny")
    flags = ("--trainer", "external", "--trainer.ranks", "2", "--ckpt.interval", "2", "--max-steps", str(steps))
    runs.append(run := launch(model, output, *SMALL, *flags))
    run.note_mark()

    def train(log: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(output)]
        with log.open("w", encoding="utf-8") as file:
            script = subprocess.Popen(command, stdout=file, stderr=file, text=True, env={**os.environ, **ONE_THREAD})
        runs.append(script)
        return script

    script = train(tmp_path / "first.log")

    def second_rank() -> int | None:
        """Once it has trained three steps."""
        assert run.launcher.poll() is None, run.ended(5)
        assert script.poll() is None, (tmp_path / "first.log").read_text(encoding="utf-8")
        return rank_of(script.pid, 1) if run.steps() >= 3 else None

    os.kill(until(second_rank, 120, "three steps"), signal.SIGKILL)
    assert script.wait(timeout=60) == 1
    said = (tmp_path / "first.log").read_text(encoding="utf-8")
    assert re.search(r"Root Cause.*\n.*\n *time.*\n *host.*\n *rank +: 1 .*\n *exitcode +: -9", said), said
    script = train(tmp_path / "second.log")
    code, text = run.ended(120)
    assert code == 0, text
    assert script.wait(timeout=60) == 0, (tmp_path / "second.log").read_text(encoding="utf-8")
    lines = read_lines(output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    # Samples of both ranks, through the restart: each once.
    assert [line["progress/num_samples"] for line in lines] == [16.0 * step for step in range(1, steps + 1)]
    assert main(["trace", str(output), "--check"]) == 0
    assert f"{steps} steps" in capsys.readouterr().out


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_script_of_another_number_of_ranks_is_told_how_to_start(tmp_path: Path, runs: list[Any]) -> None:
    output = tmp_path / "run"
    model = write_small(tmp_path / "tiny")
    flags = ("--trainer", "external", "--trainer.ranks", "2", "--max-steps", "100000")
    runs.append(run := launch(model, output, *SMALL, *flags))
    run.note_mark()
    with pytest.raises(
        RunFailedError,
        match=r"has one process, .* trainer\.ranks = 2: start the script as `torchrun --nproc-per-node 2",
    ):
        primerl_package.connect(output, wait_s=120.0)


def rank_of(launcher: int, rank: int) -> int | None:
    """The process of that rank among the children of torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    return None
