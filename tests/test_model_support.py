"""What is known of a model by its `config.json`: preflight, `run models`, `models check` and the trainer agree."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, MIXTURES, WITH_STATE
from hosted_models import GPT_OSS, HOSTED, write_hosted
from primerl.cli import main
from primerl.config.hosted import HostedConfig, compile_hosted
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.inference import backends
from primerl.inference.torch.shape import Shape
from primerl.inference.vllm import installation
from primerl.launch.preflight import policy
from primerl.launch.preflight.model_folder import check_model, check_trainable
from primerl.train.adapters.targets import choose
from primerl.train.model import families, footprint, memory, support
from primerl.train.model.layers import layers
from primerl.train.model.packed_model import load_model, model_shape
from primerl.train.model.proof import prove
from primerl.train.model.recurrent import mixers
from primerl.train.settings import LoraConfig
from settings_helpers import filled

EMBEDDED = {name for name in HOSTED if name.startswith(("Qwen3-4B", "Llama-3.2"))}


@pytest.mark.parametrize("name", HOSTED)
def test_preflight_and_trainer_agree_about_the_hosted_models(name: str, tmp_path: Path) -> None:
    """Before weights are there: the trainer builds the model's shape from its config."""
    folder, config = write_hosted(tmp_path / name, name), HOSTED[name]
    answers = support.support(config)
    assert answers.training is None
    check_model(folder, weights=False)
    check_trainable(folder, ranks=2, compiles=True)
    model = model_shape(folder)
    assert model.config.get_text_config().model_type == answers.model_type
    assert layers(model)
    assert bool(mixers(model)) == answers.state
    count = sum(parameter.numel() for parameter in model.parameters())
    assert footprint.parameters(config) == pytest.approx(count, rel=0.05)
    assert answers.transformers_engine is None
    if name in EMBEDDED:
        assert answers.embedded_engine is None
        assert Shape.read(folder).layers == 4
        assert backends.chosen("auto", None, folder) == "torch"
    else:
        with pytest.raises(ValueError, match=r'the embedded engine serves llama, qwen2, qwen3.*"transformers"'):
            Shape.read(folder)
        assert backends.chosen("auto", None, folder) == "transformers"


