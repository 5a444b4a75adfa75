"""Command lines as the published guide writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from primerl import cli
from primerl.config.schema.rl import RLConfig
from test_config import tree
from test_config_hosted import LEAST


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RLConfig]:
    """The configs of runs that would begin."""
    found: list[RLConfig] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("primerl.launch.run.run", lambda config, **_: found.append(config) or 0)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("form", [LEAST, tree()])
@pytest.mark.parametrize("command", [["rl", "run"], ["run"], ["rl"]])
def test_a_glued_file_and_a_key(command: list[str], form: dict[str, Any], started: list[RLConfig]) -> None:
    Path("my-config.toml").write_text(tomli_w.dumps(form))
    key = "0123456789" * 4
    assert cli.main([*command, "@my-config.toml", "--wandb-api-key", key, "--no-fork-server"]) == 0
    (config,) = started
    assert config.wandb is not None
    assert config.wandb.api_key is not None
    assert config.wandb.api_key.get_secret_value() == key
    assert key not in config.model_dump_json(), "it is in no config file that is written"
