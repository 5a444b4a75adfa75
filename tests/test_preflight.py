"""What is wrong with a start is told at once, all of it, and from the cheapest file that shows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.sft import SFTConfig
from primerl.evals import preflight as eval_preflight
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.preflight import hub, sft, training
from primerl.models.tiny import TinyConfig, write_model
from run_helpers import config_of

NAME = "owner/small"
SMALL = TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16)


class Hub:
    """A hub with one model, and a cache of it that is empty at first."""

    def __init__(self, folder: Path) -> None:
        self.source, self.cache = folder / "hub", folder / "cache"
        self.fetched: list[str] = []
        write_model(self.source, SMALL, seed=1)

    def download(self, name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        if local_files_only:
            if not self.cache.is_dir():
                raise LocalEntryNotFoundError("it is not there")
            return str(self.cache)
        if name != NAME:
            raise OSError("no route to the hub")
        self.cache.mkdir(exist_ok=True)
        for file in self.source.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns) and not (self.cache / file.name).exists():
                shutil.copy(file, self.cache)
                self.fetched.append(file.name)
        return str(self.cache)

    def change(self, **keys: Any) -> None:
        file = self.source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    def has_weights(self) -> bool:
        return any(name.endswith(".safetensors") for name in self.fetched)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    found = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.download)
    (tmp_path / "file").write_text("")
    return found


def start_rl(model: str, **more: Any) -> None:
    config = config_of(model={"path": model}, **more)
    config.orchestrator.train.env[0].id = "no-such-env" if more else "reverse-text"
    training.check_ahead(config)
    training.check(config) if more else hub.with_model(config)


def start_sft(model: str, **more: Any) -> None:
    rows = Path("rows.jsonl")
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    data = {"path": "no-such.jsonl" if more else str(rows), "seq_len": 64}
    given = {"output_dir": "out", "max_steps": 1, "model": {"path": model}, "data": data, **more}
    sft.prepared(SFTConfig.model_validate(given))


def start_eval(model: str, **more: Any) -> None:
    given = {"model": model, "env": [{"id": "no-such-env" if more else "reverse-text"}], "output_dir": "out", **more}
    config = eval_preflight.with_model(EvalConfig.model_validate(given))
    if more:
        eval_preflight.check(config, print, LocalPlacement())


STARTS = [(start_rl, "there is no module 'no_such_env'"), (start_sft, "no-such.jsonl"), (start_eval, "'no_such_env'")]


@pytest.mark.parametrize(("start", "other"), STARTS)
@pytest.mark.parametrize("model", ["owner/none", "no/such/folder", NAME])
def test_a_model_that_cannot_be_used_hides_no_other_problem(
    start: Callable[..., None], other: str, model: str, found: Hub
) -> None:
    found.change(quantization_config={"bits": 4})
    with pytest.raises(ConfigError) as caught:
        start(model, output_dir="file")
    said = str(caught.value)
    of_model = {"owner/none": "no route to the hub", NAME: "quantised"}.get(model, "there is no folder")
    for words in (of_model, "output_dir: ", other):
        assert words in said
    assert len(said.splitlines()) == len(set(said.splitlines()))
    assert not found.has_weights()


@pytest.mark.parametrize(("start", "other"), STARTS)
def test_weights_are_fetched_once_all_else_is_fine(start: Callable[..., None], other: str, found: Hub) -> None:
    start(NAME)
    assert found.has_weights()
    assert found.fetched.index("config.json") < found.fetched.index("model.safetensors")
    assert hub.folder_of(NAME) == found.cache


def test_a_download_that_was_interrupted_goes_on(found: Hub) -> None:
    (found.source / "model.safetensors").rename(found.source / "a.safetensors")
    shutil.copy(found.source / "a.safetensors", found.source / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (found.source / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.folder_of(NAME)
    (found.cache / "b.safetensors").unlink()
    hub.folder_of(NAME)
    assert (found.cache / "b.safetensors").is_file()


def test_settings_that_the_model_does_not_allow_are_told_together(found: Hub) -> None:
    found.change(model_type="mamba", max_position_embeddings=64)
    with pytest.raises(ConfigError) as caught:
        training.check_ahead(config_of(model={"path": NAME}))
    assert "not 'mamba'" in str(caught.value)
    assert "(128) is above what the model" in str(caught.value)
    assert not found.has_weights()
