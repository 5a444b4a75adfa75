"""vLLM with adapters: each version under a name of its own, checked before it is loaded and proved after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
from engine_helpers import (
    GENERATE,
    PROMPT,
    Engine,
    need_vllm,
    request,
    running,
    start_together,
    vllm_command,
)
from primerl.train.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE
from primerl.train.adapters.lora import BROADCAST_FILE, AdapterPublisher, add_adapter
from primerl.train.model.packed_model import load_model
from primerl.train.settings import LoraConfig
from safetensors.torch import load_file, save_file
from settings_helpers import filled
from train_helpers import randomise
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.vllm

# Not a rank that vLLM can be started for, and an alpha and a scale that no number format has exactly.
RANK, ALPHA, ADAPTERS = 6, 12.8, 3


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    need_vllm()
    folder = tmp_path_factory.mktemp("engine")
    lora = f'[lora]\nrank = {RANK}\ntarget_modules = ["all-linear"]\nmax_adapters = {ADAPTERS}'
    with running("vllm", vllm_command(model, folder, lora), model, folder / "log") as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    shared.calm()
    for name in adapters(shared):
        shared.post("/v1/unload_lora_adapter", {"lora_name": name})
    rpc(shared, "primerl_keep_adapters", [])


def published(model: Path, output: Path, version: int, **changes: Any) -> Path:
    """The folder of a random adapter, another one for each version."""
    trained = load_model(model)
    config = filled(LoraConfig, **{"rank": RANK, "alpha": ALPHA, **changes})
    adapter = add_adapter(trained, config, model, seed=0)
    randomise(trained, seed=version)
    return AdapterPublisher(adapter, output, 9, True).publish(trained, version).parent


def load(engine: Engine, name: str, folder: Path) -> httpx.Response:
    return engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def rpc(engine: Engine, method: str, *arguments: Any) -> httpx.Response:
    return engine.post("/collective_rpc", {"method": method, "args": list(arguments)})


def digest(engine: Engine, name: str) -> dict[str, Any]:
    answer = rpc(engine, "primerl_adapter_digest", name)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["results"][0])


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text()))


def adapters(engine: Engine) -> list[str]:
    return [card["id"] for card in engine.client.get("/v1/models").json()["data"] if card["parent"]]


def answered(engine: Engine, name: str, **sampling: Any) -> dict[str, Any]:
    options = {"max_tokens": 20, "ignore_eos": True, "logprobs": 0, "seed": 1} | sampling
    answer = engine.post(GENERATE, {**request(**options), "model": name})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def is_of(answer: dict[str, Any], model: Path, folder: Path) -> bool:
    """Whether every token's log-probability is that of peft with this adapter."""
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    reference = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder).eval()
    with torch.no_grad():
        rows = reference(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return bool((found - expected).abs().max() <= 1e-4)


def test_each_version_is_loaded_under_a_name_of_its_own(engine: Engine, model: Path, tmp_path: Path) -> None:
    assert rpc(engine, "primerl_weight_digest").json()["results"][0]["adapters"] == ADAPTERS
    first, second = (published(model, tmp_path, version) for version in (0, 1))
    for name, folder in (("m@0", first), ("m@1", second)):
        assert load(engine, name, folder).status_code == 200
        found = digest(engine, name)
        assert found["digest"] == manifest(folder)["digest"]
        # All that it is made of, where it is computed with.
        assert found["compared"] == len(load_file(folder / ADAPTER_FILE))
    assert adapters(engine) == ["m@0", "m@1"]
    one, other = answered(engine, "m@0"), answered(engine, "m@1")
    assert (one["model"], other["model"]) == ("m@0", "m@1")
    assert is_of(one, model, first)
    assert is_of(other, model, second)
    assert not is_of(other, model, first)
    assert one["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]
    (base,) = answered(engine, "m")["choices"]
    assert base["logprobs"] != one["choices"][0]["logprobs"]


def test_a_request_stays_with_its_adapter_and_the_next_has_the_new_one(
    engine: Engine, model: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    first, second = (published(model, tmp_path, version) for version in (2, 3))
    assert load(engine, "m@2", first).status_code == 200
    asked = [partial(answered, engine, "m@2", max_tokens=900, seed=seed) for seed in range(4)]
    long = start_together(engine, pool, asked)
    assert load(engine, "m@3", second).status_code == 200
    assert digest(engine, "m@3")["digest"] == manifest(second)["digest"]
    after = answered(engine, "m@3")
    # As the probe does; with room for an adapter in the output layer vLLM would die of it.
    scored = answered(engine, "m@3", prompt_logprobs=0, max_tokens=1)
    assert len(scored["prompt_logprobs"]) == len(PROMPT)
    assert engine.running() == 4, "those before it go on beside it"
    # Nobody gets the old one any more; those that have it keep it.
    assert engine.post("/v1/unload_lora_adapter", {"lora_name": "m@2"}).status_code == 200
    refused = engine.post(GENERATE, {**request(max_tokens=1), "model": "m@2"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
    assert is_of(after, model, second)
    assert all(is_of(answer.result(), model, first) for answer in long)
    assert rpc(engine, "primerl_keep_adapters", ["m@3"]).json()["results"] == [{"removed": ["m@2"]}]
    gone = rpc(engine, "primerl_adapter_digest", "m@2")
    assert gone.status_code == 500
    assert "no adapter 'm@2' is held" in gone.text
    assert digest(engine, "m@3")["digest"] == manifest(second)["digest"]


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    tensors.popitem()
    save_file(tensors, folder / ADAPTER_FILE)
    said = manifest(folder)
    for entry in said["files"]:
        entry["bytes"] = (folder / entry["name"]).stat().st_size
    (folder / "manifest.json").write_text(json.dumps(said))


def set_in_config(folder: Path, **values: Any) -> None:
    file = folder / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


FAULTS = {
    "no folder": (shutil.rmtree, "cannot read"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "cannot read"),
    "flipped bit": (lambda folder: flip(folder / ADAPTER_FILE), "their bytes are not those of the manifest"),
    "other scale": (lambda folder: flip(folder / BROADCAST_FILE), "their bytes are not those of the manifest"),
    "cut short": (lambda folder: (folder / ADAPTER_FILE).write_bytes(b"12345678"), "is not a whole safetensors file"),
    "missing tensor": (without_a_tensor, "the files hold other tensors than the manifest lists"),
    "dora": (lambda folder: set_in_config(folder, use_dora=True), "use_dora is True, which is not supported"),
    "rslora": (lambda folder: set_in_config(folder, use_rslora=True), "use_rslora is True, which is not supported"),
    "alpha": (lambda folder: set_in_config(folder, lora_alpha=3), "has lora_alpha = 3"),
    "saved": (lambda folder: set_in_config(folder, modules_to_save=["lm_head"]), "modules_to_save is"),
}


def test_bad_adapters_are_named_and_the_old_one_goes_on(engine: Engine, model: Path, tmp_path: Path) -> None:
    good = published(model, tmp_path, 4)
    assert load(engine, "m@4", good).status_code == 200
    before = answered(engine, "m@4")
    bad: list[tuple[str, Path, str]] = []
    for kind, (spoil, words) in FAULTS.items():
        folder = shutil.copytree(good, tmp_path / kind)
        spoil(folder)  # type: ignore[operator]
        bad.append((kind, folder, words))
    of_few = published(model, tmp_path / "few", 5, target_modules=["q_proj"])
    bad.append(("few layers", of_few, "equal those of an adapter of rank 6 of the model that is served"))
    of_rank = published(model, tmp_path / "rank", 5, rank=4)
    bad.append(("wrong rank", of_rank, "equal those of an adapter of rank 6 of the model that is served"))
    base = load_file(model / "model.safetensors")
    other = shutil.copytree(model, tmp_path / "other")
    save_file({name: tensor + 1e-3 for name, tensor in base.items()}, other / "model.safetensors", {"format": "pt"})
    bad.append(("other base model", published(other, tmp_path / "based", 5), "is an adapter of another base model"))
    for kind, folder, words in bad:
        answer = load(engine, "m@5", folder)
        assert (kind, answer.status_code) == (kind, 500)
        assert words in answer.json()["error"]["message"], kind
        assert engine.post(GENERATE, {**request(max_tokens=1), "model": "m@5"}).status_code == 404
    assert adapters(engine) == ["m@4"]
    assert digest(engine, "m@4")["digest"] == manifest(good)["digest"]
    assert answered(engine, "m@4")["choices"] == before["choices"]


def test_a_name_stands_for_one_adapter(engine: Engine, model: Path, tmp_path: Path) -> None:
    """Read again, its folder has to be what was proved under that name."""
    first, other = (published(model, tmp_path, version) for version in (4, 5))
    for folder, status in ((first, 200), (other, 500), (first, 200)):
        answer = load(engine, "m@4", folder)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert digest(engine, "m@4")["digest"] == manifest(first)["digest"]
            assert engine.post("/v1/unload_lora_adapter", {"lora_name": "m@4"}).status_code == 200
        else:
            assert "adapter 'm@4' was loaded with digest" in answer.json()["error"]["message"]


def test_whole_weights_are_refused(engine: Engine, model: Path, tmp_path: Path) -> None:
    folder = published(model, tmp_path, 6)
    assert engine.post("/start_weight_update").status_code == 200
    answer = engine.post("/update_weights", {"update_info": {"path": str(folder)}})
    assert answer.status_code == 500
    assert "this engine was started for adapters" in answer.json()["error"]["message"]
    assert load(engine, "m@6", folder).status_code == 200
    assert is_of(answered(engine, "m@6"), model, folder)


def test_what_is_held_otherwise_is_found(engine: Engine, model: Path, tmp_path: Path) -> None:
    """More adapters than there is room for: the first is not held any more, and the proof says so."""
    names = []
    for version in range(7, 7 + 2 * ADAPTERS + 1):
        assert load(engine, f"m@{version}", published(model, tmp_path, version)).status_code == 200
        names.append(f"m@{version}")
    assert "is held" in rpc(engine, "primerl_adapter_digest", names[0]).text
    # Of those in memory, only some are where they are computed with.
    assert [digest(engine, name)["compared"] > 0 for name in names[1:]] == [False] * ADAPTERS + [True] * ADAPTERS
