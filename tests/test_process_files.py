"""Files that are given to single processes: what is wrong with them is told by the key and its place, exit code 2."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl.cli import main, processes
from primerl.config.describe import fields
from primerl.config.describe.fields import Knob
from primerl.config.process_files.files import resolved
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.inference import InferenceConfig
from primerl.config.schema.monitors import MonitorConfig
from primerl.config.schema.orchestrator import OrchestratorConfig
from primerl.config.schema.services import StoreWorkerConfig
from primerl.config.schema.trainer import TrainerConfig
from primerl.envs import settings as worker_settings
from primerl.inference import settings as engine_settings
from primerl.launch.supervise.trees import MARK
from primerl.process.setting_checks import from_mapping
from primerl.train import settings as trainer_settings
from pydantic import BaseModel, ValidationError

MODEL = {"path": "model"}
ENVIRONMENT = {"id": "e", "name": "e"}
CLIENT = {"base_url": "http://c:1/v1", "model": "m"}
# Command: the class of its files, and a good one, with the sections that cannot stand there empty.
FILES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "inference": (InferenceConfig, {"model": MODEL, "lora": {"rank": 4, "target_modules": ["q_proj"]}}),
    "env-worker": (
        EnvWorkerConfig,
        {
            "orchestrator_url": "http://o:1",
            "environment": "e",
            "id": "e",
            "tailnet": {"name": "n", "log": "l"},
        },
    ),
    "trainer": (
        TrainerConfig,
        {
            "output_dir": "o",
            "orchestrator_url": "http://o:1",
            "max_steps": 3,
            "model": {**MODEL, "lora": {"rank": 4}},
            "ckpt": {},
        },
    ),
    "orchestrator": (
        OrchestratorConfig,
        {
            "output_dir": "o",
            "max_steps": 3,
            "model": MODEL,
            "training_mode": "opd",
            "sampling": {"truncated": "replay"},
            "teacher": {"client": CLIENT},
            "train": {"env": [{**ENVIRONMENT, "teacher": {"client": CLIENT}}, {"id": "e", "name": "of_the_run"}]},
            "eval": {"env": [{"id": "e", "name": "measured", "client": CLIENT}]},
        },
    ),
    "monitor": (
        MonitorConfig,
        {"output_dir": "o", "kind": "rl", "model": "m", "monitors": [{"name": "own", "path": "module:Class"}]},
    ),
    "store-worker": (StoreWorkerConfig, {"run": "r", "output_dir": "o", "model": "m"}),
}
VALUES: list[Any] = ["x", "", -1, 0, 2**70, -(2**70), 1e300, -1.5, True, [], ["x"], [1], {}, {"x": 1}]
# What no key of the kind takes.
NEVER: dict[str, list[Any]] = {
    "integer": ["x", "", 2**70, -(2**70), 1e300, -1.5, True, [], ["x"], {}, {"x": 1}],
    "number": ["x", "", True, [], ["x"], [1], {}, {"x": 1}],
    "string": [-1, 0, 2**70, 1e300, True, [], [1], {}, {"x": 1}],
    "true or false": ["x", "", -1, 2**70, [], {}],
    "table": ["x", -1, 1e300, True, [], ["x"]],
    "list": ["x", -1, 1e300, True, {}, {"x": 1}],
}
# Bounds of the classes; those of cross-checks with other keys are among the smallest.
LARGEST = [2**63, 2**63 - 1, 2**62, 2**32 - 1, 2**31 - 1, 1_000_000, 65_535, 10_000, 3000, 1000, 256, 128, 8, 3]
# Of those that read it without the config library.
READ: dict[str, type[Any]] = {
    "inference": engine_settings.InferenceConfig,
    "env-worker": worker_settings.WorkerConfig,
    "trainer": trainer_settings.TrainerConfig,
}


@pytest.fixture(autouse=True)
def nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process ends when it has read its settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(processes, "native_orchestrator", lambda _: 0)
    # Which ends a process at once where another thread runs: one of pytest's.
    monkeypatch.setattr(processes, "leave", lambda code: code)
    for place in ("inference.server.serve", "envs.worker.run_worker", "monitors.process.main", "stores.worker.main"):
        monkeypatch.setattr(f"primerl.{place}", lambda _: 0)
    monkeypatch.setattr("primerl.train.loop.rl.main", lambda _: 0)


def started(command: str, content: dict[str, Any]) -> int:
    Path("f.toml").write_text(tomli_w.dumps(content))
    return main([command, "@", "f.toml"])


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`path`: as the reference has it."""
    copy: dict[str, Any] = json.loads(json.dumps(content))
    node: Any = copy
    *sections, key = path.split(".")
    for section in sections:
        name = section.removesuffix("[]")
        node = node.setdefault(name, [dict(ENVIRONMENT)] if name != section else {})
        node = node[0] if name != section else node
    node[key] = value
    return copy


