"""What the trainer does not load of a folder (vision towers, MTP layers): named frozen in manifests, proved by vLLM's
side once, and copied into saved folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import MTP, write_hub_folder
from primerl.inference.vllm.checkpoint import CheckpointError, Frozen, read, tensors_of
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.model.packed_model import load_model, model_shape
from primerl.train.weights.frozen import frozen_of
from primerl.train.weights.names import published
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import own_tensors
from safetensors.torch import load_file, save_file

TIED = {"GLM-4.7": False, "Qwen3.5-0.8B": True}


@pytest.fixture(scope="module", params=list(TIED))
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_hub_folder(tmp_path_factory.mktemp("hub") / request.param, request.param)


def trained(folder: Path) -> Any:
    """The model with every weight changed."""
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return model


def all_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_an_engine_that_holds_them_is_sent_the_rest(hub: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = hub
    own = tensors_of(folder, tied=TIED[name])
    expected = {key: tuple(tensor.shape) for key, tensor in own.items()}
    manifest = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(trained(folder), 1)
    listed = {entry["name"] for entry in json.loads(manifest.read_text())["frozen"]}
    assert {*MTP[name]} <= listed
    assert any("visual" in key for key in listed) == (name == "Qwen3.5-0.8B")

    frozen = Frozen(own)
    loaded = dict(read(manifest.parent, expected, frozen=frozen).tensors)
    assert frozen.tensors.keys() == listed
    assert loaded.keys() | listed == own.keys()
    # What is trained came from the trainer, not from the folder.
    key = next(key for key in loaded if key.endswith("embed_tokens.weight"))
    torch.testing.assert_close(loaded[key], own[key].float() + 0.5)


def test_an_engine_with_another_tower_is_refused(hub: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = hub
    own = tensors_of(folder, tied=TIED[name])
    expected = {key: tuple(tensor.shape) for key, tensor in own.items()}
    manifest = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(load_model(folder), 0)
    other = dict(own)
    other[MTP[name][0]] = own[MTP[name][0]] + 1
    with pytest.raises(CheckpointError, match=f"in 1 tensors.*{MTP[name][0]}.*they are frozen"):
        read(manifest.parent, expected, frozen=Frozen(other))
    del other[MTP[name][0]]
    with pytest.raises(CheckpointError, match="they are frozen"):
        read(manifest.parent, expected, frozen=Frozen(other))
    # A manifest of before does not name them.
    contents = json.loads(manifest.read_text())
    del contents["frozen"]
    manifest.write_text(json.dumps(contents))
    with pytest.raises(CheckpointError, match="names and shapes must equal"):
        read(manifest.parent, expected, frozen=Frozen(own))


@pytest.mark.parametrize("most", [5_000_000_000, 100_000])
def test_a_saved_folder_is_whole(hub: tuple[str, Path], tmp_path: Path, most: int) -> None:
    _, folder = hub
    base = all_of(folder)
    model = trained(folder)
    saved = save_model(model, folder, tmp_path, 3, max_shard_bytes=most)
    found = all_of(saved)
    names = set(frozen_of(model).names)  # type: ignore[union-attr]
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], base[name]) for name in names)
    changed = [name for name in found.keys() - names if name.endswith("weight")]
    assert all(not torch.equal(found[name], base[name]) for name in changed)
    config, given = (json.loads((path / "config.json").read_text()) for path in (saved, folder))
    assert (config["model_type"], config["architectures"]) == (given["model_type"], given["architectures"])
    assert config["dtype"] == "float32"
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*index.values()} == {file.name for file in saved.glob("*.safetensors")}
    # It is a folder to train from like the first one, and transformers loads it.
    again = load_model(saved)
    assert frozen_of(again).names == frozen_of(model).names  # type: ignore[union-attr]
    assert all(torch.equal(one, model.state_dict()[key]) for key, one in again.state_dict().items())


def test_all_ranks_name_tensors_alike(hub: tuple[str, Path]) -> None:
    """Only the leading rank loads the files."""
    _, folder = hub
    loaded, made = (
        sorted(published(model, {name: tensor.to("meta") for name, tensor in own_tensors(model).items()}))
        for model in (load_model(folder), model_shape(folder))
    )
    assert loaded == made


def test_a_model_that_is_loaded_whole_has_nothing_frozen(tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "vl", "Qwen3-VL-4B-Instruct")
    model = load_model(folder)
    assert frozen_of(model) is None
    manifest = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(model, 0)
    assert "frozen" not in json.loads(manifest.read_text())
    own = tensors_of(folder, tied=True)
    read(manifest.parent, {name: tuple(tensor.shape) for name, tensor in own.items()})
    saved = save_model(model, folder, tmp_path, 1)
    assert all_of(saved).keys() == all_of(folder).keys()


def test_weights_in_another_layout_are_not_taken_for_frozen(tmp_path: Path) -> None:
    """Mistral's folders hold `consolidated.safetensors` too."""
    folder = write_hub_folder(tmp_path / "m", "Qwen3-4B-Instruct-2507")
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert frozen_of(load_model(folder)) is None
