"""Where a process finds the run's key, and to whom it shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from primerl import run_key
from primerl.config.process_files.files import Kind, ProcessConfig
from primerl.config.schema.inference import InferenceConfig
from primerl.launch.placement import commands
from primerl.run_key import VARIABLE


def made(folder: Path, key: str) -> Path:
    (folder / "run").mkdir(parents=True, exist_ok=True)
    (folder / run_key.FILE).write_text(f"{key}\n")
    return folder


def test_the_runs_own_key_goes_before_what_happens_to_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert run_key.run_key(tmp_path) is None
    monkeypatch.setenv(VARIABLE, "set")
    assert run_key.run_key(tmp_path) == run_key.run_key() == "set"
    assert run_key.run_key(made(tmp_path, "made")) == "made"
    made(tmp_path, "")
    assert run_key.run_key(tmp_path) == "set"


def test_each_orchestrator_is_shown_its_own_runs_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    one, other = "http://127.0.0.1:5001", "http://127.0.0.1:5002"
    run_key.learn(one, made(tmp_path / "one", "first"))
    run_key.learn(f"{other}/", made(tmp_path / "other", "second"))
    assert run_key.run_key_header(f"{one}/status") == {"Authorization": "Bearer first"}
    assert run_key.run_key_header(other) == {"Authorization": "Bearer second"}
    # Of an address without a key in its folder any more, nothing is remembered.
    run_key.learn(one, tmp_path / "gone")
    run_key.learn(other, tmp_path / "gone")
    assert run_key.run_key_header(one) == run_key.run_key_header(other) == {}


@pytest.mark.parametrize("kind", ["inference", "env-worker", "trainer", "orchestrator", "monitor", "store-worker"])
def test_who_talks_to_the_orchestrator_is_started_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    process = ProcessConfig(
        kind=kind,
        name=kind,
        config=InferenceConfig.model_construct(),
        file=made(tmp_path, "made") / "configs" / f"{kind}.toml",
        log=tmp_path / "log",
        threads=1,
        variables={},
    )
    given = commands.environment_of(process).get(VARIABLE)
    assert given == ("made" if kind in ("inference", "env-worker", "trainer") else None)
