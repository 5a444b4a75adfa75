"""docs/sft.md: its configs, rows and commands work as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from primerl.config.schema.sft import SFTConfig
from primerl.launch.preflight.sft import settings_of
from primerl.models.tiny import write_model
from primerl.process.setting_checks import from_mapping
from primerl.train.checkpoint.state import Checkpoints
from primerl.train.data.conversations import conversation
from primerl.train.sft_settings import SFTConfig as Settings
from sft_helpers import metrics, write_rows


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "sft.md").read_text()


def blocks(page: str, kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language == kind]


def test_the_configs_are_read(page: str) -> None:
    first, *others = blocks(page, "toml")
    assert len(others) == 2
    base = tomllib.loads(first)
    for text in others:
        given = tomllib.loads(text)
        data = {**base["data"], **given["data"]}
        if "subsets" in given["data"]:
            data.pop("path")
        config = SFTConfig.model_validate({**base, "data": data})
        from_mapping(Settings, settings_of(config))


def test_every_key_that_is_named_exists(page: str) -> None:
    keys = set(re.findall(r"`(?:--)?((?:data|val|ckpt|optim)\.[a-z_.-]+)", page))
    assert len(keys) > 10
    for key in keys:
        section: Any = SFTConfig
        for name in key.rstrip(".").replace("-", "_").split("."):
            annotation = section.model_fields[name].annotation
            kinds = getattr(annotation, "__args__", [annotation])
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def test_the_rows_are_conversations(page: str) -> None:
    rows, marked = blocks(page, "json")
    read = [conversation(json.loads(line)) for line in rows.splitlines()]
    assert conversation(json.loads(marked)).untrained == {1}
    assert read[0].messages == read[1].messages
    assert read[2].tools == [{"type": "function", "function": {"name": "clock", "parameters": {}}}]


@pytest.mark.processes
@pytest.mark.timeout(900)  # each command imports torch
def test_the_commands_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "mine", seed=0)
    (tmp_path / "data").mkdir()
    for name, count in (("chats", 60), ("held-out", 5)):
        write_rows(tmp_path / "data" / f"{name}.jsonl", *({"prompt": str(n), "completion": "x"} for n in range(count)))
    (tmp_path / "sft.toml").write_text(blocks(page, "toml")[0])
    commands = [line.split("#")[0].strip() for block in blocks(page, "") for line in block.splitlines()]
    assert len(commands) == 5
    outputs = {}
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "primerl"
        # Small enough for a test; a later value replaces an earlier one.
        if "--help" not in arguments:
            small = ("--data.epochs", "100", "--data.batch-size", "64", "--data.seq-len", "64", "--max-steps", "102")
            arguments += [*small, "--threads", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "primerl", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, (command, done.stdout + done.stderr)
        outputs[command] = done.stdout
    run = tmp_path / "outputs" / "sft"
    assert "everything checked" in outputs[commands[0]]
    assert "all 102 steps are trained" in outputs[commands[3]]
    assert "resuming from the checkpoint of step 100" in outputs[commands[4]]
    assert [line["step"] for line in metrics(run)] == list(range(103))
    assert Checkpoints(run, None).steps() == [100, 102]
    assert (run / "checkpoints" / "replaced_step_102").is_dir()
