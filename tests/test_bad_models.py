"""Models that cannot be trained: one sentence with what to do, alike from dry runs, `models check` and the trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_folders import write_hub_folder
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.launch.preflight.model_folder import check_model, check_trainable
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.data.batch import BatchError, check_ids
from primerl.train.data.datasets import check_vocabulary
from primerl.train.model.packed_model import ModelError, load_model, model_shape
from primerl.train.model.proof import prove
from primerl.train.settings import ConfigError as SettingError

OWN_CONFIG = """
from transformers import Qwen3Config
class OwnConfig(Qwen3Config):
    model_type = "my_own"
"""
OWN_MODEL = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "m", TinyConfig(), seed=0)
    return tmp_path / "m"


def change(folder: Path, name: str = "config.json", **facts: Any) -> None:
    content = json.loads((folder / name).read_text()) | facts
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def own_code(folder: Path) -> None:
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder, model_type="my_own", architectures=["OwnForCausalLM"], auto_map=code)
    (folder / "configuration_own.py").write_text(OWN_CONFIG)
    (folder / "modeling_own.py").write_text(OWN_MODEL)


UNKNOWN = r"transformers \S+ has no models of type 'qwen9'; correct model_type in config.json, or install"
QUANTISED = r"weights .*are quantised \(fp8: .*\), which cannot be trained; give the model in bfloat16 or float32"
CODE = r"no models of type 'my_own'.*\(auto_map\).*read that code, and then set model.trust_remote_code = true"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown type": (lambda folder: change(folder, model_type="qwen9"), UNKNOWN),
    "no type": (lambda folder: change(folder, model_type=None), "its config.json has no model_type; fetch"),
    "quantised": (lambda folder: change(folder, quantization_config={"quant_method": "fp8"}), QUANTISED),
    "code": (own_code, CODE),
    "negative": (lambda folder: change(folder, hidden_size=-64), r"has hidden_size = -64, which has to be a whole"),
    "no layers": (lambda folder: change(folder, num_hidden_layers=0), r"has num_hidden_layers = 0, which has to be"),
    "half a head": (lambda folder: change(folder, num_attention_heads=2.5), r"has num_attention_heads = 2\.5, which"),
    "layers without end": (
        lambda folder: change(folder, num_hidden_layers=10**9),
        r"has num_hidden_layers = 1000000000, which has to be a whole number of at least 1 and at most 10,000; fetch",
    ),
    "no keys": (lambda folder: change(folder, num_key_value_heads=0), r"has num_key_value_heads = 0, which has to be"),
    "list": (lambda folder: change(folder, hidden_size=[64]), r"has hidden_size = \[64\], which has to be a whole"),
    "text": (lambda folder: change(folder, vocab_size="264"), r'has vocab_size = "264", which has to be a whole'),
}


def check(folder: Path) -> None:
    check_model(folder)
    check_trainable(folder)


@pytest.mark.parametrize("name", BAD)
def test_what_config_json_says_is_refused_everywhere(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = BAD[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        check(folder)
    assert "\n" not in str(refused.value)
    for load in (load_model, model_shape):
        with pytest.raises(ModelError, match=words) as refused_by_trainer:
            load(folder)
        assert "\n" not in str(refused_by_trainer.value)
    assert main(["models", "check", str(folder), "--json"]) == 1
    assert re.search(words, json.loads(capsys.readouterr().out)["training"])


def test_code_of_the_model_is_run_if_asked_for(folder: Path) -> None:
    own_code(folder)
    check_trainable(folder, trusted=True)
    model = load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    prove(model)


def test_code_that_is_not_needed_is_not_run(folder: Path) -> None:
    """Folders of types that transformers knows may hold older code too."""
    change(folder, auto_map={"AutoConfig": "missing.Config", "AutoModelForCausalLM": "missing.Model"})
    check_trainable(folder)
    assert type(load_model(folder)).__name__ == "Qwen3ForCausalLM"


def vocabulary(folder: Path, **facts: Any) -> None:
    """Changes the tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= facts.pop("words", {})
    (folder / "tokenizer.json").write_text(json.dumps(content | facts))


def test_an_embedding_of_another_size(folder: Path) -> None:
    """Alike in preflight and in the trainer."""
    change(folder, vocab_size=300)
    words = r"embed_tokens.weight has shape \[264, 64\], config.json implies \[300, 64\]; give weights and a config"
    with pytest.raises(ConfigError, match=words):
        check_model(folder)
    with pytest.raises(ModelError, match=words):
        load_model(folder)


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = (folder / "tokenizer.json").read_text()
    vocabulary(folder, words={"far": 999})
    larger = r"has token ids up to 999, but config.json says vocab_size 264; give a tokenizer and a model that belong"
    with pytest.raises(ConfigError, match=larger):
        check_model(folder)
    # One that is smaller gives itself away by what ends an answer.
    (folder / "tokenizer.json").write_text(tokenizer)
    word = json.loads(tokenizer)["model"]["vocab"]["a"]
    change(folder, "generation_config.json", eos_token_id=word)
    change(folder, eos_token_id=word)
    with pytest.raises(ConfigError, match=rf"says that token {word} ends an answer, which .*tokenizer.json has as 'a'"):
        check_model(folder)
    change(folder, "generation_config.json", eos_token_id=263)
    change(folder, eos_token_id=[263])
    with pytest.raises(ConfigError, match=r"263 ends an answer, which .* does not have; give a tokenizer and a model"):
        check_model(folder)


def test_a_whole_model_is_checked_by_its_text_part(tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "q", "Qwen3.5-0.8B")
    change(folder, eos_token_id=256)
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"eos_token_id": 256}
    change(folder, text_config=text)
    check(folder)
    change(folder, text_config=text | {"vocab_size": 100})
    with pytest.raises(ConfigError, match=r"has token ids up to .*, but config.json says vocab_size 100"):
        check_model(folder)
    change(folder, text_config=text | {"vocab_size": 300})
    with pytest.raises(ConfigError, match=r"embed_tokens.weight has shape \[264, 64\], config.json implies \[300"):
        check_model(folder)


def test_a_token_behind_the_embedding() -> None:
    """The trainer process by itself: in a batch of an orchestrator, and in rows."""
    micro_batch: Any = SimpleNamespace(token_ids=torch.tensor([3, 263, 7], dtype=torch.int32))
    check_ids(micro_batch, 264)
    with pytest.raises(BatchError, match="token 263 is outside the model's embedding, which has 263 rows: engines"):
        check_ids(micro_batch, 263)
    rows: Any = SimpleNamespace(largest_id=263)
    check_vocabulary(rows, 264)
    words = r"gives token ids up to 263 in these rows, .* has 263 rows; give a tokenizer and a model that belong"
    with pytest.raises(SettingError, match=words):
        check_vocabulary(rows, 263)
