"""Adapters of a mixture's experts and of layers with a state: trained by products of our own, merged, and read by peft
alone with equal logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import gradients, packed_loss, single_loss
from primerl.train.adapters.files import check_lora_files
from primerl.train.adapters.lora import Adapter, add_adapter, new_publisher
from primerl.train.adapters.merging import is_adapter
from primerl.train.checkpoint import staging
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.distributed.ranks import ALONE
from primerl.train.model import experts
from primerl.train.model.packed_model import load_model
from primerl.train.settings import ConfigError, LoraConfig, TrainerConfig
from safetensors.torch import load_file
from settings_helpers import filled
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import randomise
from transformers import AutoModelForCausalLM

MIXTURES = ["qwen3_moe", "glm4_moe", "qwen3_5_moe_text", "nemotron_h", "gpt_oss", "mixtral", "granitemoe", "aria_text"]
"""Stacks with and without a gate, with biases, transposed; shared experts; names that peft converts."""


def adapted(folder: Path, dtype: str = "float32", **lora: Any) -> tuple[Any, Adapter]:
    """A model whose adapter is as if it had been trained for long."""
    model = load_model(folder, dtype)
    adapter = add_adapter(model, filled(LoraConfig, **{"rank": 3, **lora}), folder, seed=0)
    randomise(model, seed=7)
    return model, adapter


def by_peft(base: Path, folder: Path) -> Any:
    """The adapter as peft alone reads it, on a model of `transformers` alone; as an engine computes."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_adapted_as_peft_does(family: str, folders: Any, tmp_path: Path) -> None:
    base = folders(family)
    model, adapter = adapted(base)
    reached = {where for where, _, _ in experts.stacks(model)}
    assert reached
    assert all(len(experts.adapters_of(model.get_submodule(where))) == 2 for where in reached)
    saved = save_model(model, base, tmp_path, 1, adapter=adapter)
    loss = packed_loss(model)
    theirs = by_peft(base, saved / "lora_adapters")
    expected = single_loss(theirs)
    assert abs(loss.item() - expected.item()) <= 1e-5
    assert abs(loss.item() - packed_loss(load_model(base)).item()) > 1e-3, "the adapter should matter"
    merged = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, attn_implementation="eager").eval()
    assert abs(loss.item() - single_loss(merged).item()) <= 1e-5
    loss.backward()
    expected.backward()
    ours = {f"base_model.model.{name}": gradient for name, gradient in gradients(model).items()}
    assert ours.keys() == gradients(theirs).keys()
    assert all(is_adapter(name) for name in ours)
    for name, gradient in gradients(theirs).items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize(
    ("targets", "reached"),
    [
        (["experts"], {"gate_up_proj", "down_proj"}),
        (["q_proj", "experts.down_proj"], {"down_proj"}),
        (["gate_proj", "up_proj"], {"gate_up_proj"}),
        (["layers.1.mlp.experts.gate_up_proj"], {"gate_up_proj"}),
        (["q_proj"], set()),
    ],
)
def test_experts_are_named_by_their_parameters_or_by_what_lies_in_them(
    targets: list[str], reached: set[str], folders: Any, tmp_path: Path
) -> None:
    base = folders("qwen3_moe")
    config = filled(LoraConfig, rank=2, target_modules=targets)
    check_lora_files(config, base, "model.lora.")
    model = load_model(base)
    adapter = add_adapter(model, config, base, seed=0)
    found = [set(experts.adapters_of(model.get_submodule(where))) for where, _, _ in experts.stacks(model)]
    assert found[-1] == reached
    assert bool(found[0]) == (bool(reached) and "layers.1" not in targets[0])
    # What is saved says the same to peft.
    adapter.save(tmp_path / "adapter")
    theirs = {
        name.removeprefix("base_model.model.")
        for name, one in by_peft(base, tmp_path / "adapter").named_parameters()
        if one.requires_grad
    }
    assert theirs == {name for name, one in model.named_parameters() if one.requires_grad}


def test_experts_have_no_dropout(folders: Any) -> None:
    config = filled(LoraConfig, dropout=0.1)
    with pytest.raises(
        ConfigError, match=r"^model\.lora\.dropout is 0\.1, but adapters of a mixture's experts have none"
    ):
        add_adapter(load_model(folders("qwen3_moe")), config, folders("qwen3_moe"), seed=0)


def test_a_bfloat16_model_computes_its_adapter_in_bfloat16(folders: Any) -> None:
    """And keeps its matrices, and their gradients, in fp32."""
    model, _ = adapted(folders("qwen3_5_moe_text"), "bfloat16")
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
                seen.update((tuple(one.shape), one.dtype) for one in args if isinstance(one, torch.Tensor))
            return function(*args, **(kwargs or {}))

    with Watch():
        packed_loss(model).backward()
    low = {dtype for shape, dtype in seen if 3 in shape}
    assert low == {torch.bfloat16}, "products with the adapter's matrices, of rank 3"
    trained = [one for one in model.parameters() if one.requires_grad]
    assert {one.dtype for one in trained} == {torch.float32}
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in trained)


def test_adapters_that_are_sent_merged_are_stored_too(folders: Any, tmp_path: Path) -> None:
    base = folders("qwen3_moe")
    model, adapter = adapted(base)
    named: dict[str, Any] = {"output_dir": str(tmp_path), "model": {"path": str(base), "lora": {"broadcast": "merged"}}}
    config = filled(TrainerConfig, orchestrator_url="u", max_steps=9, stored_adapters_interval=2, **named)
    publisher = new_publisher(config, adapter, ALONE)
    for version in range(5):
        publisher.publish(model, version)
    stored = staging.staged(tmp_path)
    assert [(one.kind, one.step) for one in stored] == [("adapter", 2), ("adapter", 4)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["store"]
    assert abs(single_loss(by_peft(base, stored[0].path)).item() - packed_loss(model).item()) <= 1e-5
    whole = load_file(tmp_path / "broadcasts" / "step_4" / "model.safetensors")
    assert sorted(whole) == sorted(load_file(base / "model.safetensors"))
