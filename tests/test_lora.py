"""Low-rank adapters: what is trained, what is merged, what is saved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hub_folders import write_hub_folder
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.adapters.files import (
    ADAPTER_CONFIG,
    LORA_ALPHA,
    adapter_shapes,
    check_lora_files,
    folder_digest,
    published_scale,
)
from primerl.train.adapters.lora import BROADCAST_FILE, Adapter, AdapterPublisher, add_adapter, check_facts
from primerl.train.adapters.merging import merged_state, plain_name
from primerl.train.checkpoint import staging
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.checkpoint.state import Checkpoints, TrainerState, training_tensors
from primerl.train.distributed.ranks import ALONE
from primerl.train.model.flops import ModelShape
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import PackedSequences, load_model, predicted_logits
from primerl.train.optim import Optimizer
from primerl.train.settings import ConfigError, LoraConfig, OptimConfig, TrainerConfig
from primerl.train.sft_settings import SFTConfig
from primerl.train.weights.publish import WeightsPublisher
from primerl.train.weights.shards import plan, shares
from primerl.verify.reference import adapted_model
from safetensors.torch import load_file, save_file
from settings_helpers import filled, refusal
from test_train_weights import SMALL
from train_helpers import randomise
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

LENGTHS = (9, 4)


def adapted(folder: Path, dtype: str = "float32", **lora: Any) -> tuple[Any, Adapter]:
    """A model whose adapter is as if it had been trained for long."""
    model = load_model(folder, dtype)
    adapter = add_adapter(model, filled(LoraConfig, **{"rank": 4, **lora}), folder, seed=0)
    randomise(model, seed=7)
    return model, adapter


def logits(model: Any) -> torch.Tensor:
    """Of two packed sequences, from the trainer's own forward pass."""
    token_ids = torch.arange(sum(LENGTHS)) + 5
    packed = PackedSequences.from_lengths(LENGTHS)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    with torch.no_grad():
        return predicted_logits(model, token_ids, packed, targets)


def plain_logits(model: Any) -> torch.Tensor:
    """The same from `transformers`, one sequence at a time."""
    parts, start = [], 5
    with torch.no_grad():
        for length in LENGTHS:
            parts.append(model(input_ids=torch.arange(start, start + length).unsqueeze(0)).logits[0, :-1])
            start += length
    return torch.cat(parts)


def test_only_the_adapter_is_trained_and_begins_as_nothing(folder: Path) -> None:
    before = load_model(folder)
    model = load_model(folder)
    adapter = add_adapter(model, filled(LoraConfig, rank=4, target_modules=["q_proj", "mlp.down_proj"]), folder, seed=0)
    assert torch.equal(logits(model), logits(before)), "B is zero at first"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".q_proj.lora_" in name or ".mlp.down_proj.lora_" in name for name in trained)
    names = {name.removesuffix(".weight").rsplit(".", 1)[0] for name in adapter.tensors()}
    assert "base_model.model.model.layers.1.mlp.down_proj" in names
    # The seed alone decides, whatever was drawn before.
    torch.rand(3)
    again = load_model(folder)
    other = add_adapter(again, filled(LoraConfig, rank=4, target_modules=["q_proj", "mlp.down_proj"]), folder, seed=0)
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in adapter.tensors().items())


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_base_and_adapter(tmp_path: Path, tied: bool) -> None:
    base = tmp_path / "base"
    write_model(base, TinyConfig(hidden_size=32, intermediate_size=48, tie_word_embeddings=tied), seed=4)
    model, adapter = adapted(base)
    trained = logits(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = save_model(model, base, tmp_path, 5, adapter=adapter)
    merged = AutoModelForCausalLM.from_pretrained(saved)
    assert (plain_logits(merged) - trained).abs().max() <= 1e-5
    assert (logits(load_model(base)) - trained).abs().max() > 0.1
    assert sorted(load_file(saved / "model.safetensors")) == sorted(load_file(base / "model.safetensors"))
    # By peft itself, from the base model and the adapter's folder.
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved / "lora_adapters")
    assert (plain_logits(loaded) - trained).abs().max() <= 1e-5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "nothing was merged"


