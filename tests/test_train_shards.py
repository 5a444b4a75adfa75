"""Whole weights divided into files and among ranks: all together they are the checkpoint, and no rank has all."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hub_folders import write_hub_folder
from primerl.inference.torch.model import Decoder, load_folder
from primerl.inference.torch.shape import Shape
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.distributed.rank_barrier import RankBarrier
from primerl.train.distributed.ranks import ALONE, RankError, Ranks
from primerl.train.model.packed_model import load_model
from primerl.train.settings import TrainerConfig
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import by_file, own_tensors, plan, shares
from rank_helpers import load_shards
from settings_helpers import refusal
from test_train_config import TRAINER
from test_train_weights import small_models
from transfer_helpers import all_do, senders
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, TinyConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3), seed=3)
    return path


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_plan_is_even_and_complete(ranks: int) -> None:
    """Of a model of 8 billion parameters, without its weights."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, intermediate_size=14336, vocab_size=128_256))
    own, most = own_tensors(model), 3_000_000_000
    shards = plan(model, Ranks(0, ranks, torch.device("cpu")), most, torch.bfloat16)
    names = [name for shard in shards for group in shard.groups for name in group]
    assert sorted(names) == sorted(own)
    sizes = {shard.file: sum(2 * own[name].numel() for group in shard.groups for name in group) for shard in shards}
    assert max(sizes.values()) <= most
    assert [shard.file for shard in shards] == sorted(sizes)
    assert list(sizes)[-1] == f"model-{len(shards):05d}-of-{len(shards):05d}.safetensors"
    loads = [sum(sizes[shard.file] for shard in shards if shard.rank == rank) for rank in range(ranks)]
    largest = 2 * own["model.embed_tokens.weight"].numel()
    assert max(loads) - min(loads) <= largest
    assert {shard.rank for shard in shards} == set(range(ranks))
    layers = [{name.split(".")[2] for name in group if ".layers." in name} for s in shards for group in s.groups]
    assert all(len(numbers) <= 1 for numbers in layers)


