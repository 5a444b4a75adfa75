"""What runs have stored: listed, deleted, and found again by a run that was taken out of the list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from primerl.runs.registry import Registry
from primerl.stores.choice import open_store
from primerl.stores.store import Store
from run_helpers import CONFIG, begin, end, told
from store_helpers import adapter, finish, saved, uploader

pytestmark = pytest.mark.usefixtures("state")


def stored(tmp_path: Path, name: str, model: Path, store: Store) -> str:
    """A run that is over, with a checkpoint, weights and an adapter, the latter deployed."""
    config = CONFIG + (f'[store]\nurl = "{store.url}"\n' if store.url != open_store().url else "[store]\n")
    run = begin(tmp_path / name, name=name, config=config)
    end(run)
    (tmp_path / name / "run" / "launcher.lock").touch()
    saved(tmp_path / name / "checkpoints" / "step_2")
    saved(tmp_path / name / "weights" / "step_2")
    adapter(tmp_path / name / "broadcasts" / "step_2")
    assert finish(uploader(store, tmp_path / name, model, run=run)) == 0
    store.mark_deployed(store.find(f"{run}/adapter/step_2"), deployed=True)
    return run


def ids(store: Store) -> list[str]:
    return [entry.id for entry in store.entries()]


def test_what_is_stored_is_listed_by_run_whatever_the_store(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told("store", "list", capsys=capsys) == "nothing is stored\n"
    other = open_store(str(tmp_path / "kept"))
    one, two = stored(tmp_path, "one", model, open_store()), stored(tmp_path, "two", model, other)
    open_store().put(saved(tmp_path / "gone"), "0badc0de", "weights", 4, "digest")
    found = {entry["run"]: entry for entry in json.loads(told("store", "list", "-o", "json", capsys=capsys))}
    assert {run: (entry["name"], entry["listed"], entry["store"]) for run, entry in found.items()} == {
        one: ("one", True, open_store().url),
        two: ("two", True, other.url),
        "0badc0de": (None, False, open_store().url),
    }
    assert found[one]["entries"] == [f"{one}/{kind}/step_2" for kind in ("adapter", "checkpoint", "weights")]
    assert found[one]["deployed"] == [f"{one}/adapter/step_2"]
    shown = told("store", "list", "--store", other.url, capsys=capsys)
    assert "checkpoints of step 2; weights of step 2; adapters of step 2" in shown
    assert one not in shown


def test_deleting_keeps_what_is_deployed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(str(tmp_path / "kept"))
    run = stored(tmp_path, "one", model, store)
    assert "to delete weights of step 2 (" in told("store", "delete", "one/weights", code=2, capsys=capsys)
    assert "deleted weights of step 2" in told("store", "delete", "one/weights", "--yes", capsys=capsys)
    assert ids(store) == [f"{run}/adapter/step_2", f"{run}/checkpoint/step_2"]
    said = told("store", "delete", run, "-f", capsys=capsys)
    assert f"{run}/adapter/step_2 stays: it is deployed (`primerl undeploy {run}/step_2` first)" in said
    assert ids(store) == [f"{run}/adapter/step_2"]
    assert "has adapters of step 2, and no" in told("store", "delete", f"{run}/step_9", code=2, capsys=capsys)
    assert "is no id of the store" in told("store", "delete", "a b", code=2, capsys=capsys)
    assert "has no word 'empty'" in told("store", "empty", code=2, capsys=capsys)


def test_pruning_deletes_what_no_run_of_the_list_has_stored(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, gone = stored(tmp_path, "kept", model, open_store()), stored(tmp_path, "gone", model, open_store())
    assert "every run that has something" in told("store", "prune", "--yes", capsys=capsys)
    said = told("run", "delete", "gone", "--yes", capsys=capsys)
    assert "in the store" in said
    assert f"`primerl store delete {gone}` deletes them" in said
    assert "would be deleted" in told("store", "prune", "--dry-run", capsys=capsys)
    assert "say so with --yes" in told("store", "prune", code=2, capsys=capsys)
    said = told("store", "prune", "--yes", capsys=capsys)
    assert f"but for {gone}/adapter/step_2: deployed" in said
    expected = [f"{kept}/{kind}/step_2" for kind in ("adapter", "checkpoint", "weights")] + [f"{gone}/adapter/step_2"]
    assert sorted(ids(open_store())) == sorted(expected)


def test_a_run_is_deleted_with_what_it_has_stored(
    model: Path, tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path / "kept"))
    one, two = stored(tmp_path, "one", model, store), stored(tmp_path, "two", model, store)
    store.mark_deployed(store.find(f"{one}/adapter"), deployed=False)
    said = told("run", "delete", "one", "--with-files", "--with-stored", "--yes", capsys=capsys)
    assert f"deleted {one} (one), and all of {tmp_path / 'one'}, and " in said
    assert not (tmp_path / "kept" / one).exists()
    assert not (tmp_path / "one").exists()
    said = told("run", "delete", "two", "--with-stored", "--yes", capsys=capsys)
    assert f"{two}/adapter/step_2 stays stored: it is deployed" in said
    assert ids(store) == [f"{two}/adapter/step_2"]
    # Its folder stays, and another start stores it again.
    again = begin(tmp_path / "two", config=CONFIG + f'[store]\nurl = "{store.url}"\n')
    assert finish(uploader(store, tmp_path / "two", model, run=again)) == 0
    assert (again, len(ids(store))) == (two, 3)


def test_a_run_keeps_its_id_without_the_list(model: Path, tmp_path: Path) -> None:
    run = stored(tmp_path, "one", model, open_store())
    with Registry() as registry:
        registry.delete(run)
    assert begin(tmp_path / "one") == run
    # It has nothing to store again.
    again = uploader(open_store(), tmp_path / "one", model, run=run)
    assert (finish(again), again.uploaded) == (0, [])
    # A copy is another run; a folder that was moved is not.
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    copied = begin(tmp_path / "copy")
    assert copied != run
    (tmp_path / "one").rename(tmp_path / "moved")
    assert begin(tmp_path / "moved") == run
    with Registry() as registry:
        assert {one.id: one.output_dir for one in registry.all()} == {
            run: tmp_path / "moved",
            copied: tmp_path / "copy",
        }
    # What begins anew is another one, and so is what somebody has written there.
    assert begin(tmp_path / "moved", goes_on=False) != run
    (tmp_path / "strange" / "run").mkdir(parents=True)
    (tmp_path / "strange" / "run" / "id").write_text("../../x\n")
    assert len(begin(tmp_path / "strange")) == 8