def test_in_bfloat16_the_adapter_stays_in_fp32(folder: Path, tmp_path: Path) -> None:
    model, adapter = adapted(folder, "bfloat16")
    assert {tensor.dtype for tensor in adapter.tensors().values()} == {torch.float32}
    merged = AutoModelForCausalLM.from_pretrained(save_model(model, folder, tmp_path, 1))
    assert merged.dtype == torch.bfloat16
    assert (plain_logits(merged) - logits(model)).abs().max() < 0.2


@pytest.mark.parametrize("how", ["full", "selective"])
def test_gradients_with_activation_checkpointing(folder: Path, how: str) -> None:
    gradients = []
    for checkpointing in ("none", how):
        model, _ = adapted(folder)
        prepare(model, checkpointing, compile_layers=False)
        packed = PackedSequences.from_lengths(LENGTHS)
        targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
        predicted_logits(model, torch.arange(sum(LENGTHS)), packed, targets).logsumexp(1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def experts(folder: Path) -> Path:
    torch.manual_seed(0)
    shape = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **shape)).save_pretrained(folder / "experts")
    return folder / "experts"


def test_a_mixture_is_adapted_with_its_experts_and_without_its_router(tmp_path: Path) -> None:
    base = experts(tmp_path)
    model, _ = adapted(base)
    tensors = {name: tensor for _, name, tensor in shares(model, ALONE, plan(model, ALONE))}
    own = load_file(base / "model.safetensors")
    assert sorted(tensors) == sorted(own)
    changed = {name.split(".")[-2] for name, tensor in own.items() if not torch.equal(tensor, tensors[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "qwen3_5_moe_text", "nemotron_h", "kimi_linear"])
def test_an_adapter_is_of_all_linear_layers_and_of_experts_and_of_nothing_else(family: str, folders: Any) -> None:
    """Of shared experts too, and not of the kernels of convolutions."""
    base = folders(family)
    plain, model = load_model(base), load_model(base)
    add_adapter(model, filled(LoraConfig, rank=2), base, seed=0)
    linear = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    read_by_kernel = {name for name in linear if name.endswith("mixer.out_proj")}
    stacked = {name for name, _ in plain.named_modules() if name.endswith(".experts")}
    trained = {name.partition(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad}
    assert {plain_name(name) for name in trained} == linear - read_by_kernel - {"lm_head"} | stacked
    assert stacked
    assert bool(read_by_kernel) == (family == "nemotron_h")
    assert any("shared_expert" in name for name in trained)


def test_a_tower_for_images_gets_no_adapter(tmp_path: Path) -> None:
    model = load_model(write_hub_folder(tmp_path / "model", "Qwen3-VL-4B-Instruct"))
    adapter = add_adapter(model, filled(LoraConfig, rank=2), tmp_path / "model", seed=0)
    assert adapter.tensors()
    assert all(".language_model.layers." in name for name in adapter.tensors())


def test_the_matrix_that_a_kernel_reads_is_refused_before_the_start_and_by_the_trainer(folders: Any) -> None:
    base = folders("nemotron_h")
    config = filled(LoraConfig, rank=2, target_modules=["in_proj", "out_proj"])
    message = r"model\.lora\.target_modules: .*layers\.0\.mixer\.out_proj is the last matrix of a Mamba layer, whose"
    with pytest.raises(ConfigError, match=message):
        add_adapter(load_model(base), config, base, seed=0)
    with pytest.raises(ConfigError, match=message):
        check_lora_files(config, base, "model.lora.")
    # Others of that name can have one.
    add_adapter(load_model(folders("lfm2")), config, folders("lfm2"), seed=0)
    check_lora_files(config, folders("lfm2"), "model.lora.")


def test_engines_expect_an_adapter_where_the_trainer_has_one(folders: Any) -> None:
    shapes = {
        name: list(tensor.shape) for name, tensor in load_file(folders("falcon_h1") / "model.safetensors").items()
    }
    model = load_model(folders("falcon_h1"))
    adapter = add_adapter(model, filled(LoraConfig, rank=2), folders("falcon_h1"), seed=0)
    expected = adapter_shapes(shapes, 2, ["all-linear"])
    assert {name: tuple(tensor.shape) for name, tensor in adapter.tensors().items()} == expected


def test_layers_that_cannot_be_adapted_are_named(folder: Path, tmp_path: Path, folders: Any) -> None:
    mixture = experts(tmp_path)
    for base, target, message in [
        (folders("qwen3_5_text"), "conv1d", "layers.0.linear_attn.conv1d is a Conv1d, and no linear layer"),
        (folder, "q_prok", "no layer of the model is called 'q_prok'; there are down_proj, gate_proj, k_proj, o_proj"),
        (folder, "embed_tokens", "model.embed_tokens is the embedding or output layer"),
        (folder, "lm_head", "lm_head is the embedding or output layer"),
        (folder, "mlp", "layers.0.mlp is a Qwen3MLP, and no linear layer"),
        (mixture, "gate", "layers.0.mlp.gate is a Qwen3MoeTopKRouter, and no linear layer; there are k_proj, o_proj"),
        (
            folders("llama4_text"),
            "experts",
            "'experts' is a mixture's experts (model.layers.0.feed_forward.experts.gate",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            add_adapter(load_model(base), filled(LoraConfig, target_modules=["q_proj", target]), base, seed=0)
        assert str(caught.value).startswith("model.lora.target_modules: ")
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, "model.lora.rank: Input should be greater than 0 (it is 0)"),
        ({"alpha": 0}, "model.lora.alpha: Input should be greater than 0 (it is 0)"),
        ({"dropout": 1.0}, "model.lora.dropout: Input should be less than 1 (it is 1.0)"),
        ({"target_modules": []}, "model.lora.target_modules: List should have at least 1 item"),
        ({"target_modules": ["all-linear", "q_proj"]}, "target_modules: all-linear means every linear layer"),
        ({"lora_alpha": 3}, "model.lora.lora_alpha: unknown key; did you mean 'alpha'?"),
    ],
)
def test_settings_that_cannot_be(lora: dict[str, Any], message: str) -> None:
    trainer = {"output_dir": "o", "orchestrator_url": "u", "max_steps": 1, "model": {"path": "m", "lora": lora}}
    sft = {"output_dir": "o", "max_steps": 1, "model": {"path": "m", "lora": lora}, "data": {"path": "d"}}
    for kind, values in ((TrainerConfig, trainer), (SFTConfig, sft)):
        assert message in refusal(kind, values)


def test_dropout_and_a_missing_adapter_are_refused() -> None:
    trainer: dict[str, Any] = {"output_dir": "o", "orchestrator_url": "u", "max_steps": 1, "model": {"path": "m"}}
    dropped = refusal(TrainerConfig, {**trainer, "model": {"path": "m", "lora": {"dropout": 0.1}}})
    assert "the trainer's probabilities have to be the engine's" in dropped
    no_adapter = refusal(TrainerConfig, {**trainer, "ckpt": {"weights": {"save_adapter_separately": True}}})
    assert "there is no `model.lora`, so no adapter to save" in no_adapter


def test_a_warm_start_takes_the_adapter(folder: Path, tmp_path: Path) -> None:
    model, adapter = adapted(folder)
    adapter.save(tmp_path / "adapter")
    again = load_model(folder)
    add_adapter(again, filled(LoraConfig, rank=4, adapter_path=str(tmp_path / "adapter")), folder, seed=9)
    assert torch.equal(logits(again), logits(model))
    # One that peft has saved does not say which weights it was trained on.
    wrapped = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], init_lora_weights=False),
    )
    wrapped.save_pretrained(tmp_path / "foreign")
    own = load_model(folder)
    config = filled(LoraConfig, rank=2, alpha=3.0, target_modules=["v_proj"], adapter_path=str(tmp_path / "foreign"))
    add_adapter(own, config, folder, seed=0)
    assert (logits(own) - plain_logits(wrapped)).abs().max() <= 1e-5


