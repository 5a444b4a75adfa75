"""A run that is not told where to write has a folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch import evaluation
from primerl.launch import run as launch_run
from primerl.launch.preflight import checker, sft
from run_helpers import CONFIG

RL = CONFIG.replace('output_dir = "outputs/small"\n', "")
SHORT = """\
model = "tiny"
max_steps = 1
batch_size = 8
rollouts_per_example = 4
[sampling]
max_tokens = 8
[[env]]
id = "reverse-text"
"""
SFT = 'max_steps = 1\n[model]\npath = "tiny"\n[data]\npath = "rows/a chat.jsonl"\n'
EVAL = 'model = "tiny"\n[[env]]\nid = "reverse-text"\n'
NAME = rf"{run_file.STAMP}_LABEL_[0-9a-f]{{4}}"
STARTS = [
    ("rl", RL, "outputs/rl", "reverse-text"),
    ("rl", SHORT, "outputs/rl", "reverse-text"),
    ("sft", SFT, "outputs/sft", "a-chat"),
    ("eval", EVAL, "outputs/eval", "reverse-text"),
]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of commands, none of which starts anything."""
    folders: list[str] = []

    def note(config: Any, *_: Any, **__: Any) -> int:
        folders.append(config.output_dir)
        return 0

    def prepared(config: SFTConfig) -> Any:
        note(config)
        raise ConfigError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checker, "environments_ahead", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launch_run, "run", note)
    monkeypatch.setattr(evaluation, "run", note)
    monkeypatch.setattr(sft, "prepared", prepared)
    return folders


def start(command: str, text: str, *arguments: str) -> int:
    Path("run.toml").write_text(text)
    return main([command, "@", "run.toml", *arguments])


@pytest.mark.parametrize(("command", "text", "beside", "label"), STARTS)
def test_each_start_has_a_folder_of_its_own(
    command: str, text: str, beside: str, label: str, started: list[str]
) -> None:
    for _ in range(2):
        start(command, text)
    start(command, text, "--output-dir", "mine")
    first, second, third = started
    assert first != second
    assert third == "mine"
    for folder in (first, second):
        assert os.path.dirname(folder) == beside
        assert re.fullmatch(NAME.replace("LABEL", label), os.path.basename(folder))


# The short form goes back to no step.
@pytest.mark.parametrize(("command", "text", "beside", "label"), [start for start in STARTS if start[1] is not SHORT])
def test_a_start_that_goes_on_takes_the_newest(
    command: str, text: str, beside: str, label: str, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--retry-errors"] if command == "eval" else ["--ckpt.resume-step", "-1"]
    assert start(command, text, *more) == 2
    assert f"there is no run of {label} in {Path(beside).absolute()} to resume" in capsys.readouterr().err
    names = [f"2026-01-0{day}_00-00-00_{label}_00{day}0" for day in (1, 3, 2)]
    for name in (*names, f"2026-02-01_00-00-00_other-{label}_0000", "2027", f"{label}-mine"):
        (Path(beside) / name).mkdir(parents=True)
    start(command, text, *more)
    assert started == [f"{beside}/{names[1]}"]


def test_what_was_chosen_is_kept() -> None:
    config = run_file.located(EvalConfig.model_validate({"model": "tiny", "env": [{"id": "reverse-text"}]}))
    assert run_file.settings(config)["output_dir"] == config.output_dir
    assert run_file.located(config) is config
    words = "interrupted; the same command resumes it"
    assert run_file.with_folder(words, config) == (
        f"interrupted; the same command with --output-dir {config.output_dir} resumes it"
    )
    found = "the same command with --retry-errors measures it again"
    assert run_file.with_folder(found, config) == found
    told = EvalConfig.model_validate({"model": "tiny", "output_dir": "o", "env": [{"id": "reverse-text"}]})
    assert run_file.with_folder(words, told) == words


def test_any_name_of_an_environment_makes_a_name_of_a_folder() -> None:
    for given, label in [("owner/My Env@1.0", "owner-My-Env-1.0"), ("../..", "run"), ("ü" * 80, "run")]:
        config = EvalConfig.model_construct(env=[SimpleNamespace(label=given)])
        assert run_file.label_of(config) == label