@pytest.mark.parametrize("index", range(3), ids=["untied", "tied", "experts"])
def test_files_of_a_largest_size(tmp_path: Path, index: int) -> None:
    """Published and saved: together what transformers saves; the index is as its own, and it loads them."""
    model = small_models()[index]
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=12_000)
    (tmp_path / "source").mkdir()
    saved = save_model(model, tmp_path / "source", tmp_path, 3, max_shard_bytes=12_000)
    path = WeightsPublisher(tmp_path, keep_last=2, keep_all=False, max_shard_bytes=12_000).publish(model, 0)
    manifest = json.loads(path.read_text())
    assert len(manifest["files"]) > 2
    expected = load_shards(tmp_path / "whole")
    for written in (saved, path.parent):
        found = load_shards(written)
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {entry["name"]: entry["file"] for entry in manifest["tensors"]} == index_of(saved)["weight_map"]
    assert index_of(saved)["metadata"] == index_of(tmp_path / "theirs")["metadata"]
    assert sorted(index_of(saved)["weight_map"]) == sorted(index_of(tmp_path / "theirs")["weight_map"])
    for name in ("config.json", "generation_config.json"):
        assert (saved / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    loaded, ids = AutoModelForCausalLM.from_pretrained(saved), torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def index_of(folder: Path) -> Any:
    return json.loads((folder / "model.safetensors.index.json").read_text())


def test_the_embedded_engine_loads_several_files(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    saved = save_model(model, folder, tmp_path, 1, max_shard_bytes=40_000)
    assert len(list(saved.glob("*.safetensors"))) > 2
    decoders = []
    for path in (folder, saved):
        decoders.append(Decoder(Shape.read(path), dtype=torch.float32, slots=1, max_len=8))
        load_folder(decoders[-1], path)
    one, other = (decoder.tensors for decoder in decoders)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_engines_load_may_have_another_dtype(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in own_tensors(model).items()}
    publisher = WeightsPublisher(tmp_path, 2, False, dtype=torch.bfloat16)
    found = load_shards(publisher.publish(model, 0).parent)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    # Never more than it computes with.
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = load_shards(WeightsPublisher(tmp_path, 2, False, dtype=torch.float32).publish(half, 1).parent)
    assert all(torch.equal(found[name], expected[name].float()) for name in expected)


def test_settings_that_do_not_fit() -> None:
    for weights, message in [
        ({"dtype": "float16"}, "weights.dtype: Input should be 'float32' or 'bfloat16' (it is 'float16')"),
        ({"max_shard_bytes": 0}, "weights.max_shard_bytes: Input should be greater than 0 (it is 0)"),
        ({"transport": "nccl"}, "weights.transport: Input should be 'files' or 'collective' (it is 'nccl')"),
    ]:
        assert message in refusal(TrainerConfig, {**TRAINER, "weights": weights})
    model = {"path": "m", "lora": {"broadcast": "adapter"}}
    given = {**TRAINER, "model": model, "weights": {"dtype": "bfloat16"}}
    assert "adapters are published in float32" in refusal(TrainerConfig, given)


def test_a_model_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(OSError, match=str(tmp_path / "weights")):
        save_model(AutoModelForCausalLM.from_pretrained(folder), folder, tmp_path, 1)


@pytest.mark.processes
def test_each_rank_keeps_and_writes_its_share(folder: Path, tmp_path: Path) -> None:
    """Bytes of memory that a rank's copies hold on to, counted by the ranks themselves."""
    with senders(folder, tmp_path, ranks=3) as told:
        (manifest, *_) = all_do(told, {"version": 0})
        kept = all_do(told, {"kept": True})
        written = {entry["name"]: entry["bytes"] for entry in json.loads(Path(manifest).read_text())["files"]}
        whole = load_shards(Path(manifest).parent)
        total = sum(tensor.nbytes for tensor in whole.values())
        # Rows that the ranks cannot divide evenly are gathered with some more.
        assert total <= sum(kept) <= 1.05 * total
        assert max(kept) <= 0.5 * total
        assert len(written) == 3
        # The disk is full for one of them: all say so, and what was there stays.
        all_do(told[2:3], {"disk": "full"})
        failed = all_do(told, {"version": 1})
        assert failed[2] == ["OSError", "[Errno 28] No space left on device"]
        reason = "rank 2 could not write its share of the weights: OSError: [Errno 28] No space left on device"
        assert [failed[rank] for rank in (0, 1)] == [["RankError", reason]] * 2
    assert sorted(path.name for path in (tmp_path / "broadcasts").iterdir()) == [".secret", "LATEST", "step_0"]
    expected = own_tensors(AutoModelForCausalLM.from_pretrained(folder))
    assert all(torch.equal(whole[name], expected[name]) for name in expected)


@pytest.mark.processes
def test_a_rank_that_does_not_write_is_named_in_time(folder: Path, tmp_path: Path) -> None:
    with senders(folder, tmp_path, ranks=2) as told:
        all_do(told, {"version": 0})
        all_do(told, {"patience_s": 1.0})
        all_do(told[1:], {"disk": "hangs"})
        for sender in told:
            sender.tell({"version": 1})
        kind, message = told[0].answer()
        assert kind == "RankError"
        assert message.startswith("rank 1 is gone or hangs")
        assert message.endswith("; it did not write its share of the weights within 1 s")
    assert not (tmp_path / "broadcasts" / "step_1").exists()


def test_who_leaves_stops_waiting_for_others() -> None:
    """A thread that went on within torch would abort the process at its end."""
    ranks = Ranks(0, 2, torch.device("cpu"), store=torch.distributed.HashStore())  # type: ignore[attr-defined]
    barrier, began = RankBarrier(ranks, "broadcasts"), threading.Event()
    with ThreadPoolExecutor() as beside:
        waiting = beside.submit(barrier.each, began.set, "wait")
        assert began.wait(20)
        assert not waiting.done()
        barrier.leave()
        with pytest.raises(RankError, match="this rank has left"):
            waiting.result(20)


def test_the_whole_model_is_one_share_alone(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (shard,) = plan(model, ALONE)
    assert shard.file == "model.safetensors"


def test_an_adapter_outside_of_layers_is_with_its_weight(tmp_path: Path) -> None:
    """Each group is merged by itself."""
    model = load_model(write_hub_folder(tmp_path / "model", "Qwen3-VL-4B-Instruct"))
    outside = "model.visual.merger.linear_fc1"
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=[outside], init_lora_weights=False), torch.nn.ModuleDict({"whole": model})
    )
    groups = [group for shard in plan(model, ALONE) for group in shard.groups]
    (group,) = (group for group in groups if f"{outside}.lora_A.default.weight" in group)
    assert f"{outside}.base_layer.weight" in group
    assert f"{outside}.weight" in next(iter(by_file(shares(model, ALONE, plan(model, ALONE))).values()))