def accepts(cls: type[BaseModel], content: dict[str, Any]) -> bool:
    try:
        cls.model_validate(content)
    except ValidationError:
        return False
    return True


def mutations(command: str) -> Iterator[tuple[Knob, Any]]:
    cls, _ = FILES[command]
    knobs = [knob for knob in fields.table_of(cls).all_knobs() if knob.kind != "any value"]
    return itertools.product(knobs, VALUES)


def never(knob: Knob) -> list[Any]:
    kind = "table" if knob.kind.startswith("table") else "list" if knob.kind.startswith(("list", "2 ")) else knob.kind
    return NEVER.get(kind, [])


@pytest.mark.parametrize("command", FILES)
def test_whatever_a_key_holds_is_read_or_refused_by_name(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, good = FILES[command]
    assert started(command, good) == 0, capsys.readouterr().err
    for knob, value in mutations(command):
        code = started(command, changed(good, knob.path, value))
        said = capsys.readouterr().err
        what = f"{command}: {knob.path} = {value!r}: {said}"
        assert code in (0, 2), what
        assert code == (2 if said else 0), what
        if any(value == bad and type(value) is type(bad) for bad in never(knob)):
            assert code == 2, what
        if code == 2:
            assert said.startswith("error: "), what
            assert knob.name in said, what
            assert "(in f.toml, line " in said, what


@pytest.mark.parametrize("role", ["train", "eval"])
def test_a_misspelt_key_of_the_settings_of_joined_workers_is_refused(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would learn of it when they join, from another machine."""
    _, good = FILES["orchestrator"]
    assert started("orchestrator", changed(good, f"{role}.env[].worker.max_concurrent", 3)) == 0
    assert started("orchestrator", changed(good, f"{role}.env[].worker.max_concurent", 3)) == 2
    said = capsys.readouterr().err
    assert f"{role}.env[0].worker.max_concurent (in f.toml, line " in said
    assert "did you mean 'max_concurrent'?" in said
    # Settings of the environment itself are any keys.
    assert started("orchestrator", changed(good, f"{role}.env[].worker.args", {"anything": 1})) == 0


@pytest.mark.parametrize("command", READ)
def test_a_resolved_file_is_refused_by_the_name_of_a_key_of_the_wrong_kind(command: str) -> None:
    """A process reads it without the config library, which is not on every machine."""
    cls, good = FILES[command]
    whole = resolved(cls, good)
    from_mapping(READ[command], whole)
    for knob, value in mutations(command):
        if not any(value == bad and type(value) is type(bad) for bad in never(knob)):
            continue
        if knob.kind == "integer" and isinstance(value, int) and not isinstance(value, bool):
            continue  # beyond a bound, which the file's writer has checked
        problem = None
        try:
            from_mapping(READ[command], changed(whole, knob.path, value))
        except ValueError as error:
            problem = str(error)
        assert problem is not None, f"{knob.path} = {value!r}"
        assert knob.name in problem


@pytest.mark.parametrize("command", READ)
def test_a_resolved_file_lacks_no_key(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the config library, which would fill it in, is not installed."""
    cls, good = FILES[command]
    whole = resolved(cls, good)
    monkeypatch.setattr(processes, "has_config_library", lambda: False)
    assert started(command, whole) == 0, capsys.readouterr().err
    for knob in fields.table_of(cls).all_knobs():
        section, _, name = knob.path.rpartition(".")
        file = json.loads(json.dumps(whole))
        table = functools.reduce(lambda node, part: node.get(part, {}), section.split("."), file) if section else file
        if table.pop(name, None) is None or knob.default == fields.UNSET:
            continue
        assert started(command, file) == 2, knob.path
        said = capsys.readouterr().err
        assert said.startswith(f"error: f.toml: missing setting `{knob.path}`; give a file with every key"), said
    misspelt = {**whole, "bacth": 1}
    assert started(command, misspelt) == 2
    assert "error: f.toml: unknown setting `bacth`; known here: " in capsys.readouterr().err


def test_files_of_the_launcher_are_read_without_the_config_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("the config library is loaded")

    monkeypatch.setattr("primerl.config.command_line.load.load", loads)
    with monkeypatch.context() as within:
        within.setenv(MARK, "1")
        for command, (cls, good) in FILES.items():
            assert started(command, resolved(cls, good)) == 0, command
    with monkeypatch.context() as within:
        within.setenv("RANK", "1")
        within.setenv("TORCHELASTIC_RUN_ID", "1")
        assert started("trainer", resolved(*FILES["trainer"])) == 0
    with pytest.raises(AssertionError, match="the config library is loaded"):
        started("trainer", FILES["trainer"][1])


def test_ranks_of_a_users_own_take_a_file_that_leaves_keys_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert started("trainer", FILES["trainer"][1]) == 0


def test_the_native_orchestrator_holds_every_number_that_its_class_takes(capfd: pytest.CaptureFixture[str]) -> None:
    """Beyond its own integers it would tell of a line of a file that nobody has written."""
    from primerl import _core

    cls, good = FILES["orchestrator"]
    numbers = [knob for knob in fields.table_of(cls).all_knobs() if knob.kind == "integer"]
    assert len(numbers) >= 30
    for knob in numbers:
        largest = next(value for value in LARGEST if accepts(cls, changed(good, knob.path, value)))
        assert largest < 2**63, knob.path
        Path("f.toml").write_text(tomli_w.dumps(changed(good, knob.path, largest)))
        _core.orchestrate(["--config", "f.toml", "--check"])
        said = capfd.readouterr().err
        assert "TOML parse error" not in said, f"{knob.path} = {largest}: {said}"
        assert said.startswith("error: "), said  # there is no such model


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("inference", '[model]\npth = ".."\n', "model.pth (in f.toml, line 2): unknown key; did you mean 'path'?"),
        ("inference", 'port = 70000\n[model]\npath = "m"\n', "port (in f.toml, line 1): Input should be less than or"),
        ("trainer", "", "output_dir (in f.toml): missing; it has no default, so set it"),
        ("orchestrator", "bacth_size = 3\n", "bacth_size (in f.toml, line 1): unknown key; did you mean 'batch_size'?"),
        ("env-worker", "id = 3\n", "id (in f.toml, line 1): Input should be a valid string (it is 3)"),
    ],
)
def test_a_file_is_refused_before_anything_heavy_is_imported(
    tmp_path: Path, command: str, text: str, message: str
) -> None:
    (tmp_path / "f.toml").write_text(text)
    code = (
        "import sys; from primerl.cli import main; code = main(sys.argv[1:])\n"
        "print(code, {'torch', 'verifiers', 'transformers', 'primerl._core'} & set(sys.modules) or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, "@", "f.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "2 light", done.stderr
    assert message in done.stderr
