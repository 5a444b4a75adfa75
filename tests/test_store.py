"""The checkpoint store: whole or absent, kept as told, never in training's way."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import fsspec
import httpx
import outside
import pytest
from docs_pages import shown
from end_to_end import primerl, read_lines, until
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import load_run
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Command, Role
from primerl.launch.preflight import training
from primerl.launch.report.console import Console
from primerl.launch.resume import warm_start
from primerl.launch.storing import Storing
from primerl.runs.saved import local_checkpoints
from primerl.stores.choice import GROUP, open_store
from primerl.stores.entries import StoreError
from primerl.stores.fsspec_store import FsspecStore
from primerl.stores.store import Store
from primerl.stores.worker import main as store_worker
from primerl.train.checkpoint import staging
from primerl.train.checkpoint.step_folders import remove_step
from pydantic import ValidationError
from run_helpers import config_of, write_run
from store_helpers import RUN, adapter, finish, saved, uploader

pytestmark = pytest.mark.usefixtures("state")


class Shelf(FsspecStore):
    """A store of another package: `shelf:///folder`."""

    def __init__(self, url: str) -> None:
        super().__init__(url.partition("://")[2])
        self.url = url


@pytest.fixture(params=["folder", "file", "memory", "shelf"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "shelf":
        shelf = {GROUP: "shelf = acme_store:Shelf"}
        outside.use(monkeypatch, outside.install(tmp_path, "acme_store", "from test_store import Shelf\n", shelf))
        found = open_store(f"shelf://{tmp_path}/kept")
        assert type(found).__name__ == "Shelf"
        return found
    urls = {"folder": str(tmp_path / "kept"), "file": f"file://{tmp_path}/kept", "memory": f"memory://{tmp_path.name}"}
    return open_store(urls[request.param])


def ids(store: Store) -> list[str]:
    return [entry.id for entry in store.entries(RUN)]


def test_a_store_is_named_by_its_import_path_too(tmp_path: Path) -> None:
    store = open_store(f"test_store:Shelf://{tmp_path}/kept")
    assert type(store).__name__ == "Shelf"
    with pytest.raises(StoreError, match="module test_store has no 'Nothing'"):
        open_store("test_store:Nothing://x")
    with pytest.raises(StoreError, match=r"store\.url: builtins:int://x: 'builtins:int' cannot be made: ValueError"):
        open_store("builtins:int://x")


def test_what_is_stored_comes_back(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "step_3")
    entry = store.put(folder, RUN, "weights", 3, "digest")
    assert store.find(RUN) == store.find(f"{RUN}/step_3") == store.find(f"{RUN}/weights/step_3") == entry
    assert (entry.bytes, set(entry.files)) == (12, {"model.safetensors", "trainer/state.pt"})
    fetched = store.fetch(entry)
    assert (fetched / "trainer" / "state.pt").read_text() == "state"
    assert store.fetch(entry) == fetched
    store.put(saved(tmp_path / "again", "others"), RUN, "weights", 3, "digest")
    assert (store.fetch(store.find(RUN)) / "model.safetensors").read_text() == "others"
    store.remove_unfinished(RUN)
    assert (store.fetch(store.find(RUN)) / "model.safetensors").read_text() == "others"


def test_without_its_manifest_nothing_is_there(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: Any) -> None:
        raise OSError("the line was cut")

    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "_write", cut_off)
        with pytest.raises(StoreError, match=r"store\.url: .* cannot be written to: the line was cut"):
            store.put(saved(tmp_path / "step_3"), RUN, "weights", 3, "digest")
    assert ids(store) == []
    with pytest.raises(StoreError, match=f"not READY in the store .*; there is nothing of run {RUN}"):
        store.find(f"{RUN}/step_3")
    assert store._fs.glob(f"{store._root}/{RUN}/weights/data/*")
    store.remove_unfinished(RUN)
    assert not store._fs.find(f"{store._root}/{RUN}/weights/data")


def test_a_file_that_was_changed_there_is_found(store: Store, tmp_path: Path) -> None:
    entry = store.put(saved(tmp_path / "step_3"), RUN, "weights", 3, "digest")
    store._fs.pipe_file(f"{store._root}/{entry.data}/model.safetensors", b"Weights")
    with pytest.raises(StoreError, match=r"model\.safetensors is not what was stored: its hash differs"):
        store.fetch(entry)


def test_the_newest_are_kept_and_what_is_deployed(store: Store, tmp_path: Path) -> None:
    folder = saved(tmp_path / "step")
    for step in range(1, 6):
        store.put(folder, RUN, "adapter", step, "digest")
    store.put(folder, RUN, "weights", 1, "digest")
    store.mark_deployed(store.find(f"{RUN}/adapter/step_2"), deployed=True)
    assert [entry.step for entry in store.keep_newest(RUN, "adapter", -1)] == []
    assert [entry.step for entry in store.keep_newest(RUN, "adapter", 2)] == [1, 3]
    assert ids(store) == [f"{RUN}/weights/step_1", *(f"{RUN}/adapter/step_{step}" for step in (2, 4, 5))]
    assert [entry.at for entry in store.saved(RUN) if "deployed" in entry.at] == [f"{RUN}/adapter/step_2 (deployed)"]
    store.mark_deployed(store.find(f"{RUN}/adapter/step_2"), deployed=False)
    assert [entry.step for entry in store.keep_newest(RUN, "adapter", 2)] == [2]
    # A run that went back: what it stores after that is the newest.
    store.put(folder, RUN, "adapter", 3, "digest")
    assert store.find(f"{RUN}/adapter").step == 3
    assert [entry.step for entry in store.keep_newest(RUN, "adapter", 1)] == [4, 5]


def test_what_a_run_saves_is_uploaded_and_what_it_is_writing_is_not(store: Store, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for name in ("checkpoints/step_1", "checkpoints/step_2", "checkpoints/step_3", "checkpoints/.step_4.tmp"):
        saved(output / name)
    for step in range(6):
        adapter(output / "broadcasts" / f"step_{step}")
    assert finish(uploader(store, output, model, adapters_interval=2, adapters_keep=3)) == 0
    expected = ["checkpoint/step_2", "adapter/step_2", "checkpoint/step_3", "adapter/step_4", "adapter/step_5"]
    assert sorted(ids(store)) == sorted(f"{RUN}/{name}" for name in expected)
    assert list((output / staging.FOLDER).iterdir()) == []
    # Another start has nothing to do again, and the last adapter alone is stored without an interval.
    adapter(output / "broadcasts" / "step_6")
    second = uploader(store, output, model, adapters_interval=0)
    assert finish(second) == 0
    assert second.uploaded == [f"{RUN}/adapter/step_6"]
    # A run that went back saves the same step anew.
    shutil.rmtree(output / "checkpoints" / "step_3")
    (saved(output / "checkpoints" / "step_3") / "trainer" / "state.pt").write_text("another")
    assert finish(uploader(store, output, model)) == 0
    assert (store.fetch(store.find(f"{RUN}/checkpoint")) / "trainer" / "state.pt").read_text() == "another"


def test_what_the_run_deletes_meanwhile_and_what_was_cut_off_is_uploaded(
    store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    saved(output / "checkpoints" / "step_1")
    first = uploader(store, output, model)
    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "put", refuse)
        assert finish(first) == 1
    report = json.loads((output / "run" / "store.json").read_text())
    assert report["waiting"] == ["checkpoint_step_1"]
    assert report["failed"] == {f"{RUN}/checkpoint/step_1": "no room"}
    shutil.rmtree(output / "checkpoints")
    assert finish(uploader(store, output, model)) == 0
    assert ids(store) == [f"{RUN}/checkpoint/step_1"]
    assert (store.fetch(store.find(RUN)) / "trainer" / "state.pt").read_text() == "state"


def refuse(*_: Any) -> None:
    raise StoreError("no room")


def test_a_failed_upload_is_tried_again(store: Store, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("primerl.stores.worker.FIRST_RETRY_S", 0.001)
    output = tmp_path / "run"
    saved(output / "weights" / "step_1")
    put, failures = FsspecStore.put, iter(range(3))

    def flaky(self: Store, *arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise StoreError("busy")
        return put(self, *arguments)

    monkeypatch.setattr(FsspecStore, "put", flaky)
    assert finish(uploader(store, output, model, give_up_s=60.0)) == 0
    assert ids(store) == [f"{RUN}/weights/step_1"]
    assert json.loads((output / "run" / "store.json").read_text())["failed"] == {}


def test_newer_ones_are_staged_while_an_upload_hangs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, output = open_store(str(tmp_path / "kept")), tmp_path / "run"
    put, begun, go_on = FsspecStore.put, threading.Event(), threading.Event()

    def slow(self: Store, *arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return put(self, *arguments)

    monkeypatch.setattr(FsspecStore, "put", slow)
    monkeypatch.setattr("primerl.stores.worker.PART_S", 0.0)
    monkeypatch.setattr("primerl.stores.worker.LOOK_EVERY_S", 0.01)
    saved(output / "checkpoints" / "step_1")
    ours = uploader(store, output, model, keep=1)
    running = threading.Thread(target=ours.run)
    running.start()
    assert begun.wait(60)

    def staged_is(*steps: int) -> None:
        deadline = time.monotonic() + 60
        while (found := [one.step for one in staging.staged(output)]) != list(steps):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    for step in (2, 3):
        saved(output / f"saving_{step}", f"of step {step}").rename(output / "checkpoints" / f"step_{step}")
        # What waits behind a newer one would be deleted in the store; what is being uploaded stays.
        staged_is(1, step)
    remove_step(output / "checkpoints" / "step_3")
    ours.ending = True
    go_on.set()
    running.join(60)
    assert ours.uploaded == [f"{RUN}/checkpoint/step_{step}" for step in (1, 3)]
    assert ids(store) == [f"{RUN}/checkpoint/step_3"]
    assert (store.fetch(store.find(RUN)) / "model.safetensors").read_text() == "of step 3"


def test_each_run_of_a_folder_has_its_own_in_the_store(model: Path, tmp_path: Path) -> None:
    store, output = open_store(str(tmp_path / "kept")), tmp_path / "run"
    saved(output / "weights" / "step_1")
    assert finish(uploader(store, output, model)) == 0
    assert finish(uploader(store, output, model, run="dcba4321")) == 0
    assert [entry.id for entry in store.entries()] == [f"{RUN}/weights/step_1", "dcba4321/weights/step_1"]


def test_a_folder_that_is_deleted_meanwhile_is_staged_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    folder, link = saved(tmp_path / "weights" / "step_1"), os.link

    def deleting(source: str, target: str) -> None:
        link(source, target)
        remove_step(folder)
        monkeypatch.setattr(os, "link", link)

    monkeypatch.setattr(os, "link", deleting)
    with pytest.raises((OSError, shutil.Error)):
        staging.link(tmp_path, "weights", 1, folder)
    assert list((tmp_path / staging.FOLDER).iterdir()) == []

    def half_deleted(source: str, target: str) -> None:
        link(source, target)
        Path(source).unlink()

    adapter(tmp_path / "broadcasts" / "step_2")
    monkeypatch.setattr(os, "link", half_deleted)
    with pytest.raises(OSError, match="was changed or deleted while it was linked"):
        staging.link(tmp_path, "adapter", 2, tmp_path / "broadcasts" / "step_2")
    assert list((tmp_path / staging.FOLDER).iterdir()) == []


def test_what_the_trainer_stages_is_stored_once(model: Path, tmp_path: Path) -> None:
    store, output = open_store(str(tmp_path / "kept")), tmp_path / "run"
    for step in (2, 4):
        adapter(output / "broadcasts" / f"step_{step}")
        staging.link(output, "adapter", step, output / "broadcasts" / f"step_{step}")
    shutil.rmtree(output / "broadcasts" / "step_2")  # before this process has looked
    first = uploader(store, output, model, adapters_interval=2)
    assert finish(first) == 0
    assert first.uploaded == [f"{RUN}/adapter/step_{step}" for step in (2, 4)]
    staging.link(output, "adapter", 4, output / "broadcasts" / "step_4")
    second = uploader(store, output, model, adapters_interval=2)
    assert (finish(second), second.uploaded, staging.staged(output)) == (0, [], [])


def test_what_a_manifest_names_is_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("primerl.stores.fsspec_store.sync", lambda path: synced.append(Path(path)))
    store = open_store(str(tmp_path / "kept"))
    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "_write", refuse)
        with pytest.raises(StoreError, match="no room"):
            store.put(saved(tmp_path / "step_3"), RUN, "weights", 3, "digest")
    kept = tmp_path / "kept"
    assert set(kept.rglob("*")) | {kept, tmp_path} <= set(synced)


@pytest.mark.processes
def test_a_run_that_is_stopped_does_not_wait_for_its_uploads(tmp_path: Path) -> None:
    output = io.StringIO()
    console, asked = Console(output), itertools.count()

    def interrupted_at_the_third() -> None:
        if next(asked) == 2:
            raise KeyboardInterrupt

    adapter(tmp_path / "broadcasts" / "step_2")
    staging.link(tmp_path, "adapter", 2, tmp_path / "broadcasts" / "step_2")
    never = "import time; time.sleep(600)"  # as an upload to a store that hangs
    with LocalPlacement() as placement:
        command = Command([sys.executable, "-c", never], os.environ, tmp_path / "log")
        process = placement.start(Role("store", "store-worker"), command)
        storing = Storing(tmp_path, RUN)
        with pytest.raises(KeyboardInterrupt):
            storing.finish(placement, console, 1.0, stay=[], check=interrupted_at_the_third)
        assert not process.ended
        storing.leave(placement, console)
        assert process.code is not None
    assert f"not in the store yet: adapter_step_2; nothing of it is lost, and `primerl run resume {RUN}`" in (
        output.getvalue()
    )


def test_bad_settings_of_the_process_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert store_worker({"run": RUN, "output_dir": "x", "model": "y", "keep": 0}) == 2
    assert "keep" in capsys.readouterr().err


def test_an_unknown_kind_of_url_is_named() -> None:
    with pytest.raises(StoreError, match=r"store\.url: nosuch://x cannot be opened: .*nosuch"):
        open_store("nosuch://x")
    with pytest.raises(ConfigError, match=r"store\.url: nosuch://x cannot be opened"):
        training.check(config_of(store={"url": "nosuch://x"}))


@pytest.mark.parametrize(
    "section", [{"keep": 0}, {"keep": -2}, {"adapters": {"keep": 0}}, {"adapters": {"interval": -1}}]
)
def test_bounds_of_the_section(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        config_of(store=section)


def test_checkpoints_of_a_folder(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints" / "step_2")
    saved(tmp_path / "checkpoints" / ".step_4.1.tmp")
    saved(tmp_path / "weights" / "step_3")  # no safetensors file, whatever its name says
    found = [(entry.step, entry.kind, entry.ready, entry.weights_only) for entry in local_checkpoints(tmp_path)]
    assert found == [(2, "checkpoint", True, False), (3, "weights", False, True), (4, "checkpoint", False, False)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a whole run")
@pytest.mark.end_to_end
def test_a_run_stores_its_adapters_and_one_of_them_is_deployed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path)
    with file.open("a") as opened:
        opened.write("[trainer.model.lora]\nrank = 2\nalpha = 4\n[store]\nadapters.interval = 1\n")
    primerl("rl", "@", str(file), "--ckpt.keep-last", "2")
    assert len(read_lines(tmp_path / "outputs" / "small" / "metrics.jsonl")) == 2
    assert main(["run", "checkpoints", "small", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    stored = {(entry["kind"], entry["step"]): entry["at"] for entry in entries if not Path(entry["at"]).is_absolute()}
    assert {("adapter", 1), ("adapter", 2), ("checkpoint", 2), ("weights", 2)} <= stored.keys()
    with socket.socket() as held:
        # No other program gets the port; one that asks for this number and reuses addresses does.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        meant = {"short-adapter": "small", "short-adapter/step_40": "small/step_1", "8000": str(port)}
        checkpoints, deploy, undeploy = shown(__file__, "docs/recipes/lora.md", meant)
        assert served_model(deploy, port) == stored["adapter", 1].replace("/", "-")
    # It stays deployed when it is not served any more.
    assert main(checkpoints[1:]) == 0
    assert f"{stored['adapter', 1]} (deployed)" in capsys.readouterr().out
    # Merged, as it is served: the adapter of the last step is what the trainer saved merged itself.
    from primerl.cli.deploy import merged
    from safetensors.torch import load_file

    store = open_store()
    served = merged(store, store.find(stored["adapter", 2]), None)
    ours, trainers = (
        load_file(folder / "model.safetensors")
        for folder in (served, tmp_path / "outputs" / "small" / "weights" / "step_2")
    )
    assert ours.keys() == trainers.keys()
    assert all((ours[name].float() - trainers[name].float()).abs().max() < 1e-6 for name in ours)
    # Weights were saved with every checkpoint, and other runs begin from any of them.
    begun = warm_start.applied(load_run(["@", str(file), "--checkpoint-id", "small/step_1"], "primerl rl"))
    saved_there = load_file(Path(begun.model.path) / "model.safetensors")
    first = load_file(tmp_path / "outputs" / "small" / "weights" / "step_1" / "model.safetensors")
    assert all((saved_there[name] == first[name]).all() for name in first)
    assert main(undeploy[1:]) == 0
    assert main(undeploy[1:]) == 2
    assert main([*deploy[1:3], "--mark-only"]) == 0
    assert store.deployed() == {stored["adapter", 1]}
    assert main(undeploy[1:]) == 0
    assert store.deployed() == set()
    fsspec.filesystem("memory").store.clear()


def served_model(deploy: list[str], port: int) -> str:
    """What the server of `primerl deploy` calls its model; it is interrupted then."""
    process = subprocess.Popen(
        [sys.executable, "-m", *deploy], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:

        def answer() -> httpx.Response | None:
            assert process.poll() is None, process.communicate()[0]
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/v1/models")
            return None

        found = until(answer, 120, "an answer of the server")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        return str(found.json()["data"][0]["id"])
    finally:
        process.kill()
        process.communicate()


def test_the_section_in_the_docs(repository: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (repository / "docs" / "runs.md").read_text(), re.DOTALL)
    store = config_of(**tomllib.loads(block)).store
    assert store is not None
    assert (store.url, store.keep, store.adapters.interval) == ("s3://bucket/primerl", 5, 20)