def test_adapters_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    _, adapter = adapted(folder)
    path = tmp_path / "adapter"
    adapter.save(path)
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=4)

    def refusal(base: Path = folder, **lora: Any) -> str:
        config = filled(LoraConfig, **{"rank": 4, "adapter_path": str(path), **lora})
        with pytest.raises(ConfigError) as caught:
            add_adapter(load_model(base), config, base, seed=0)
        return str(caught.value)

    assert f"{path}/adapter_model.safetensors was trained on another base model" in refusal(other)
    assert f"model.lora.rank is 8, but {path}/adapter_config.json has r = 4" in refusal(rank=8)
    assert f"model.lora.alpha is 1, but {path}/adapter_config.json has lora_alpha = 32" in refusal(alpha=1.0)
    assert "does not fit: 24 tensors are missing, unknown or of another shape" in refusal(target_modules=["q_proj"])
    assert "there is no " in refusal(adapter_path=str(tmp_path / "absent"))
    saved = json.loads((path / "adapter_config.json").read_text())
    for change, message in [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all', which is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
    ]:
        (path / "adapter_config.json").write_text(json.dumps({**saved, **change}))
        assert message in refusal()
    (path / "adapter_config.json").write_text(json.dumps(saved))
    # Of the right names, but another shape, without a word on its base model.
    tensors = load_file(path / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(4, 7)}, path / "adapter_model.safetensors")
    assert f"does not fit: 1 tensors are missing, unknown or of another shape, e.g. {name}" in refusal()
    (path / "adapter_model.safetensors").write_bytes(b"12345678901234567890")
    assert "adapter_model.safetensors is not a whole safetensors file" in refusal()


