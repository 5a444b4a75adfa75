"""Text is UTF-8, whatever the locale."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import write_run

FOLDERS = ("python", "examples", "benches", "scripts")
# A locale whose encoding is ASCII, and nothing that saves Python from it.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def mode_of(call: ast.Call, position: int, default: str) -> str:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[position : position + 1]
    if not given:
        return default
    return str(given[0].value) if isinstance(given[0], ast.Constant) else "b"


def is_text(call: ast.Call) -> bool:
    """Whether a call opens a file, or the pipes of a process, as text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else None
    if name in ("read_text", "write_text") and owner is not None:
        # Functions of ours of that name take a path too.
        return len(call.args) == (0 if name == "read_text" else 1)
    if name == "open" and owner in (None, "io"):
        return "b" not in mode_of(call, 1, "r")
    if name == "open" and owner != "os":
        return set(mode := mode_of(call, 0, "r")) <= set("rwxa+t") and "b" not in mode
    if name == "fdopen":
        return "b" not in mode_of(call, 1, "r")
    if name in ("NamedTemporaryFile", "TemporaryFile"):
        return "b" not in mode_of(call, 0, "w+b")
    starts = name in ("run", "Popen", "check_output")
    return starts and any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)


def without_encoding(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and is_text(node):
            named = {keyword.arg for keyword in node.keywords}
            if not named & {"encoding", None}:
                yield node.lineno


def test_every_text_file_is_opened_with_its_encoding(repository: Path) -> None:
    files = [file for folder in FOLDERS for file in (repository / folder).rglob("*.py") if ".venv" not in str(file)]
    assert len(files) > 100
    found = [f"{file}:{line}" for file in files for line in without_encoding(file.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text(errors='replace')", True),
        ("path.read_text(encoding='utf-8')", False),
        ("write_text(path, text)", False),
        ("path.write_text(text)", True),
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('w')", True),
        ("path.open('wb')", False),
        ("os.open(path, flags)", False),
        ("os.fdopen(number, 'w')", True),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, **options)", False),
    ],
)
def test_what_is_opened_as_text(source: str, is_found: bool) -> None:
    assert bool(list(without_encoding(source))) == is_found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Configs, rows, and a model whose template is not ASCII; in a folder that is not, either."""
    folder = tmp_path / "café 日本"
    folder.mkdir()
    config = write_run(folder)
    text = config.read_text(encoding="utf-8").replace('"outputs/small"', '"läufe/erster"')
    config.write_text(f"# Für den Anfang\n{text}", encoding="utf-8")
    for template in (folder / "tiny").glob("chat_template.jinja"):
        template.write_text(template.read_text(encoding="utf-8") + "{# «é» #}", encoding="utf-8")
    row = '{"messages": [{"role": "user", "content": "né"}, {"role": "assistant", "content": "日"}]}\n'
    (folder / "zeilen-ü.jsonl").write_text(row, encoding="utf-8")
    data = '[data]\npath = "zeilen-ü.jsonl"\nseq_len = 64\n'
    sft = f'output_dir = "läufe/sft"\nmax_steps = 1\n[model]\npath = "tiny"\n{data}'
    (folder / "sft.toml").write_text(sft, encoding="utf-8")
    return folder


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "primerl", *arguments],
        cwd=folder,
        env={**os.environ, **ASCII},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
    )


@pytest.mark.processes
@pytest.mark.plain
@pytest.mark.parametrize(
    ("command", "written"), [("rl", "läufe/erster/configs/rl.toml"), ("sft", "läufe/sft/configs/sft.toml")]
)
def test_commands_read_and_write_utf_8_in_any_locale(command: str, written: str, folder: Path) -> None:
    done = started(folder, command, "@", f"{command}.toml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "läufe" in done.stdout
    settings: dict[str, Any] = tomllib.loads((folder / written).read_text(encoding="utf-8"))
    assert "läufe" in settings["output_dir"]
    refused = started(folder, command, "@", f"{command}.toml", "--output-dir", "zeilen-ü.jsonl", "--dry-run")
    assert refused.returncode == 2
    assert "zeilen-ü.jsonl is not a folder" in refused.stderr
