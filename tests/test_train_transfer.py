"""Weights sent from memory: real processes on both sides, over gloo. What comes has the manifest's hashes or does not
come, and whoever does not get it is told why within moments."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.net.addresses import address_towards
from primerl.train.model.packed_model import load_model
from primerl.train.weights import transfer, wire
from primerl.train.weights.broadcast import Snapshot
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.receiver import NoSenderError, TransferError, close_links, receive
from primerl.train.weights.transfer import Sender
from primerl.train.weights.wire import PeerGoneError, buckets
from rank_helpers import load_shards
from transfer_helpers import WORKER, Told, all_do, senders


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, TinyConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2), seed=3)
    return path


@pytest.fixture
def workers() -> Iterator[list[Told]]:
    """Two processes that may be the workers of an engine, or an engine each."""
    started = [Told(WORKER), Told(WORKER)]
    assert [worker.answer() for worker in started] == ["ready"] * 2
    yield started
    for worker in started:
        worker.end()


def ask(workers: list[Told], manifest: str, file: str, **changes: Any) -> list[Any]:
    """What the workers of one engine get, and how many groups each has made since it began."""
    for rank, worker in enumerate(workers):
        engine = "the engine"
        command = {"manifest": manifest, "file": file, "world": len(workers), "rank": rank, "engine": engine}
        worker.tell({**command, "timeout_s": 10.0, **changes})
    return [worker.answer() for worker in workers]


def files_of(manifest: str) -> dict[str, dict[str, str]]:
    """Hashes by name, by file."""
    contents = json.loads(Path(manifest).read_text())
    return {
        file["name"]: {entry["name"]: entry["xxh3"] for entry in contents["tensors"] if entry["file"] == file["name"]}
        for file in contents["files"]
    }


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "world", "dtype"), [(1, 1, "float32"), (2, 2, "bfloat16")])
def test_workers_get_what_is_in_the_files(
    model: Path, tmp_path: Path, workers: list[Told], ranks: int, world: int, dtype: str
) -> None:
    """Every version, over groups that are made once for each sender and engine."""
    asking = workers[:world]
    with senders(model, tmp_path, ranks, dtype=dtype) as told:
        for version in (0, 1):
            manifest, *same = all_do(told, {"version": version})
            assert all(other == manifest for other in same)
            files = files_of(manifest)
            assert len(files) == ranks
            assert len({entry["sender"] for entry in json.loads(Path(manifest).read_text())["files"]}) == ranks
            for number, file in enumerate(files, 1):
                groups = ranks if version else number
                assert ask(asking, manifest, file) == [[files[file], groups]] * world
            all_do(told, {"scale": -0.5})
        if world == 2:
            # As two engines of one worker each, at a time.
            for rank, worker in enumerate(workers):
                worker.tell({"manifest": manifest, "file": file, "engine": f"engine {rank}"})
            assert [worker.answer()[0] for worker in workers] == [files[file]] * 2
    one, two = (load_shards(tmp_path / "broadcasts" / f"step_{version}") for version in (0, 1))
    assert {tensor.dtype for tensor in one.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(one[name] * -0.5, two[name]) for name in one)


@pytest.mark.processes
def test_who_does_not_belong_to_the_run_gets_nothing(model: Path, tmp_path: Path, workers: list[Told]) -> None:
    with senders(model, tmp_path / "run") as (sender,):
        (manifest,) = all_do([sender], {"version": 0})
        broadcasts = Path(manifest).parent.parent
        secret = broadcasts / ".secret"
        assert secret.stat().st_mode & 0o777 == 0o600
        assert secret.read_text() not in Path(manifest).read_text()
        other = tmp_path / "other" / "broadcasts"
        shutil.copytree(broadcasts, other)
        (other / ".secret").write_text("0" * 64)
        ((answer, groups),) = ask(workers[:1], str(other / "step_0" / "manifest.json"), "model.safetensors")
        assert (answer["error"], groups) == ("SecretError", 0)
        assert answer["message"].endswith(f"does not take this secret; see {other / '.secret'}")
        (other / ".secret").unlink()
        ((answer, _),) = ask(workers[:1], str(other / "step_0" / "manifest.json"), "model.safetensors")
        assert answer["error"] == "SecretError"
        # Nor does the sender stop serving for that.
        assert "error" not in ask(workers[:1], manifest, "model.safetensors")[0][0]


@pytest.mark.processes
def test_other_weights_than_the_manifests_are_refused(model: Path, tmp_path: Path, workers: list[Told]) -> None:
    with senders(model, tmp_path) as (sender,):
        (manifest,) = all_do([sender], {"version": 0})
        contents = json.loads(Path(manifest).read_text())
        contents["tensors"][3]["xxh3"] = "0" * 16
        Path(manifest).write_text(json.dumps(contents))
        ((answer, _),) = ask(workers[:1], manifest, "model.safetensors")
        assert answer["error"] == "HashError"
        assert contents["tensors"][3]["name"] in answer["message"]


@pytest.mark.processes
def test_only_the_newest_version_is_sent(model: Path, tmp_path: Path, workers: list[Told]) -> None:
    with senders(model, tmp_path) as (sender,):
        manifests = [all_do([sender], {"version": version})[0] for version in (0, 1)]
        ((answer, groups),) = ask(workers[:1], manifests[0], "model.safetensors")
        assert (answer["error"], groups) == ("VersionGoneError", 1)
        assert "asked for model.safetensors of policy 0, it has policy 1" in answer["message"]
        # In the midst of it the next one is copied.
        all_do([sender], {"buckets": 5, "then": "withdraw"})
        ((answer, groups),) = ask(workers[:1], manifests[1], "model.safetensors")
        assert (answer["error"], groups) == ("VersionGoneError", 1)
        assert "policy 1 was cut off by the next" in answer["message"]
        (manifest,) = all_do([sender], {"version": 2})
        assert ask(workers[:1], manifest, "model.safetensors") == [[files_of(manifest)["model.safetensors"], 1]]


@pytest.mark.processes
def test_a_worker_that_is_killed_in_the_midst(model: Path, tmp_path: Path, workers: list[Told]) -> None:
    with senders(model, tmp_path) as (sender,):
        (manifest,) = all_do([sender], {"version": 0})
        command = {"manifest": manifest, "file": "model.safetensors", "world": 2, "engine": "e", "timeout_s": 10.0}
        workers[0].tell({**command, "rank": 0})
        workers[1].tell({**command, "rank": 1, "die_after": 6})
        assert workers[1].process.wait(30) == -signal.SIGKILL
        answer, _ = workers[0].answer()
        assert answer["error"] == "PeerGoneError"
        # The engine's worker was started again; the other makes a new group with it.
        again = Told(WORKER)
        try:
            assert again.answer() == "ready"
            for rank, worker in enumerate((workers[0], again)):
                worker.tell({**command, "rank": rank})
            assert [worker.answer()[0] for worker in (workers[0], again)] == [
                files_of(manifest)["model.safetensors"]
            ] * 2
        finally:
            again.end()


@pytest.mark.processes
def test_a_sender_that_is_killed_in_the_midst(model: Path, tmp_path: Path, workers: list[Told]) -> None:
    with senders(model, tmp_path) as (sender,):
        (manifest,) = all_do([sender], {"version": 0})
        assert all("error" not in answer for answer, _ in ask(workers, manifest, "model.safetensors"))
        address = json.loads(Path(manifest).read_text())["files"][0]["sender"]
        all_do([sender], {"buckets": 6, "then": "kill"})
        # Both try again, for their group was kept: nobody is there.
        for answer, groups in ask(workers, manifest, "model.safetensors"):
            assert (answer["error"], groups) == ("PeerGoneError", 1)
            assert address in answer["message"]
        assert sender.process.wait(10) == -signal.SIGKILL
    weights = Path(manifest).parent / "model.safetensors"
    before = weights.stat().st_ino
    # A trainer that was started again publishes the same version again: its files stay, its address is another.
    with senders(model, tmp_path) as (sender,):
        assert all_do([sender], {"version": 0}) == [manifest]
        assert weights.stat().st_ino == before
        assert json.loads(Path(manifest).read_text())["files"][0]["sender"] != address
        assert ask(workers, manifest, "model.safetensors") == [[files_of(manifest)["model.safetensors"], 2]] * 2


@pytest.mark.processes
def test_a_worker_that_does_not_come_is_not_waited_for_without_end(
    model: Path, tmp_path: Path, workers: list[Told]
) -> None:
    with senders(model, tmp_path) as (sender,):
        (manifest,) = all_do([sender], {"version": 0})
        command = {"manifest": manifest, "file": "model.safetensors", "world": 2, "engine": "e", "timeout_s": 1.0}
        workers[0].tell({**command, "rank": 0})
        answer, groups = workers[0].answer()
        assert (answer["error"], groups) == ("PeerGoneError", 0)
        assert "does not answer" in answer["message"]
        # One that hangs with the group made.
        assert all("error" not in answer for answer, _ in ask(workers, manifest, "model.safetensors", engine="f"))
        workers[1].process.send_signal(signal.SIGSTOP)
        workers[0].tell({**command, "rank": 0, "engine": "f"})
        assert workers[0].answer()[0]["error"] == "PeerGoneError"
        os.kill(workers[1].process.pid, signal.SIGCONT)


def test_what_is_copied_over_while_it_is_sent_is_whole_or_gone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of all versions are in the same memory. A receiver that got parts of two would find wrong hashes."""
    trained = load_model(model)
    sender = Sender(tmp_path / "broadcasts", "127.0.0.1", torch.device("cpu"), bucket_bytes=4_000)
    publisher = WeightsPublisher(tmp_path, 2, True, sender=sender)
    snapshot, over = Snapshot(), threading.Event()
    outcomes: list[str] = []

    def receiving() -> None:
        while not over.is_set():
            try:
                receive(tmp_path / "broadcasts" / latest.read_text() / "manifest.json", "model.safetensors")
                outcomes.append("whole")
            except TransferError as error:
                outcomes.append(type(error).__name__)

    latest = tmp_path / "broadcasts" / "LATEST"
    thread = threading.Thread(target=receiving)
    try:
        for version in range(400):
            # Some are cut off, some may come to their end.
            monkeypatch.setattr(transfer, "ENDING_S", 5.0 if version % 4 == 0 else 0.0)
            files, wait = snapshot.take(publisher.shares(trained), trained)
            wait()
            publisher.write(version, files)
            if version == 0:
                thread.start()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(-1.001)
            if version > 20 and {"whole", "VersionGoneError"} <= set(outcomes):
                break
    finally:
        over.set()
        thread.join(60)
        sender.close()
        close_links()
    assert set(outcomes) == {"whole", "VersionGoneError"}


