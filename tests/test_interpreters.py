"""Environments with an interpreter of their own: what is installed, what is refused, and a run that trains with one."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import classic_helpers
import pytest
from end_to_end import arguments_of, column, primerl, read_lines
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.environment import Interpreter
from primerl.config.schema.rl import RLConfig
from primerl.launch import configs, secrets
from primerl.launch.interpreters import lookup, virtualenvs
from primerl.launch.preflight import environments
from primerl.runs.registry import Registry
from primerl.runs.state import VARIABLE
from pydantic import ValidationError

START_S = 180.0


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "state"))
    # Nothing of what is installed here comes from elsewhere.
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path / "state"


def wheel(folder: Path, content: str = "ANSWER = 42\n", version: str = "1.0") -> Path:
    """A package of one module, as an installer takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"tiny_answer-{version}-py3-none-any.whl"
    info = f"tiny_answer-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_answer.py", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-answer\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"tiny_answer.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return file


def answer(folder: Path) -> str:
    command = [folder / "bin" / "python", "-c", "import tiny_answer; print(tiny_answer.ANSWER)"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


@pytest.mark.processes
def test_requirements_are_installed_once_and_anew_when_they_change(state: Path, tmp_path: Path) -> None:
    said: list[str] = []
    requirements = [str(wheel(tmp_path / "wheels"))]
    folder = virtualenvs.install(requirements, 120, said.append)
    assert folder.parent == state / "virtualenvs"
    assert answer(folder) == "42"
    assert len(said) == 1
    assert str(folder) in said[0]
    made = folder.stat()

    # Again: what is there is used, as it is. In another order it is the same.
    assert virtualenvs.install(requirements * 2, 120, said.append) == folder
    assert folder.stat().st_mtime_ns == made.st_mtime_ns
    assert len(said) == 1

    # The same path with other content is another virtualenv.
    wheel(tmp_path / "wheels", "ANSWER = 43\n")
    other = virtualenvs.install(requirements, 120, said.append)
    assert other != folder
    assert virtualenvs.installed(requirements) == other
    assert (answer(folder), answer(other)) == ("42", "43")
    assert not list(folder.parent.glob("*.partial"))


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_virtualenvs_that_nobody_needs_are_removed(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prune(*arguments: str) -> dict[str, str]:
        """What is said of each."""
        assert main(["env", "prune", *arguments]) == 0
        rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        texts = [[part.strip() for part in row if part.strip()] for row in rows]
        return {row[0]: row[2] for row in texts if len(row) == 4 and row[0] != "virtualenv"}

    # Of a local package, whose path begins where the run was started.
    where = tmp_path / "where"
    where.mkdir()
    package = wheel(where)
    monkeypatch.chdir(where)
    asked = [f"./{package.name}"]
    folders = {"asked": virtualenvs.folder_of(asked)}
    for name in ("lost", "busy", "recent", "locked"):
        folders[name] = virtualenvs.folder_of([f"{name}==1"])
    for folder in folders.values():
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "tool").write_text("x" * 1500)
        os.utime(folder, (1, 1))
    folders["recent"].with_suffix(".lock").touch()
    partial = folders["lost"].with_name("cut-short.partial")
    partial.mkdir()
    config = f'[[orchestrator.train.env]]\nid = "e"\npython.requirements = ["{asked[0]}"]\n'
    run = {"goes_on": False, "form": "full", "name": "n", "model": "/m", "environments": ["e"]}
    with Registry() as registry:
        run_id = registry.begin(tmp_path / "run", config, **run)
    monkeypatch.chdir(tmp_path)
    with (
        folders["locked"].with_suffix(".lock").open("w") as lock,
        subprocess.Popen(["sleep", "600"], env={**os.environ, "VIRTUAL_ENV": str(folders["busy"])}) as process,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.name, (1, 1))
        try:
            said = prune("--dry-run")
            named = {name: said[folder.name] for name, folder in folders.items()}
            assert named == {
                "asked": f"stays: run {run_id} (n)",
                "lost": "would be removed",
                "busy": "stays: 1 process of it",
                "recent": "stays: asked for within the last hour",
                "locked": "stays: being installed",
            }
            assert all(folder.is_dir() for folder in folders.values())
            assert prune()[folders["lost"].name] == "removed"
            left = {name for name, folder in folders.items() if folder.exists()}
            assert (left, partial.exists()) == ({"asked", "busy", "recent", "locked"}, False)
        finally:
            process.kill()
    with Registry() as registry:
        registry.delete(run_id)
    assert set(prune().values()) == {"removed", "stays: asked for within the last hour"}
    assert [name for name, folder in folders.items() if folder.exists()] == ["recent"]


@pytest.mark.processes
def test_what_a_killed_installer_left_is_no_virtualenv(state: Path, tmp_path: Path) -> None:
    requirements = [str(wheel(tmp_path / "wheels"))]
    partial = virtualenvs.folder_of(requirements).with_suffix(".partial")
    (partial / "bin").mkdir(parents=True)
    (partial / "bin" / "python").write_text("half of it")
    assert answer(virtualenvs.install(requirements, 120)) == "42"
    assert not partial.exists()


@pytest.mark.processes
def test_an_installation_that_fails_says_the_installers_last_lines(state: Path, tmp_path: Path) -> None:
    with pytest.raises(virtualenvs.InstallError, match=r"(?s)uv, exit code \d.*no-such-package-of-anybody") as failed:
        virtualenvs.install(["no-such-package-of-anybody==1.0"], 120)
    assert len(str(failed.value).splitlines()) <= virtualenvs.LAST_LINES + 1
    assert not [entry for entry in (state / "virtualenvs").iterdir() if entry.suffix != ".lock"]


def test_two_runs_do_not_install_the_same_at_once(state: Path, tmp_path: Path) -> None:
    requirements = [str(wheel(tmp_path / "wheels"))]
    folder = virtualenvs.folder_of(requirements)
    folder.parent.mkdir(parents=True)
    said: list[str] = []
    waits = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    with folder.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(virtualenvs.InstallError, match="another run is installing them"):
            virtualenvs.install(requirements, 0.0)
        second = threading.Thread(target=lambda: virtualenvs.install(requirements, 120, say))
        second.start()
        assert waits.wait(60)
        assert "waiting for another run" in said[0]
        # The other one has made it meanwhile.
        folder.mkdir()
    second.join(60)
    assert len(said) == 1


def test_without_uv_there_is_another_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(virtualenvs.InstallError, match=r"uv.*is not there; `pip install uv`, or .*`path`"):
        virtualenvs.find_uv()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of `path`"),
        ({"path": ".venv", "requirements": ["x"]}, "give one of `path`"),
        ({"requirements": []}, "at least 1 item"),
        ({"requirements": ["-e ./x"]}, "is an option of an installer"),
        ({"requirements": [""]}, "at least 1 character"),
        ({"python": "x"}, "Extra inputs"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        Interpreter.model_validate(given)


def script(folder: Path, text: str) -> Path:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no interpreter"),
        ("echo 'no such library' >&2; exit 127", "failed: no such library"),
        ("echo hello", "is no Python interpreter"),
        ("""echo '[[3, 10], "cpython", false]'""", "is cpython 3.10; env workers need CPython 3.11 or newer"),
        ("""echo '[[3, 13], "cpython", true]'""", "is cpython 3.13 without the GIL"),
    ],
)
def test_an_interpreter_that_cannot_run_workers_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "python" if text is None else script(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        lookup.check(str(file))
    assert str(file) in str(refused.value)


def test_a_virtualenvs_folder_stands_for_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert lookup.interpreter(Interpreter(path=str(tmp_path))) == str(tmp_path / "bin" / "python")
    assert lookup.interpreter(Interpreter(path=sys.executable)) == sys.executable


def test_a_process_of_another_interpreter_finds_the_package_and_nothing_else(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "PYTHONPATH": "/mine", "VIRTUAL_ENV": "/other"}
    home = Path(sys.executable).parent.parent
    found = lookup.variables(sys.executable, tmp_path / "package", given)
    assert found["PYTHONPATH"] == f"{tmp_path / 'package'}:/mine"
    assert [entry.name for entry in (tmp_path / "package").iterdir()] == ["primerl"]
    assert (tmp_path / "package" / "primerl").resolve() == lookup.PACKAGE
    assert (found["VIRTUAL_ENV"], found["PATH"]) == (str(home), f"{home / 'bin'}:/bin")
    # One without a virtualenv has none.
    assert "VIRTUAL_ENV" not in lookup.variables("/usr/bin/python3", tmp_path / "package", given)


def test_what_is_installed_from_a_folder_is_told_by_its_content(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for name in ("one", "two"):
        package = tmp_path / name
        (package / "build").mkdir(parents=True)
        (package / "module.py").write_text(name)
        monkeypatch.chdir(package)
        folders.append(virtualenvs.folder_of(["."]))
        # What an installer leaves there is none of it.
        (package / "build" / "left.py").write_text("")
        assert virtualenvs.folder_of(["."]) == folders[-1]
    assert folders[0] != folders[1]


def config(train: dict[str, Any], *evaluated: dict[str, Any]) -> RLConfig:
    orchestrator = {"train": {"env": [train]}, "eval": {"env": list(evaluated)}, "batch_size": 8}
    return RLConfig.model_validate(
        {"max_steps": 1, "seq_len": 1024, "model": {"path": "m"}, "orchestrator": orchestrator}
    )


def problems(run: RLConfig, folder: Path) -> tuple[list[str], list[str]]:
    said: list[str] = []
    wanted = environments.of_run(run, secrets.of_workers(run))
    with environments.checking(wanted, folder) as processes:
        return environments.problems(wanted, processes, START_S, said.append), said


@pytest.mark.processes
def test_environments_are_checked_by_the_interpreter_that_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(classic_helpers.ENVIRONMENTS), prepend=os.pathsep)
    own = {"path": str(classic_helpers.classic_python().parent.parent)}
    run = config(
        {"id": "classic-trial", "python": own},
        {"id": "classic-trial", "name": "compared", "python": own, "args": {"kind": "group"}},
        {"id": "classic-trial", "name": "measured", "python": own},
        {"id": "classic-trial", "name": "counted", "python": own, "metrics_port": 0, "args": {"eval_examples": 2}},
        {"id": "reverse-text"},
    )
    found, said = problems(run, tmp_path)
    assert found == [
        "environment 'compared': 'classic-trial' rewards the rollouts of a group by comparing them, and "
        "rollouts_per_example is 1; raise it to 2 or more",
        f"environment 'counted': 'classic-trial': {classic_helpers.CLASSIC_PYTHON} has no "
        "prometheus_client, which metrics_port needs; install it there, or omit metrics_port",
    ]
    (remark,) = said
    assert remark.startswith("environment 'measured': 'classic-trial' has no evaluation split of its own")


@pytest.mark.processes
def test_a_virtualenv_without_verifiers_is_named(state: Path, tmp_path: Path) -> None:
    requirements = [str(wheel(tmp_path / "wheels"))]
    run = config({"id": "classic-trial", "python": {"requirements": requirements}})
    lookup.provided(configs.entries(run), 600, lambda _: None)
    (found,), _ = problems(run, tmp_path)
    python = virtualenvs.folder_of(requirements) / "bin" / "python"
    assert (
        f"verifiers is not installed for {python}; install verifiers>=0.4,<0.5 there (the extra `envs` of primerl: "
        in found
    )
    assert found.startswith("environment 'classic-trial'")


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs")
def test_a_run_trains_on_whole_groups_of_a_classic_environment(imitator: Path, tmp_path: Path) -> None:
    classic_helpers.classic_python()
    task = 'letters = "a-j", min_length = 3, max_length = 6, num_examples = 256, num_eval_examples = 16'
    own = f'id = "reverse-classic"\npython = {{ path = "{classic_helpers.CLASSIC_VENV}" }}\n'
    override = tmp_path / "classic.toml"
    override.write_text(
        f'[[orchestrator.train.env]]\n{own}name = "ranked"\nargs = {{ {task}, rewards = "rank" }}\n'
        f'[[orchestrator.eval.env]]\n{own}name = "measured"\nargs = {{ {task} }}\nnum_examples = 16\n'
        "base_model = false\n"
    )
    output = tmp_path / "run"
    primerl("rl", *arguments_of(imitator, output, "@", str(override), "--max-steps", "4"))
    # Of each pair of answers in a group one is ranked above the other, or both are as good: the mean of a whole group,
    # scored at once, is a half.
    assert column(output, "reward/ranked/mean") == pytest.approx([0.5] * 4, abs=1e-6)
    assert max(column(output, "optim/grad_norm")) > 0
    (measured,) = read_lines(output / "evals.jsonl")
    assert (measured["version"], measured["failed"]) == (4, 0)
    assert 0 < measured["metrics"]["exact"] <= 1
    log = (output / "logs" / "envs" / "train" / "ranked" / "env_worker_0.log").read_text()
    assert "environment reverse-classic: 256 examples" in log
    assert (output / "logs" / "envs" / "eval" / "measured" / "env_worker_0.log").is_file()
