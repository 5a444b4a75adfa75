"""What a training script can publish: models with the tensors of the run's, in wrappers, with an adapter of peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from own_trainer_helpers import Alone, write_own
from primerl.own_trainer.policy import Policies
from safetensors.torch import load_file
from torch.nn.parallel import DataParallel
from train_helpers import randomise
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

WHOLE = "publish the whole model, not its .model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def policy(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def loop(tmp_path: Path, folder: Path) -> Any:
    loop = Alone(tmp_path / "run", folder)
    yield loop
    loop._close_metrics()


# What can be published


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (lambda model: None, "got None"),
        (lambda model: model.state_dict(), "got an instance of OrderedDict; load a state_dict into such a model"),
        (lambda model: torch.nn.Sequential(model), "got an instance of Sequential; publish the one within it"),
        (lambda model: 7, "got an instance of int"),
    ],
)
def test_what_is_no_model_is_refused(loop: Alone, policy: Any, given: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"publish takes the transformers model that is trained, .*{got}"):
        loop.publish(given(policy))
    assert not loop.output_dir.exists()


def inner(model: Any) -> Any:
    return model.model


def resized(model: Any) -> Any:
    model.resize_token_embeddings(300)
    return model


def another(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += 1
    config.layer_types = [*config.layer_types, config.layer_types[0]]
    return type(model)(config)


def untied(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = not config.tie_word_embeddings
    return type(model)(config)


def compiled_in_part(model: Any) -> Any:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    return model


def doubled(model: Any) -> Any:
    return model.double()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (inner, rf"no engine can load these weights: .*model\.embed_tokens\.weight \[264, 32\] is missing; .*{WHOLE}"),
        (
            resized,
            r"in 1 tensor: model\.embed_tokens\.weight has shape \[300, 32\], not \[264, 32\]\. Publish a model",
        ),
        (another, r"model\.layers\.2\.input_layernorm\.weight \[32\] is not in the run's model; .*, and \d+ more"),
        (untied, r"in 1 tensor: lm_head\.weight"),
        (compiled_in_part, r"Parts of it are compiled, .* compile them by part\.compile\(\)"),
        (doubled, r"is torch\.float64, which engines do not load"),
    ],
)
def test_weights_that_no_engine_loads_are_named_before_anything_is_written(
    loop: Alone, policy: Any, given: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        loop.publish(given(policy))
    assert not loop.output_dir.exists()
    assert loop.announced == []


def test_a_model_that_was_changed_since_is_compared_again(loop: Alone, policy: Any) -> None:
    loop.publish(policy)
    next(loop.batches())
    with pytest.raises(ValueError, match=r"has shape \[300, 32\]"):
        loop.publish(resized(policy))
    assert [path.name for path in (loop.output_dir / "broadcasts").glob("step_*")] == ["step_0"]
    # What could not be published leaves the step to be published.
    policy.resize_token_embeddings(264)
    assert loop.publish(policy) == 1


def test_wrappers_are_seen_through(loop: Alone, policy: Any) -> None:
    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="eager")

    for wrapped in (compiled(policy), DataParallel(policy), compiled(DataParallel(policy)), compiled(adapted(policy))):
        assert loop._policies.checked(wrapped) is policy


def test_a_mixture_of_experts_is_compared_by_the_names_of_its_folder(tmp_path: Path) -> None:
    """Loading has joined its experts."""
    config = Qwen3MoeConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    policies = Policies(str(tmp_path), trusted=False, casts=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert policies.checked(loaded) is loaded
    loaded.model.layers[0].mlp.gate = torch.nn.Linear(32, 5, bias=False)
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight has shape \[5, 32\], not \[4, 32\]"):
        policies.checked(loaded)


# Adapters of peft


def adapted(model: Any, **settings: Any) -> Any:
    found = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, **settings))
    randomise(found, 1)
    return found


def test_a_lora_adapter_is_published_merged(loop: Alone, policy: Any) -> None:
    model = adapted(policy, use_rslora=True)
    loop.publish(model)
    written = load_file(loop.output_dir / "broadcasts" / "step_0" / "model.safetensors")
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    changed = AutoModelForCausalLM.from_pretrained(loop.model_path).state_dict()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, merged[name])
    assert not torch.equal(
        written["model.layers.0.self_attn.q_proj.weight"], changed["model.layers.0.self_attn.q_proj.weight"]
    )


def second_adapter(model: Any) -> Any:
    model = adapted(model)
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    return model


def merged_in_place(model: Any) -> Any:
    model = adapted(model)
    model.merge_adapter()
    return model


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (second_adapter, "its adapters are default, second"),
        (merged_in_place, "its layers are merged, switched off, or compute more"),
        (lambda model: adapted(model, use_dora=True), "its layers are .* compute more"),
        pytest.param(
            lambda model: adapted(model, lora_bias=True),
            "its layers are .* compute more",
            marks=pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
        ),
        (lambda model: adapted(model, modules_to_save=["norm"]), r"whole modules are trained with it"),
        (
            lambda model: peft.get_peft_model(
                model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
            ),
            "its adapter is of the kind PROMPT_TUNING",
        ),
        (
            lambda model: peft.get_peft_model(model, peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
            "its adapter is of the kind IA3",
        ),
    ],
)
def test_other_adapters_are_refused_with_what_to_publish(loop: Alone, policy: Any, given: Any, told: str) -> None:
    with pytest.raises(ValueError, match=rf"{told}.*: publish copy\.deepcopy\(model\)\.merge_and_unload\(\)"):
        loop.publish(given(policy))
    assert not loop.output_dir.exists()


def test_a_transposed_layer_is_not_merged() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
    settings = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(ValueError, match="compute more than"):
        Policies("", trusted=False, casts=False).checked(peft.get_peft_model(model, settings))