def test_what_the_launcher_sees_without_torch(folder: Path, tmp_path: Path) -> None:
    check_lora_files(filled(LoraConfig), folder, "trainer.model.lora.")
    with pytest.raises(
        ConfigError, match=r"^trainer.model.lora.target_modules: no layer of the model in .* 'q'; there"
    ):
        check_lora_files(filled(LoraConfig, target_modules=["q"]), folder, "trainer.model.lora.")
    with pytest.raises(ConfigError, match=r"^model.lora.adapter_path: there is no .*adapter_config.json; give"):
        check_lora_files(filled(LoraConfig, adapter_path=str(tmp_path)), folder, "model.lora.")
    _, adapter = adapted(folder)
    adapter.save(tmp_path / "adapter")
    given = filled(LoraConfig, rank=4, adapter_path=str(tmp_path / "adapter"))
    check_lora_files(given, folder, "model.lora.")
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=4)
    with pytest.raises(ConfigError, match=r"^model.lora.adapter_path: .* was trained on another base model"):
        check_lora_files(given, other, "model.lora.")


def test_a_checkpoint_holds_the_adapter_only(folder: Path, tmp_path: Path) -> None:
    def optimizer_of(model: Any) -> Optimizer:
        return Optimizer(model.named_parameters(), filled(OptimConfig), 3)

    model, adapter = adapted(folder)
    optimizer, checkpoints = optimizer_of(model), Checkpoints(tmp_path, 1)
    state = TrainerState(2, 0, 0, optimizer.config.type, adapter=adapter.facts())
    checkpoints.save(state, model, optimizer)
    checkpoints.finish()
    names = [name for name in training_tensors(model, optimizer) if name.startswith("model.")]
    assert len(names) == len(adapter.tensors())
    fresh = load_model(folder)
    again = add_adapter(fresh, filled(LoraConfig, rank=4), folder, seed=1)
    read = checkpoints.load(2)
    check_facts(again, read.adapter)
    checkpoints.restore(read, fresh, optimizer_of(fresh))
    assert torch.equal(logits(fresh), logits(model))
    with pytest.raises(ValueError, match=r"it holds an adapter; set model\.lora as it was"):
        check_facts(None, read.adapter)
    with pytest.raises(ValueError, match="it holds whole weights"):
        check_facts(adapter, {})
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=4)
    for base, lora, message in [
        (folder, {"rank": 2}, "model.lora.rank differs"),
        (folder, {"rank": 4, "target_modules": ["q_proj"]}, "model.lora.target_modules differs"),
        (folder, {"rank": 4, "alpha": 8.0}, "model.lora.alpha differs"),
        (other, {"rank": 4}, "its base model has other weights"),
    ]:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is looked at)
            check_facts(add_adapter(load_model(base), filled(LoraConfig, **lora), base, seed=1), read.adapter)
        assert message in str(caught.value)


