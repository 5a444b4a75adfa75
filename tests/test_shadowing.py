"""A module that cannot be imported is named by its file: one that stands in a library's place, or an environment's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from primerl.envs import check, exits
from primerl.envs.interface import EnvironmentRefusedError
from primerl.launch.preflight import checker, shadowing, training


def test_only_what_is_imported_in_place_of_a_library_is_named(tmp_path: Path) -> None:
    for name in ("random.py", "numpy/__init__.py", "datasets/data.json", "my_own.py", "not-a-name.py", "json.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    found = shadowing.shadowing(tmp_path)
    assert found == [tmp_path / "numpy" / "__init__.py", tmp_path / "random.py"]
    assert shadowing.shadowing(tmp_path / "nowhere") == []


def test_a_checkout_that_is_installed_in_place_is_the_library(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    assert shadowing.shadowing(tmp_path, [str(tmp_path / "link")]) == []


@pytest.mark.processes
def test_the_file_is_told_where_a_check_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text('raise SystemExit("my own script")\n')
    monkeypatch.chdir(tmp_path)
    module = "primerl.launch.preflight.check_environments"
    with checker.running(module, environment=os.environ | {"PYTHONSAFEPATH": ""}) as process:
        done = checker.ended(process, 120, "[]")
    assert done is not None
    assert done.returncode == 1
    said = checker.said(done)
    assert said.startswith(f"my own script; {tmp_path / 'random.py'} is imported in place of the library")
    # The orchestrator's check says what is wrong in whole; it did not get so far.
    file = tmp_path / "o.toml"
    assert training._orchestrator_said(done, file, 1.0, lambda refusal: refusal.message) == said
    refused = subprocess.CompletedProcess([], 2, "", "error: a key is wrong")
    assert training._orchestrator_said(refused, file, 1.0, lambda refusal: refusal.message) == "a key is wrong"


def environment(folder: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"broken_{folder.name.replace('-', '_')}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"from {name}.taskset import T\n\n__all__ = ['T']\n")
    (folder / name / "taskset.py").write_text(content)
    monkeypatch.syspath_prepend(folder)
    return name


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "import json\n\nimport no_such_library.part\n",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_library' ({file}, line 3); install what "
            "it needs where its workers run",
        ),
        (
            "try:\n    import no_such_library\nexcept ImportError as error:\n    raise ImportError('x') from error\n",
            "cannot be imported: ModuleNotFoundError: No module named 'no_such_library' ({file}, line 2); install",
        ),
        ("from json import nothing\n", "cannot be imported: ImportError: cannot import name 'nothing' from 'json'"),
        ("\n1 / 0\n", "cannot be loaded: ZeroDivisionError: division by zero ({file}, line 2)"),
        ("import json\njson.nothing\n", "AttributeError: module 'json' has no attribute 'nothing' ({file}, line 2)"),
        ("raise SystemExit('my own script')\n", "ended the process: my own script ({file}, line 1)"),
    ],
)
def test_an_installed_environment_whose_import_fails(
    content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = environment(tmp_path, content, monkeypatch)
    problem = check.check_environment(f"owner/{name}", {}).problem
    assert problem is not None
    assert problem.startswith(f"environment 'owner/{name}' ")
    assert told.format(file=tmp_path / name / "taskset.py") in problem
    assert "not found" not in problem


def test_one_that_is_not_installed_is_not_found() -> None:
    problem = check.check_environment("no-such-environment", {}).problem
    assert problem is not None
    assert "install its package" in problem


def test_a_place_is_none_of_pythons_import_system() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert "decoder.py, line " in exits.place(caught.value)
    assert exits.place(ValueError("raised nowhere")) == ""
    assert isinstance(exits.not_imported("e", ImportError("x")), EnvironmentRefusedError)
