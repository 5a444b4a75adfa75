"""A user whom the system does not know, without HOME: as in containers that run with an arbitrary id."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from primerl import cli
from primerl.cli.arguments import keep_state
from primerl.launch.monitors import has_login
from primerl.launch.preflight import output_folder
from primerl.monitors.services import prime
from primerl.runs import state
from primerl.runs.registry import Registry


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    # Set first, so that what the code sets is undone.
    monkeypatch.setenv(state.VARIABLE, "")
    for name in ("HOME", "XDG_STATE_HOME", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("nobody")
def test_a_command_without_a_run_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "list"]) == 2
    said = capsys.readouterr().err
    assert "HOME is not set" in said
    assert "set PRIMERL_STATE_DIR to a folder of yours" in said


@pytest.mark.usefixtures("nobody")
def test_a_run_keeps_its_state_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_state("out")
    folder = tmp_path / "out" / "run" / "state"
    assert str(folder) in capsys.readouterr().err
    with Registry() as registry:
        assert registry.all() == []
    assert (folder / "runs.db").is_file()
    assert os.environ[state.VARIABLE] == str(folder), "the run's processes have it too"
    keep_state("other")
    assert capsys.readouterr().err == "", "it is known now"
    # Checks may have made it before the run begins; it is not what an earlier run left there.
    output_folder.check_output_dir(str(tmp_path / "out"), clean=False, kind="rl")
    with output_folder.claimed("out", clean=True, kind="rl"):
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["configs", "run"]
        assert (folder / "runs.db").is_file()


@pytest.mark.usefixtures("nobody")
def test_logins_are_looked_for_nowhere() -> None:
    assert prime.login() == {}
    assert not has_login()


def test_a_home_that_cannot_be_written_to_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Docker sets it for an id without a user: HOME=/."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    monkeypatch.setenv("HOME", str(home))
    for name in (state.VARIABLE, "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "")
    # Tests may be run by root, who may write everywhere.
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home and access(path, mode))
    keep_state("out")
    folder = tmp_path / "out" / "run" / "state"
    told = capsys.readouterr().err
    assert f"may not write to {home}: the state folder" in told
    assert str(folder) in told
    assert state.state_folder() == folder
    assert not list(home.iterdir())
    # What is there is used, and what is named is not exchanged in silence.
    monkeypatch.setenv(state.VARIABLE, str(home / "mine"))
    assert state.within_run("out") is None
    monkeypatch.setenv(state.VARIABLE, "")
    home.chmod(0o700)
    (home / ".local" / "state" / "primerl").mkdir(parents=True)
    assert state.within_run("out") is None


def test_a_home_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(state.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state.within_run("out") is None
    assert state.state_folder() == tmp_path / ".local" / "state" / "primerl"
