"""gpt-oss in MXFP4: dequantised when it is loaded, trained, published and saved as numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hub_folders import quantised, write_hub_folder
from primerl.evals.checkpoint import publish
from primerl.inference.vllm import as_numbers, gpt_oss
from primerl.inference.vllm.checkpoint import CheckpointError, read, tensors_of
from primerl.launch.preflight.model_folder import check_model, check_trainable
from primerl.train.checkpoint.model_folder import save_model
from primerl.train.model.loading import more_precise
from primerl.train.model.packed_model import ModelError, load_model, model_shape
from primerl.train.model.proof import prove
from primerl.train.weights.mxfp4 import dequantised, joined
from primerl.train.weights.publish import WeightsPublisher
from safetensors.torch import load_file, save_file

EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub_folder(tmp_path_factory.mktemp("hub") / "gpt-oss", "gpt-oss-20b")


def test_a_weight_is_its_value_times_its_power_of_two() -> None:
    """By the specification: sign, 2 bits of exponent (bias 1), 1 of significand; 0 and 1 have no implied one."""
    blocks = torch.arange(2 * 3 * 2 * 16, dtype=torch.int64).mul(37).remainder(256).to(torch.uint8).view(2, 3, 2, 16)
    scales = torch.tensor([127, 120, 130, 1, 200, 127] * 2, dtype=torch.uint8).view(2, 3, 2)
    found = dequantised(blocks, scales)
    assert (found.shape, found.dtype) == ((2, 64, 3), torch.bfloat16)
    for e in range(2):
        for n in range(3):
            for k in range(64):
                group, place = divmod(k, 32)
                byte = int(blocks[e, n, group, place // 2])
                code = byte >> 4 if place % 2 else byte & 15
                exponent, significand = code >> 1 & 3, code & 1
                value = significand / 2 if exponent == 0 else (1 + significand / 2) * 2.0 ** (exponent - 1)
                signed = -value if code & 8 else value
                assert float(found[e, k, n]) == math.ldexp(signed, int(scales[e, n, group]) - 127)
    with pytest.raises(ValueError, match="not parts of one tensor"):
        dequantised(blocks, scales[:1])
    assert torch.equal(dequantised(*quantised(found[:, :32].contiguous())), found[:, :32])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_has_the_numbers(folder: Path, dtype: str) -> None:
    expected = dict(joined(load_file(folder / "model.safetensors").items()))
    model = load_model(folder, dtype)
    state = model.state_dict()
    assert state.keys() == expected.keys() == model_shape(folder).state_dict().keys()
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(state[name], expected[name].to(state[name].dtype)) for name in expected)
    assert getattr(model.config, "quantization_config", None) is None
    prove(model)


def test_it_is_saved_and_published_as_numbers(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, "bfloat16")
    with torch.no_grad():
        model.get_parameter(EXPERTS).add_(1.0)
    saved = save_model(model, folder, tmp_path, 1)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    tensors = load_file(saved / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    assert torch.equal(load_model(saved, "bfloat16").get_parameter(EXPERTS), model.get_parameter(EXPERTS))

    manifest = WeightsPublisher(tmp_path, keep_last=3, keep_all=False).publish(model, 1)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(folder, tied=False).items()}
    assert torch.equal(dict(read(manifest.parent, expected).tensors)[EXPERTS], tensors[EXPERTS])
    assert not more_precise(folder, {torch.bfloat16})


def test_checks_before_a_start_accept_it(folder: Path) -> None:
    check_model(folder)
    check_trainable(folder)


def test_an_engine_for_evaluation_proves_the_folder_itself(folder: Path, tmp_path: Path) -> None:
    manifest = publish(folder, tmp_path)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(folder, tied=False).items()}
    found = dict(joined(read(manifest.parent, expected).tensors))
    assert found.keys() == expected.keys()
    assert torch.equal(found[EXPERTS], load_model(folder, "bfloat16").get_parameter(EXPERTS))
    with pytest.raises(CheckpointError, match="names and shapes"):
        read(manifest.parent, expected | {EXPERTS: (4, 96, 32)})


def test_vllm_is_given_a_folder_without_the_word(folder: Path) -> None:
    assert as_numbers.applies(folder)
    with as_numbers.folder_for(folder) as name:
        served = Path(name)
        assert not as_numbers.applies(served)
        assert {path.name for path in served.iterdir()} == {path.name for path in folder.iterdir()}
        assert (served / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not served.exists()
    assert (folder / "model.safetensors").is_file()


def test_half_of_a_tensor_is_refused(tmp_path: Path) -> None:
    broken = write_hub_folder(tmp_path / "broken", "gpt-oss-20b")
    file = broken / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{EXPERTS}_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .*down_proj_scales; fetch"):
        load_model(broken)
    with pytest.raises(ValueError, match=r"half of .*down_proj is missing"):
        dict(joined(tensors.items()))


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "bitsandbytes"])
def test_other_quantised_folders_are_refused_by_the_trainer_itself(tmp_path: Path, method: str) -> None:
    folder = write_hub_folder(tmp_path / "q", "Qwen3-4B-Instruct-2507")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    for load in (load_model, model_shape):
        with pytest.raises(ModelError, match=rf"its weights are quantised \({method}: config.json has"):
            load(folder)


def test_a_reload_gets_experts_one_by_one_and_its_sinks_at_the_end() -> None:
    """vLLM's own model, by its names: two heads of tensor-parallel rank 1."""

    class GptOssForCausalLM(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.attn = torch.nn.Module()
            self.model.attn.sinks = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    stack = torch.arange(12.0).view(2, 2, 3)
    tensors = [("m.mlp.experts.down_proj", stack), ("model.self_attn.sinks", torch.arange(4.0))]
    found = list(gpt_oss.for_reload(GptOssForCausalLM(), tensors))
    assert [name for name, _ in found] == [
        "m.mlp.experts.0.down_proj",
        "m.mlp.experts.1.down_proj",
        "model.self_attn.sinks",
    ]
    assert torch.equal(found[1][1], stack[1])
    assert list(gpt_oss.for_reload(torch.nn.Linear(1, 1), tensors)) == tensors
    model = GptOssForCausalLM()
    assert gpt_oss.copy_sinks(model, tensors, rank=1) == 2
    assert model.model.attn.sinks.tolist() == [2.0, 3.0]  # type: ignore[union-attr, operator]
    assert gpt_oss.copy_sinks(torch.nn.Linear(1, 1), tensors, rank=0) == 0