def test_the_digest_is_of_the_files(folder: Path, tmp_path: Path) -> None:
    """The manifest's digest of the same tensors, whatever files they are spread over."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    manifest = json.loads(WeightsPublisher(tmp_path, 2, False).publish(model, 0).read_text())
    assert folder_digest(folder) == manifest["digest"]
    torch.manual_seed(0)
    untied = LlamaForCausalLM(LlamaConfig(**SMALL))
    untied.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    untied.save_pretrained(tmp_path / "whole")
    assert folder_digest(tmp_path / "sharded") == folder_digest(tmp_path / "whole")


def test_merged_publication_is_a_whole_model(folder: Path, tmp_path: Path) -> None:
    model, _ = adapted(folder)
    path = WeightsPublisher(tmp_path, keep_last=2, keep_all=False).publish(model, 3)
    published = load_file(path.parent / "model.safetensors")
    assert sorted(published) == sorted(load_file(folder / "model.safetensors"))
    merged = merged_state(model)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in published.items())


def test_an_adapter_is_published_once(folder: Path, tmp_path: Path) -> None:
    model, adapter = adapted(folder)
    publisher = AdapterPublisher(adapter, tmp_path, keep_last=2, keep_all=False)
    path = publisher.publish(model, 1)
    written = path.stat().st_ino
    assert publisher.publish(model, 1).stat().st_ino == written
    manifest = json.loads(path.read_text())
    assert [file["name"] for file in manifest["files"]] == ["adapter_model.safetensors", "broadcast.safetensors"]
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).add_(0.5)
    publisher.publish(model, 1)
    assert json.loads(path.read_text())["digest"] != manifest["digest"]
    for version in (2, 3):
        publisher.publish(model, version)
    kept = {entry.name for entry in (tmp_path / "broadcasts").iterdir()}
    assert kept == {"LATEST", "step_2", "step_3"}
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path.parent.parent / "step_3")
    assert (plain_logits(loaded) - logits(model)).abs().max() <= 1e-5


def test_adapters_to_be_stored_are_staged_before_they_are_removed(folder: Path, tmp_path: Path) -> None:
    model, adapter = adapted(folder)
    publisher = AdapterPublisher(adapter, tmp_path, keep_last=2, keep_all=False, stored_interval=2)
    for version in range(6):
        publisher.publish(model, version)
    assert [(one.kind, one.step) for one in staging.staged(tmp_path)] == [("adapter", 2), ("adapter", 4)]
    assert not (tmp_path / "broadcasts" / "step_2").exists()
    first = staging.staged(tmp_path)[0].path
    assert load_file(first / "adapter_model.safetensors").keys()


@pytest.mark.parametrize("alpha", [0.1, 12.8])
def test_the_scale_of_a_published_adapter_is_that_of_its_config(folder: Path, tmp_path: Path, alpha: float) -> None:
    """The broadcast beside it has alpha in float32, where neither of these can be written."""
    model, adapter = adapted(folder, alpha=alpha)
    made = AdapterPublisher(adapter, tmp_path, keep_last=2, keep_all=False).publish(model, 1).parent
    (sent,) = load_file(made / BROADCAST_FILE)[LORA_ALPHA].tolist()
    assert sent != alpha
    assert published_scale(made, 4, sent) == alpha / 4
    read_by_peft = load_file(made / "adapter_model.safetensors") | load_file(made / BROADCAST_FILE)
    adapted_model(folder, made, read_by_peft)
    with pytest.raises(ConfigError, match="r = 4, but the run's adapters are of rank 2"):
        published_scale(made, 2, sent)
    config = json.loads((made / ADAPTER_CONFIG).read_text())
    for other in (alpha * (1 + 1e-6), None, "x", 1e300):
        (made / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": other}))
        with pytest.raises(ConfigError, match="has lora_alpha = "):
            published_scale(made, 4, sent)
    (made / ADAPTER_CONFIG).write_text(json.dumps({**config, "lora_alpha": alpha * 2}))
    with pytest.raises(ValueError, match="another lora_alpha than the engines were sent"):
        adapted_model(folder, made, read_by_peft)


def test_what_is_not_trained_costs_less(folder: Path) -> None:
    whole = ModelShape.of(load_model(folder))
    model, adapter = adapted(folder)
    added = sum(tensor.numel() for tensor in adapter.tensors().values())
    assert ModelShape.of(model).matrix_parameters == pytest.approx(whole.matrix_parameters * 2 / 3 + added)
    assert ModelShape.of(model).output_parameters == pytest.approx(whole.output_parameters * 2 / 3)