def test_files_alone_have_no_sender(model: Path, tmp_path: Path) -> None:
    manifest = WeightsPublisher(tmp_path, 2, False).publish(load_model(model), 0)
    assert not (tmp_path / "broadcasts" / ".secret").exists()
    with pytest.raises(NoSenderError, match="names no sender of"):
        receive(manifest, "model.safetensors")
    with pytest.raises(ValueError, match="has no file 'other'"):
        receive(manifest, "other")


def test_a_closed_sender_is_gone(model: Path, tmp_path: Path) -> None:
    sender = Sender(tmp_path / "broadcasts", "127.0.0.1", torch.device("cpu"))
    manifest = WeightsPublisher(tmp_path, 2, False, sender=sender).publish(load_model(model), 0)
    tensors = receive(manifest, "model.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_shards(manifest.parent).items())
    sender.close()
    with pytest.raises(TransferError, match="no sender at"):
        receive(manifest, "model.safetensors")


def test_buckets_hold_every_byte_once() -> None:
    generator = random.Random(5)
    for _ in range(200):
        sizes = [generator.choice([0, 1, 3, 8, 40]) for _ in range(generator.randint(0, 9))]
        most = generator.randint(1, 20)
        rows = [bytes(generator.randrange(256) for _ in range(size)) for size in sizes]
        sent = b""
        for pieces in buckets(sizes, most):
            assert [piece.place for piece in pieces] == [
                sum(other.end - other.begin for other in pieces[:index]) for index in range(len(pieces))
            ]
            parts = [rows[piece.row][piece.begin : piece.end] for piece in pieces]
            assert 0 < sum(map(len, parts)) <= most
            sent += b"".join(parts)
        assert sent == b"".join(rows)


def test_the_address_is_that_on_the_way() -> None:
    assert address_towards("http://127.0.0.1:8000/x") == "127.0.0.1"


class NcclWithoutGpu:
    """What is made of `torch.distributed.ProcessGroupNCCL` before its first call."""

    class Options:
        pass

    def __init__(self, *_: Any) -> None:
        pass


def test_a_group_of_nccl_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects within its first call, and waits there for a worker that died."""
    distributed: Any = torch.distributed
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NcclWithoutGpu)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"store": ["127.0.0.1", store.port], "prefix": "a"}

    def group(timeout_s: float) -> Any:
        return wire.new_group(told, 0, 2, torch.device("cuda", 0), "127.0.0.1", timeout_s)

    released, ended = threading.Event(), threading.Event()

    def connect(_group: Any, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        released.wait()
        ended.set()

    monkeypatch.setattr(wire, "_connect", connect)
    with pytest.raises(PeerGoneError, match=r"did not come to the process group within 0\.01 s"):
        group(0.01)
    released.set()
    assert ended.wait(60.0)
    assert isinstance(group(60.0), NcclWithoutGpu)

    def refuse(_group: Any, _device: torch.device) -> None:
        raise RuntimeError("NCCL error: Duplicate GPU detected")

    monkeypatch.setattr(wire, "_connect", refuse)
    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        group(60.0)