@pytest.mark.parametrize(
    "name", ["Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "GLM-4.7", "Qwen3-VL-4B-Instruct"]
)
def test_a_hosted_model_that_is_approved_is_proved(name: str, tmp_path: Path) -> None:
    folder = write_hosted(tmp_path / name, name)
    assert support.training_refusal(HOSTED[name]) is None
    torch.manual_seed(0)
    model_shape(folder).to_empty(device="cpu").apply(_fill).save_pretrained(folder)
    prove(load_model(folder))


def _fill(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)


def test_families_that_are_tested_are_approved() -> None:
    for family in FAMILIES:
        config = {"model_type": family, **FAMILIES[family]}
        assert support.training_refusal(config) is None, family
        assert support.layout_refusal(config, 1) is None
        assert (support.layout_refusal(config, 2) is not None) == (family == "ctrl")
        assert support.has_state(config) == (family in WITH_STATE), family
        assert bool(support.experts(config)) == (family in MIXTURES), family


@pytest.mark.parametrize(
    "family", ["qwen3", "gpt_oss", "glm4_moe", "nemotron_h", "qwen3_5_moe_text", "deepseek_v3", "arcee", "gpt2"]
)
def test_adapters_reach_the_projections_that_are_named(family: str, folders: Any) -> None:
    model = model_shape(folders(family))
    targets = choose(model, filled(LoraConfig))
    assert {name.rsplit(".", 1)[-1] for name in targets.linear} == set(families.PROJECTIONS[family])
    config = model.config.to_dict()
    assert bool(targets.experts) == support.adapts_experts(config, ["all-linear"])


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_which_experts_can_have_an_adapter_is_known_before_the_model_is_loaded(family: str, folders: Any) -> None:
    model = model_shape(folders(family))
    reached = choose(model, filled(LoraConfig)).experts
    assert bool(reached) == support.adapts_experts(support.read(folders(family)), ["all-linear"])


@pytest.mark.parametrize("name", [name for name, config in HOSTED.items() if support.experts(config)])
def test_a_hosted_mixture_starts_in_the_short_form_without_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are there; on vLLM, which is sent what it takes."""
    found = SimpleNamespace(device="cuda")
    monkeypatch.setattr(installation, "find", lambda python: found)
    folder = write_hosted(tmp_path / name, name)
    short: dict[str, Any] = {
        "model": str(folder),
        "max_steps": 1,
        "batch_size": 8,
        "rollouts_per_example": 4,
        "sampling": {"max_tokens": 64},
        "seq_len": 512,
        "env": [{"id": "owner/reverse-text@1.0"}],
    }
    full = compile_hosted(HostedConfig.model_validate(short)) | {"inference": {"backend": "vllm"}}
    config = RLConfig.model_validate(full)
    lora = resolve.trained_lora(config)
    assert lora is not None
    assert (lora.rank, lora.broadcast) == (16, "merged")
    (engine,) = resolve.inference(config, "http://o:1")
    assert engine.config.model_dump()["lora"] is None
    assert backends.named("torch").merges(["all-linear"], folder) is not None
    policy.check(config, weights=False)


# Published sizes, of the hub's configs.
SIZES: list[tuple[str, float, dict[str, Any]]] = [
    (
        "qwen3",
        4.02e9,
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    (
        "qwen3_moe",
        30.5e9,
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
    ),
    (
        "gpt_oss",
        20.9e9,
        {
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "vocab_size": 201088,
            "num_local_experts": 32,
        },
    ),
]


@pytest.mark.parametrize(("kind", "published", "sizes"), SIZES, ids=[kind for kind, *_ in SIZES])
def test_parameters_are_those_that_are_published(kind: str, published: float, sizes: dict[str, Any]) -> None:
    assert footprint.parameters({"model_type": kind, **sizes}) == pytest.approx(published, rel=0.01)


def test_memory_falls_with_gpus_checkpointing_and_adapters() -> None:
    config = {"model_type": "qwen3", **SIZES[0][2]}

    def total(gpus: int, seq_len: int = 4096, *, adapter: bool = False, how: memory.Checkpointing = "full") -> int:
        found = memory.training(config, gpus, seq_len, how, adapter=adapter)
        assert found is not None
        return found.total

    def held(gpus: int, replicas: int = 1) -> int:
        found = memory.training(config, gpus, 1, "full", adapter=False, replicas=replicas)
        assert found is not None
        return found.weights + found.gradients + found.optimizer

    parameters = footprint.parameters(config)
    assert parameters is not None
    assert held(1) == pytest.approx(18 * parameters, rel=0.01)
    assert held(8) == pytest.approx(16 * parameters / 8, rel=0.01)
    assert held(8, replicas=2) == pytest.approx(16 * parameters / 4, rel=0.01)
    assert total(1, adapter=True) < 0.3 * total(1)
    assert total(1) < total(1, how="selective") < total(1, how="none")
    assert total(1, 65536) - total(1, 32768) == pytest.approx(total(1, 98304) - total(1, 65536))
    assert memory.training({"model_type": "qwen3"}, 1, 1, "full", adapter=False) is None
    assert memory.serving({"model_type": "qwen3"}, 1, half=True) is None


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (HOSTED["Qwen3-4B-Instruct-2507"], 0, ["yes, packed", "qwen3", "as adapters", "on each of 2 GPUs"]),
        (HOSTED["Qwen3.5-35B-A3B"], 0, ["qwen3_5_moe_text, 4 experts a layer", "yes, over transformers: it computes"]),
        (HOSTED["GLM-4.7"], 0, ["down_proj, experts", "as merged weights: with adapters vLLM computes"]),
        (HOSTED["gpt-oss-20b"], 0, ["yes, packed", "its weights in mxfp4 are read as bfloat16"]),
        (
            HOSTED["GLM-4.7"] | {"quantization_config": {"quant_method": "fp8"}},
            1,
            ["no: its weights are quantised (fp8:"],
        ),
        ({"model_type": "bloom"}, 1, ["no: transformers has this architecture with attention of its own"]),
        ({"model_type": "ctrl"}, 1, ["no: this architecture (ctrl) has no list of layers"]),
        ({"model_type": "bert"}, 1, ["no: its attention lets tokens see later ones"]),
    ],
)
def test_models_check(
    config: dict[str, Any], code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["models", "check", str(tmp_path), "--gpus", "2"]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert all(word in shown for word in words), shown
    assert main(["models", "check", str(tmp_path), "--gpus", "2", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert (found["training"] is None) == (code == 0)


def test_models_check_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "has no config.json" in " ".join(capsys.readouterr().err.split())
    assert main(["models"]) == 2
    assert main(["models", "check", str(tmp_path), "--gpus", "0"]) == 2


def test_sizes_that_no_model_has() -> None:
    """Of the text model; older families have other names for them."""
    assert (support.size_problem({"n_embd": 0}) or "").startswith("its config.json has n_embd = 0, which")
    assert "hidden_size = true" in (support.size_problem({"text_config": {"hidden_size": True}}) or "")
    qwen = {"model_type": "qwen3", "hidden_size": -64, "vocab_size": 264, "num_attention_heads": 4}
    assert "hidden_size = -64" in (support.embedded_engine_refusal(qwen) or "")
    assert footprint.parameters({**qwen, "num_hidden_layers": 2}) is None
    for plain in ({}, {"num_attention_heads": [4, 8]}, {"hidden_size": None}, *HOSTED.values()):
        assert support.size_problem(plain) is None


def test_gpt_oss_in_bf16_trains() -> None:
    assert support.refusal(GPT_OSS) is None


def test_memory_to_serve() -> None:
    config = {"model_type": "qwen3", **SIZES[0][2]}
    whole, halved, many = (memory.serving(config, gpus, half=True) for gpus in (1, 2, 64))
    assert whole is not None
    assert halved is not None
    assert many is not None
    count = footprint.parameters(config)
    assert (whole.weights, halved.weights) == (2 * (count or 0), count)
    # Keys and values of 36 layers, 8 heads of 128, in bf16; a head is whole on one GPU.
    layers, heads = SIZES[0][2]["num_hidden_layers"], SIZES[0][2]["num_key_value_heads"]
    assert whole.token == 2 * 2 * layers * heads * SIZES[0][2]["head_dim"]
    assert (halved.token, many.token) == (whole.token // 2, whole.token // heads)
