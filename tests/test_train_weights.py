"""Published weights and checkpoints: read back by independent means."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from primerl.models.tiny import write_model
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.model.packed_model import load_model
from primerl.train.weights import publish
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import FILE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, seed=3)
    return path


def raw_tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """A safetensors file by its specification: header length, JSON header, bytes."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = content[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_manifest_recomputed_from_the_file(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    path = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(model, 7)
    assert path == tmp_path / "broadcasts" / "step_7" / "manifest.json"
    manifest = json.loads(path.read_text())
    file = path.parent / "model.safetensors"
    raw = raw_tensors(file)
    lines = ""
    expected = []
    for name in sorted(raw):
        kind, shape, data = raw[name]
        xxh3 = f"{xxhash.xxh3_64_intdigest(data):016x}"
        lines += f"{name} {kind} {'x'.join(str(size) for size in shape)} {xxh3}\n"
        expected.append({"name": name, "dtype": kind, "shape": shape, "file": "model.safetensors", "xxh3": xxh3})
    assert manifest == {
        "format": 1,
        "policy_version": 7,
        "digest": xxhash.xxh3_128(lines.encode()).hexdigest(),
        "files": [{"name": "model.safetensors", "bytes": file.stat().st_size}],
        "tensors": expected,
    }
    assert {entry["dtype"] for entry in expected} == {"F32" if dtype == torch.float32 else "BF16"}
    assert (tmp_path / "broadcasts" / "LATEST").read_text() == "step_7"


def small_models() -> list[Any]:
    torch.manual_seed(0)
    return [
        LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
        LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
        # Its experts are one fused tensor in memory and many in a checkpoint.
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
        ),
    ]


@pytest.mark.parametrize("index", range(3), ids=["untied", "tied", "experts"])
def test_names_and_values_are_those_of_a_checkpoint(tmp_path: Path, index: int) -> None:
    model = small_models()[index]
    model.save_pretrained(tmp_path / "saved")
    path = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(model, 0)
    saved, published = load_file(tmp_path / "saved" / "model.safetensors"), load_file(path.parent / "model.safetensors")
    assert sorted(published) == sorted(saved)
    assert all(torch.equal(published[name], saved[name]) for name in saved)


def test_retention(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, keep_all, kept in (("few", False, {2, 3}), ("all", True, {0, 1, 2, 3})):
        publisher = WeightsPublisher(tmp_path / name, keep_last=2, keep_all=keep_all)
        for version in range(4):
            publisher.publish(model, version)
        found = {path.name for path in (tmp_path / name / "broadcasts").iterdir()}
        assert found == {"LATEST", *(f"step_{version}" for version in kept)}


def test_a_failed_publication_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    publisher = WeightsPublisher(tmp_path, keep_last=2, keep_all=False)
    publisher.publish(model, 0)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publish, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        publisher.publish(model, 1)
    assert sorted(path.name for path in (tmp_path / "broadcasts").iterdir()) == ["LATEST", "step_0"]
    assert (tmp_path / "broadcasts" / "LATEST").read_text() == "step_0"


def test_a_version_that_is_computed_again_is_left_alone_unless_it_differs(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    publisher = WeightsPublisher(tmp_path, keep_last=2, keep_all=False)
    manifest = publisher.publish(model, 0)
    written = manifest.stat().st_ino, (manifest.parent / FILE).stat().st_ino
    assert publisher.publish(model, 0) == manifest
    assert (manifest.stat().st_ino, (manifest.parent / FILE).stat().st_ino) == written
    digest = json.loads(manifest.read_text())["digest"]
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    publisher.publish(model, 0)
    assert json.loads(manifest.read_text())["digest"] != digest
    assert [path.name for path in (tmp_path / "broadcasts").iterdir() if path.is_dir()] == ["step_0"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "manifest emptied", "manifest gone"])
def test_a_version_that_was_damaged_is_written_anew(folder: Path, tmp_path: Path, damage: str) -> None:
    """Engines would refuse it at every start, and a trainer that goes on publishes it again."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    publisher = WeightsPublisher(tmp_path, keep_last=2, keep_all=False)
    manifest = publisher.publish(model, 0)
    file = manifest.parent / FILE
    whole, told = file.read_bytes(), manifest.read_text()
    if damage == "flipped":
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest emptied":
        manifest.write_text("")
    else:
        manifest.unlink()
    assert publisher.publish(model, 0) == manifest
    assert (file.read_bytes(), manifest.read_text()) == (whole, told)
    assert [path.name for path in (tmp_path / "broadcasts").iterdir() if path.is_dir()] == ["step_0"]


def test_checkpoint_loads_with_equal_logits_and_text_files(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    target = save_model(model, folder, tmp_path, 5)
    assert target == tmp_path / "weights" / "step_5"
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    token_ids = torch.arange(40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=token_ids).logits, model(input_ids=token_ids).logits)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step_5"]


def test_a_manifest_says_what_the_model_computes_of_a_few_tokens(folder: Path, tmp_path: Path) -> None:
    """As transformers does, one token after the other; and the same weights stay where only that is new."""
    model = load_model(folder)
    publisher = WeightsPublisher(tmp_path, 4, False, probes=True)
    path = publisher.publish(model, 1)
    probe = json.loads(path.read_text())["probe"]
    ids, logprobs = torch.tensor([probe["token_ids"]]), torch.tensor(probe["logprobs"])
    assert len(logprobs) == ids.shape[1] == 16
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs[1:], expected, atol=1e-5, rtol=1e-5)
    assert logprobs[0] == 0.0
    weights = path.parent / "model.safetensors"
    before = weights.stat().st_ino
    without = WeightsPublisher(tmp_path, 4, False).publish(model, 1)
    assert "probe" not in json.loads(without.read_text())
    assert weights.stat().st_ino == before
