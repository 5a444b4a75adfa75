"""What is told of runs when something is missing: room on the terminal, a run's folder, a list that can be read."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from primerl.launch.storing import Storing
from primerl.runs import registry as registry_module
from primerl.runs.registry import SCRIPT, Registry, known
from primerl.runs.standing import in_a_line, standing
from primerl.runs.state import StateError
from primerl.stores.choice import open_store
from rich.console import Console
from run_helpers import CONFIG, begin, end, told
from store_helpers import saved, with_orchestrator

pytestmark = pytest.mark.usefixtures("state")

WIDE = "a-run-with-a-long-name"


def failed(folder: Path, reason: str, **more: str) -> str:
    run = begin(folder, **more)
    (folder / "run" / "summary.json").write_text(json.dumps({"exit_code": 1, "reason": reason}))
    end(run, 1)
    return run


def on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console", lambda **more: Console(force_terminal=True, width=width, **more))


def header(shown: str) -> list[str]:
    line = next(line for line in shown.splitlines() if "status" in line)
    return re.findall(r"[a-z]+", re.sub(r"\x1b\[[0-9;]*m", "", line))


def test_a_narrow_terminal_has_a_line_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "/state/fetched/0123456789abcdef/2e6003e2/step_6"
    failed(tmp_path / WIDE, "trainer exited with code 1\nthe end of its log", name=WIDE, model=model)
    full = ["id", "name", "kind", "status", "step", "model", "environments", "started", "folder"]
    for width, expected in (
        (300, full),
        (120, [name for name in full if name != "folder"]),
        (100, [name for name in full if name not in ("folder", "kind")]),
    ):
        on_a_terminal(width, monkeypatch)
        shown = told("run", "list", capsys=capsys)
        assert header(shown) == expected
        assert sum("│" in line for line in shown.splitlines()) == 1, shown
        assert "2e6003e2/step_6" in shown
        assert "has failed: trainer exited with code 1 (`--json` has all of it)" in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("no engine", "no engine"),
        ("one thing\nand another", "one thing"),
        (
            "trainer exited with code 1 (ValueError: a shape)\nthe end of /a/trainer.log:\n  Traceback\n    loss()\n",
            "trainer exited with code 1 (ValueError: a shape)",
        ),
        ("it exited (no memory)\nthe end of /a/b.log:\n  error: no memory", "it exited (no memory)"),
        ("x" * 400, "x" * 300 + " ..."),
        ("", ""),
    ],
)
def test_why_a_run_has_failed_in_a_line(reason: str, shown: str) -> None:
    assert in_a_line(reason) == shown


def test_a_run_whose_folder_is_gone_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run = begin(folder, config=CONFIG + "[store]\n")
    end(run)
    shutil.rmtree(folder)
    gone = f"{run}: its folder {folder} is gone; the store {open_store().url} has "
    for word in ("logs", "metrics"):
        assert f"{gone}nothing of it" in told("run", word, run, code=2, capsys=capsys)
    open_store().put(saved(tmp_path / "weights"), run, "weights", 4, "digest")
    assert f'{gone}weights of step 4; `checkpoint_id = "{run}/weights/step_4"` begins' in told(
        "run", "logs", run, code=2, capsys=capsys
    )
    open_store().put(with_orchestrator(saved(tmp_path / "whole")), run, "checkpoint", 4, "digest")
    goes_on = f"`primerl run resume {run}` fetches the newest checkpoint and resumes from there"
    said = told("run", "stop", run, capsys=capsys)
    assert said.startswith(f"{run} is not running: it is COMPLETED\n{gone}checkpoints of step 4; weights of step 4")
    assert goes_on in said
    said = told("run", "checkpoints", run, capsys=capsys)
    assert f"{run}/checkpoint/step_4" in said
    assert goes_on in said
    (found,) = json.loads(told("run", "list", "--json", capsys=capsys))
    assert (found["step"], found["reason"]) == (None, f"its folder {folder} is gone")
    said = told("run", "delete", run, "--yes", capsys=capsys)
    assert f"from the list; its folder {folder} is gone" in said
    without = begin(tmp_path / "without")
    end(without)
    shutil.rmtree(tmp_path / "without")
    assert "is gone; it has no store" in told("run", "metrics", without, code=2, capsys=capsys)


def test_secrets_that_cannot_be_read_hide_no_list(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed(tmp_path / "run", "why")
    (state / "secrets").mkdir()
    (state / "secrets" / "secrets.json").write_text("{")
    assert "has failed: why" in told("run", "list", capsys=capsys)
    (tmp_path / "run" / "logs").mkdir()
    (tmp_path / "run" / "logs" / "trainer.log").write_text("step 1\n")
    capsys.readouterr()
    from primerl.cli import main

    assert main(["run", "logs", "small"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "step 1\n"
    assert "warning: secrets are not removed from what is shown" in printed.err


def test_a_damaged_list_says_what_to_do(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begin(tmp_path / "run")
    (state / "runs.db-wal").unlink(missing_ok=True)
    (state / "runs.db").write_bytes(b"no database" * 1000)
    said = told("run", "list", code=2, capsys=capsys)
    assert "runs.db" in said
    assert "is damaged: move it away; the command that a run was started with, given again" in said
    (state / "runs.db").rename(tmp_path / "away")
    # What was said is so.
    assert begin(tmp_path / "run") == run


def test_a_damaged_entry_of_the_list_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = begin(tmp_path / "one"), begin(tmp_path / "other", name="other")
    with Registry() as registry:
        registry._connection.execute("UPDATE runs SET environments = '[half' WHERE id = ?", (one,))
    found = {entry["id"]: entry["environments"] for entry in json.loads(told("run", "list", "--json", capsys=capsys))}
    assert found == {one: ["?"], other: ["e"]}


@pytest.mark.parametrize("beside", [True, False], ids=["with the files beside it", "without"])
def test_a_state_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], beside: bool
) -> None:
    run = begin(tmp_path / "run")
    end(run)
    connect, opened = sqlite3.connect, list[str]()

    def read_only(name: str, **more: object) -> sqlite3.Connection:
        opened.append(name)
        if "mode=ro" not in name and "immutable" not in name:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        if "mode=ro" in name and not beside:
            raise sqlite3.OperationalError("unable to open database file")
        return connect(name, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(registry_module.sqlite3, "connect", read_only)
    assert json.loads(told("run", "list", "--json", capsys=capsys))[0]["id"] == run
    assert "is not running" in told("run", "stop", run, capsys=capsys)
    assert known("small") is not None
    assert any("immutable=1" in name for name in opened) is not beside
    with pytest.raises(StateError, match="readonly database"):
        Registry()
    monkeypatch.setattr("primerl.runs.registry.private_folder", lambda *_: (_ for _ in ()).throw(StateError("no")))
    assert json.loads(told("run", "list", "--json", capsys=capsys))[0]["id"] == run


def test_a_run_that_is_in_no_list_is_sent_to_its_command(tmp_path: Path) -> None:
    assert Storing(tmp_path, None)._again == "the same command"
    assert Storing(tmp_path, "0a1b2c3d")._again == "`primerl run resume 0a1b2c3d`"


@pytest.mark.parametrize(
    ("form", "said"), [("full", "`primerl run resume` continues it"), (SCRIPT, "the same script resumes it")]
)
def test_a_run_that_was_killed_says_what_resumes_it(form: str, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Registry() as registry:
        run = registry.begin(folder, CONFIG, goes_on=True, form=form, name="run", model="/m", environments=["e"])
        found = standing(registry.find(run))
    assert found.status == "FAILED"
    assert said in found.reason
