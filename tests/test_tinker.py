"""The Tinker API's parts without its server: losses, messages, order of calls, training clients, saved states."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from primerl._core import RunCurves
from primerl.models.tiny import TinyConfig, write_model
from primerl.process.printing import printable
from primerl.runs.served import STEPS
from primerl.tinker import clients, sampling
from primerl.tinker.clients import (
    BaseModel,
    LoraOptions,
    Published,
    TrainingClient,
    adam_options,
    on_one_device,
    packed,
    set_tensors,
)
from primerl.tinker.engines import Engine, EngineError, Pool, Weights
from primerl.tinker.futures import Future, Futures, Queue
from primerl.tinker.history import StepLines
from primerl.tinker.losses import LOSSES, LossInputError, NotFoundError, check
from primerl.tinker.records import Limits, UnknownError
from primerl.tinker.routes import application
from primerl.tinker.service import Service
from primerl.tinker.store import EXTERNAL, SAMPLER, WEIGHTS, Store
from primerl.tinker.untied import engines_folder
from primerl.tinker.wire import Request, datums_of, request_of
from primerl.train.checkpoint.step_folders import SavingError
from primerl.train.model.packed_model import PackedSequences
from tinker.proto import tinker_public_pb2 as pb
from train_helpers import no_file_above

COMPUTATION = on_one_device(dtype="float32", threads=1)
OPTIONS = LoraOptions(rank=4, seed=3, train_mlp=True, train_attn=True, train_unembed=True)
MOST = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    write_model(made, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    return made


@pytest.fixture(scope="module")
def base(folder: Path) -> BaseModel:
    """Its output layer is tied to its embedding."""
    return BaseModel(folder, COMPUTATION, 32.0, trusted=False)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    made, size = tmp_path_factory.mktemp("models") / "untied", {"hidden_size": 32, "intermediate_size": 48}
    write_model(made, TinyConfig(**size, num_attention_heads=2, head_dim=16, tie_word_embeddings=False), seed=4)
    return BaseModel(made, COMPUTATION, 32.0, trusted=False)


def tensor(values: Any, kind: Any = np.float32) -> Any:
    array = np.asarray(values, kind)
    dtype = {np.float32: pb.DTYPE_FLOAT32, np.int64: pb.DTYPE_INT64, np.int32: pb.DTYPE_INT32}[kind]
    return pb.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def message(
    loss: str, datums: Sequence[tuple[list[int], dict[str, Any]]], config: dict[str, float] | None = None, **more: Any
) -> Request:
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss, **more)
    for token_ids, inputs in datums:
        datum = made.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(token_ids, np.int32).tobytes()
        for name, values in inputs.items():
            kind = np.int64 if name == "target_tokens" else np.float32
            datum.loss_fn_inputs[name].CopyFrom(tensor(values, kind))
    for name, value in (config or {}).items():
        made.loss_fn_config_v2[name].number = value
    return request_of(made.SerializeToString())


SEQUENCES = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18], [19]]


def policy_data(seed: int = 0) -> list[tuple[list[int], dict[str, Any]]]:
    """With targets that are not the next tokens of the input: clients may send any."""
    generator = np.random.default_rng(seed)
    found = []
    for token_ids in SEQUENCES:
        count = len(token_ids)
        inputs = {
            "target_tokens": generator.integers(3, 60, count),
            "logprobs": generator.normal(-3.0, 1.0, count),
            "advantages": generator.normal(0.0, 1.0, count),
            "weights": generator.normal(0.0, 1.0, count),
            "sequence_ratio_mask": [float(place != 0) for place in range(count)] if count > 1 else [0.0],
        }
        found.append((token_ids, inputs))
    return found


# Losses


def by_hand(name: str, p: np.ndarray[Any, Any], inputs: dict[str, Any], config: dict[str, float]) -> float:
    """The formulas of the module's docstring, in fp64."""
    q, a = np.array(inputs["logprobs"]), np.array(inputs["advantages"])
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    r = np.exp(p - q)
    if name == "cross_entropy":
        return float(-(np.array(inputs["weights"]) * p).sum())
    if name == "importance_sampling":
        return float(-(r * a).sum())
    if name == "ppo":
        return float(-np.minimum(r * a, np.clip(r, low, high) * a).sum())
    if name == "cispo":
        return float(-(np.clip(r, low, high) * p * a).sum())
    if name == "dro":
        return float(-(p * a - config.get("beta", 0.05) / 2 * (p - q) ** 2).sum())
    inside = np.array(inputs["sequence_ratio_mask"]) != 0
    if not inside.any():
        return 0.0
    ratio = np.exp((p - q)[inside].mean())
    return float(-np.minimum(ratio * a, np.clip(ratio, low, high) * a)[inside].sum())


CONFIGS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5},
    "dro": {"beta": 0.2},
}


def plain_logprobs(model: Any, token_ids: list[int], targets: Sequence[int]) -> torch.Tensor:
    logits = model(torch.tensor([token_ids])).logits[0].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(np.array(targets))[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_and_gradient_are_those_of_plain_pytorch(name: str, base: BaseModel) -> None:
    compare_with_peft(name, base)


def test_an_output_layer_of_its_own_is_trained_too(untied: BaseModel) -> None:
    compare_with_peft("ppo", untied)


def compare_with_peft(name: str, base: BaseModel) -> None:
    """By peft on a model of transformers, one sequence at a time; and the formulas by hand."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    client = TrainingClient(base, OPTIONS, 8)  # several micro-batches
    generator = torch.Generator().manual_seed(1)
    tensors = {key: torch.randn(one.shape, generator=generator) * 0.1 for key, one in client.tensors().items()}
    set_tensors(client.adapter, tensors)
    config, data = CONFIGS.get(name, {}), policy_data()
    output = client.forward_backward(message(name, data, config))

    lora = LoraConfig(r=4, lora_alpha=32, target_modules=client.adapter.peft_config.target_modules)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")  # about merging
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32), lora)
    own = {key.replace(".default.", "."): one for key, one in model.named_parameters() if "lora_" in key}
    with torch.no_grad():
        for key, value in tensors.items():
            own[key].copy_(value)
    loss, columns = check(name, config)
    total = torch.zeros(())
    for place, (token_ids, inputs) in enumerate(data):
        logprobs = plain_logprobs(model, token_ids, inputs["target_tokens"])
        given = {key: torch.tensor(np.array(inputs[key]), dtype=torch.float32) for key in columns}
        total = total + loss(logprobs, given, config).sum()
        found = np.frombuffer(output.loss_fn_outputs[place].fields["logprobs"].data, np.float32)
        assert np.abs(found - logprobs.detach().numpy()).max() <= 1e-5
        elements = np.frombuffer(output.loss_fn_outputs[place].fields["elementwise_loss"].data, np.float32)
        expected = by_hand(name, logprobs.detach().double().numpy(), inputs, config)
        assert elements.sum() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5, abs=1e-5)  # terms of both signs
    gradients = {key: one.grad for key, one in own.items()}
    found_gradients = {
        key: parameter.grad for key, parameter in zip(sorted(tensors), _sorted_parameters(client), strict=True)
    }
    assert {"base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"} <= tensors.keys()
    largest = max(float(one.abs().max()) for one in gradients.values() if one is not None)
    for key, gradient in gradients.items():
        assert float((found_gradients[key] - gradient).abs().max()) <= 1e-5 * largest, key


def _sorted_parameters(client: TrainingClient) -> list[Any]:
    named = client.adapter.parameters()
    return [named[name] for name in sorted(named)]


def test_soft_targets_have_a_weight_each(base: BaseModel, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    client = TrainingClient(base, OPTIONS, MOST)
    targets, weights = [[5, 6], [7, 8], [9, 3]], [[0.5, 0.5], [1.0, 0.0], [0.25, -0.75]]
    one = message(
        "cross_entropy", [([4, 5, 6], {"target_tokens": targets, "weights": weights}), ([7], {"target_tokens": [8]})]
    )
    output = client.forward_backward(one)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    field = output.loss_fn_outputs[0].fields["logprobs"]
    assert list(field.trailing_shape) == [2]
    found = np.frombuffer(field.data, np.float32).reshape(3, 2)
    expected = torch.stack([plain_logprobs(model, [4, 5, 6], [row[k] for row in targets]) for k in (0, 1)], dim=1)
    assert np.abs(found - expected.detach().numpy()).max() <= 1e-5
    assert len(output.loss_fn_outputs[1].fields["logprobs"].data) == 4


def test_sparse_targets_are_read() -> None:
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([4, 5], np.int32).tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor([[5, 6], [7, 8]], np.int64))
    sparse = pb.SparseCsr(
        values=np.array([0.5, 2.0], np.float32).tobytes(),
        crow_indices=np.array([0, 1, 2], np.int64).tobytes(),
        col_indices=np.array([1, 0], np.int64).tobytes(),
    )
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=[2, 2]))
    (found,) = datums_of(request_of(made.SerializeToString()), ("weights",), 100, MOST)
    assert found.columns["weights"].tolist() == [[0.0, 0.5], [2.0, 0.0]]


def test_what_no_loss_can_use_is_named() -> None:
    for name, config, words in (
        ("stable_reinforce", {}, "not known here .*importance_sampling, ppo or cispo"),
        ("mse", {}, "'mse' is not known here; known: cross_entropy"),
        ("ppo", {"beta": 1.0}, "ppo has no 'beta'; it has: clip_high_threshold, clip_low_threshold"),
        ("dro", {"beta": "x"}, "beta is 'x'; it has to be a number"),
    ):
        with pytest.raises(LossInputError, match=words):
            check(name, config)


@pytest.mark.parametrize(
    ("token_ids", "inputs", "words"),
    [
        ([], {"target_tokens": []}, r"data\[0\]\.model_input is empty"),
        ([1, 2], {}, "lacks target_tokens"),
        ([1, 2], {"target_tokens": [3]}, r"shape \[1\]; the input has 2 tokens"),
        ([1, 2], {"target_tokens": [3, 4], "weights": [1.0]}, r"weights has the shape \[1\]"),
        ([1, -2], {"target_tokens": [3, 4]}, "the id -2; the model's are 0 to 99"),
        ([1, 2], {"target_tokens": [3, 100]}, "target_tokens has the id 100"),
        ([1, 2], {"target_tokens": [3, 4], "weights": [1.0, float("nan")]}, "not finite"),
        ([1] * 65, {"target_tokens": [1] * 65}, "65 tokens; this server takes at most 64"),
    ],
)
def test_what_is_wrong_with_a_datum_is_named(token_ids: list[int], inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        datums_of(message("cross_entropy", [(token_ids, inputs)]), ("weights",), 100, MOST)


def test_other_kinds_of_input_are_named() -> None:
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    with pytest.raises(LossInputError, match="data is empty"):
        datums_of(request_of(made.SerializeToString()), (), 100, MOST)
    made.data.add().model_input.add().image.data = b"png"
    with pytest.raises(LossInputError, match=r"data\[0\]\.model_input: chunk 0 is an image; .* text only"):
        datums_of(request_of(made.SerializeToString()), (), 100, MOST)
    with pytest.raises(ValueError, match="no ForwardBackwardRequest"):
        request_of(b"\xff\xff\xff")


# Training clients


def test_calls_before_a_step_add_up(base: BaseModel) -> None:
    whole, parts = TrainingClient(base, OPTIONS, MOST), TrainingClient(base, OPTIONS, MOST)
    data = policy_data()
    whole.forward_backward(message("importance_sampling", data))
    for one in data:
        parts.forward_backward(message("importance_sampling", [one]))
        parts.forward_backward(message("importance_sampling", [one], forward_only=True))  # adds nothing
    adam = {"learning_rate": 1e-2, "grad_clip_norm": 1e-3}
    first, second = whole.optim_step(adam), parts.optim_step(adam)
    assert first["grad_norm:mean"] == pytest.approx(second["grad_norm:mean"], rel=1e-5)
    for name, tensor_ in whole.tensors().items():
        assert torch.allclose(tensor_, parts.tensors()[name], atol=1e-6), name
    assert all(not bool(one.grad.any()) if one.grad is not None else True for one in base.model.parameters())


def test_a_step_is_adamw_with_the_clients_parameters(base: BaseModel) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    copies = [torch.nn.Parameter(one.detach().clone()) for one in _sorted_parameters(client)]
    steps = [
        {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1},
        {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(copies)
    for given in steps:
        client.forward_backward(message("cross_entropy", policy_data()))
        for copy_, one in zip(copies, _sorted_parameters(client), strict=True):
            copy_.grad = one.grad.clone()
        client.optim_step(given)
        for group in other.param_groups:
            group |= {
                "lr": given["learning_rate"],
                "betas": (0.8, 0.9),
                "eps": 1e-8,
                "weight_decay": given["weight_decay"],
            }
        other.step()
    for copy_, one in zip(copies, _sorted_parameters(client), strict=True):
        assert torch.equal(copy_, one)


def test_two_clients_get_what_each_would_get_alone(base: BaseModel) -> None:
    other = LoraOptions(rank=2, seed=8, train_mlp=False, train_attn=True)

    def train(clients: list[TrainingClient]) -> None:
        for step in range(3):
            for client in clients:
                client.forward_backward(message("ppo", policy_data(step)))
            for client in clients:
                client.optim_step({"learning_rate": 1e-2})

    together = [TrainingClient(base, OPTIONS, MOST), TrainingClient(base, other, MOST)]
    train(together)
    for client, options in zip(together, (OPTIONS, other), strict=True):
        alone = TrainingClient(base, options, MOST)
        train([alone])
        for name, one in alone.tensors().items():
            assert torch.equal(one, client.tensors()[name]), name
    assert {name.rsplit(".", 3)[1] for name in together[1].tensors()} <= {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_gradients_of_a_failed_call_are_never_stepped_by(base: BaseModel) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    client.forward_backward(message("cross_entropy", policy_data()))
    before = client.tensors()
    with pytest.raises(LossInputError, match="lacks advantages"):
        client.forward_backward(message("ppo", [([4], {"target_tokens": [5], "logprobs": [0.0]})]))
    with pytest.raises(
        LossInputError, match=r"a forward_backward since the last optim_step has failed .*lacks advantages"
    ):
        client.optim_step({})
    assert all(torch.equal(one, before[name]) for name, one in client.tensors().items())
    assert client.optim_step({})["grad_norm:mean"] == 0.0


def test_gradients_of_which_some_were_lost_are_never_stepped_by(base: BaseModel) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    before = client.tensors()
    client.forward_backward(message("cross_entropy", policy_data()))
    client.lose("seq_id 2 has not arrived", drop=False)
    with pytest.raises(LossInputError, match="seq_id 2 has not arrived"):
        client.optim_step({})
    client.forward_backward(message("cross_entropy", policy_data()))
    client.lose("seq_id 5 has not arrived", drop=True)  # the step itself came too late
    assert client.optim_step({})["grad_norm:mean"] == 0.0
    assert all(torch.equal(one, before[name]) for name, one in client.tensors().items())


def test_wrong_parameters_of_a_step_are_named() -> None:
    for given, words in (
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"beta1": 1.0}, "below 1"),
        ({"momentum": 0.9}, "'momentum'"),
        ({"type": "dimuon"}, "dimuon"),
        ({"eps": float("nan")}, "eps is nan"),
    ):
        with pytest.raises(LossInputError, match=words):
            adam_options(given)


def test_what_has_nothing_to_train_is_refused(base: BaseModel) -> None:
    with pytest.raises(LossInputError, match="nothing to train"):
        TrainingClient(base, LoraOptions(rank=2, seed=0, train_mlp=False, train_attn=False), MOST)


def test_every_datum_is_in_one_micro_batch() -> None:
    request = message("cross_entropy", [(ids, {"target_tokens": ids}) for ids in SEQUENCES])
    datums = datums_of(request, ("weights",), 100, MOST)
    for most in (7, 8, 9, 15, 64):
        rows = packed(datums, most, shares=most != 8)
        assert sorted(place for row in rows for place in row) == [0, 1, 2, 3]
        assert all(sum(len(datums[place].token_ids) for place in row) <= most for row in rows)


@pytest.fixture(scope="module")
def without_trees(folder: Path) -> BaseModel:
    computation = on_one_device(dtype="float32", shared_prefixes="off", threads=1)
    return BaseModel(folder, computation, 32.0, trusted=False)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_what_datums_begin_with_alike_is_computed_once(
    name: str, base: BaseModel, without_trees: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of samples of a prompt, whose targets differ within the prompt too, and one sample that is another's
    twin: results and gradients are those of packing one after another."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 60, 48).tolist() for _ in range(2)]
    samples = [prompt + generator.integers(3, 60, size).tolist() for prompt in prompts for size in (3, 9, 1, 6)]
    samples.append(list(samples[0]))
    data = []
    for token_ids in samples:
        count = len(token_ids)
        columns = {
            "target_tokens": generator.integers(3, 60, count),
            "logprobs": generator.normal(-4.0, 0.5, count),
            "advantages": generator.normal(0.0, 1.0, count),
            "sequence_ratio_mask": [float(place >= 40) for place in range(count)],
        }
        data.append((token_ids, columns))
    computed: dict[bool, int] = {True: 0, False: 0}
    found = {}
    for shares, one in ((True, base), (False, without_trees)):
        assert one.shares is shares
        client = TrainingClient(one, OPTIONS, 160)
        tensors = {key: value + 0.05 for key, value in client.tensors().items()}
        set_tensors(client.adapter, tensors)

        def count(module: Any, given: Any, shares: bool = shares) -> None:
            computed[shares] += given[0].numel()

        hook = client.model.get_input_embeddings().register_forward_pre_hook(count)
        output = client.forward_backward(message(name, data))
        hook.remove()
        logprobs = [np.frombuffer(one.fields["logprobs"].data, np.float32) for one in output.loss_fn_outputs]
        gradients = [parameter.grad.clone() for parameter in _sorted_parameters(client)]
        found[shares] = (output.metrics["loss:sum"], np.concatenate(logprobs), gradients)
    tokens = sum(map(len, samples))
    assert computed[False] == tokens
    assert computed[True] < 0.5 * tokens
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert np.abs(found[True][1] - found[False][1]).max() <= 1e-5
    largest = max(float(one.abs().max()) for one in found[False][2])
    for ours, theirs in zip(found[True][2], found[False][2], strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * largest


def test_published_weights_are_the_adapters_merged(base: BaseModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    client = TrainingClient(base, OPTIONS, MOST)
    client.forward_backward(message("cross_entropy", policy_data()))
    client.optim_step({"learning_rate": 1e-2})
    published = Published(base, tmp_path)
    merged = published.write(1, (OPTIONS, client.tensors()))
    plain = published.write(2, None)
    name = "model.layers.0.self_attn.q_proj.weight"
    (file,), (other,) = merged.glob("*.safetensors"), plain.glob("*.safetensors")
    tensors, prefix = client.tensors(), "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    assert torch.allclose(load_file(file)[name], load_file(other)[name] + 32 / 4 * b @ a, atol=1e-6)
    digests = {json.loads((one / "manifest.json").read_text())["digest"] for one in (merged, plain)}
    assert len(digests) == 2
    # The embedding that the output layer is tied to stays as it is.
    words, head, prefix = "model.embed_tokens.weight", "lm_head.weight", "base_model.model.lm_head"
    a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    assert b.abs().max() > 0
    for one in (file, other):
        assert torch.equal(load_file(one)[words], base.model.get_input_embeddings().weight)
    assert torch.equal(load_file(other)[head], load_file(other)[words])
    assert torch.allclose(load_file(file)[head], load_file(file)[words] + 32 / 4 * b @ a, atol=1e-6)


def test_without_train_unembed_the_output_layer_stays(base: BaseModel, untied: BaseModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    options = replace(OPTIONS, train_unembed=False)
    for one in (base, untied):
        client = TrainingClient(one, options, MOST)
        assert not any("lm_head" in name for name in client.tensors())
        client.forward_backward(message("cross_entropy", policy_data()))
        client.optim_step({"learning_rate": 1e-2})
        (file,) = Published(one, tmp_path).write(1, (options, client.tensors())).glob("*.safetensors")
        assert torch.equal(load_file(file)["lm_head.weight"], one.model.get_output_embeddings().weight)
        assert one.model.get_input_embeddings().weight.requires_grad is False


def test_the_output_layer_alone_is_trained(base: BaseModel) -> None:
    client = TrainingClient(base, LoraOptions(2, 0, train_mlp=False, train_attn=False, train_unembed=True), MOST)
    assert {name.split(".")[2] for name in client.tensors()} == {"lm_head"}
    client.forward_backward(message("cross_entropy", policy_data()))
    assert client.optim_step({})["grad_norm:mean"] > 0


def test_engines_load_an_output_layer_of_its_own(base: BaseModel, untied: BaseModel, tmp_path: Path) -> None:
    """By the embedded engine and by transformers; of a model whose files are several as well."""
    from primerl.inference.torch.step import TorchBackend
    from transformers import AutoModelForCausalLM

    assert engines_folder(untied.folder, tmp_path / "untied", trusted=False) == untied.folder
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="50KB"
    )
    token_ids = torch.tensor([SEQUENCES[2]])
    expected = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)(token_ids).logits
    for source in (base.folder, sharded):
        for _ in range(2):  # what a former server left is replaced
            made = engines_folder(source, tmp_path / "made", trusted=False)
        model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        words, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert words is not head
        assert torch.equal(words, head)
        assert torch.allclose(model(token_ids).logits, expected, atol=1e-6)
        tensors = TorchBackend(made, dtype="float32", max_num_seqs=1, max_model_len=16).decoder.tensors
        assert torch.equal(tensors["lm_head.weight"], words)
        assert tensors["lm_head.weight"] is not tensors["model.embed_tokens.weight"]


def test_losses_over_steps_are_of_the_tokens_that_are_learnt_from(base: BaseModel) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    for weights in ([1.0, 0.0, 2.0], [0.0, 0.0, 1.0]):
        one = message("cross_entropy", [([4, 5, 6], {"target_tokens": [5, 6, 7], "weights": weights})])
        total = client.forward_backward(one).metrics["loss:sum"]
        client.forward_backward(replace(one, forward_only=True))
    client.optim_step({})
    first = client.stepped_loss
    assert first is not None
    assert total < 3 * first < 30  # the sum of both calls, over three tokens
    client.optim_step({})
    assert client.stepped_loss is None  # by no data
    # Of gradients that were dropped nothing is left.
    unusable = message("ppo", [([4], {"target_tokens": [5], "logprobs": [0.0]})])
    for failed, drop in ((True, False), (False, True)):
        client.forward_backward(one)
        if failed:
            with pytest.raises(LossInputError):
                client.forward_backward(unusable)
            with pytest.raises(LossInputError):
                client.optim_step({})
        else:
            client.lose("it has not arrived", drop=drop)
        client.optim_step({})
        assert client.stepped_loss is None, (failed, drop)


def test_a_device_without_enough_memory_is_told(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    one = message("cross_entropy", [([4, 5, 6], {"target_tokens": [5, 6, 7], "weights": [1.0] * 3})])

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(clients, "predicted_hidden", full)
        with pytest.raises(LossInputError, match=r"more memory than cpu has free.*trainer\.max_tokens"):
            client.forward_backward(one)
    with pytest.raises(LossInputError, match="more memory than cpu has free"):
        client.optim_step({})
    client.forward_backward(one)
    client.optim_step({})


def test_weights_that_overflow_are_named_with_what_to_do(base: BaseModel, tmp_path: Path) -> None:
    client = TrainingClient(base, OPTIONS, MOST)
    client.name = "s:train:0"
    inputs = {"target_tokens": [5, 6, 7], "logprobs": [-30.0] * 3, "advantages": [3e38] * 3}
    with pytest.raises(LossInputError, match=r"the loss of data \[0\] is (-inf|nan), by what loss_fn_inputs has"):
        client.forward_backward(message("importance_sampling", [([4, 5, 6], inputs)], forward_only=True))
    one = message("cross_entropy", [([4, 5, 6], {"target_tokens": [5, 6, 7], "weights": [1.0] * 3})])
    published = Published(base, tmp_path)
    assert published.is_finite((OPTIONS, client.tensors()), [4, 5])
    client.forward_backward(one)
    client.optim_step({"learning_rate": 1e30})
    words = r"s:train:0 after its optim_step 1 \(learning_rate 1e\+30\): its weights give .* not finite.*from_state"
    with pytest.raises(LossInputError, match=words):
        client.forward_backward(one)
    assert not published.is_finite((OPTIONS, client.tensors()), [4, 5])
    assert published.is_finite(None, [4, 5])


def test_steps_are_lines_also_after_half_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text('{"client": "a", "step": 1}\n{"client": "a", "st')
    lines = StepLines(file)
    for step in (2, 3):
        lines.add("b", step, 0.5, {"grad_norm:mean": 2.0, "learning_rate:mean": 1e-3})
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["client"], one["step"]) for one in found] == [("a", 1), ("b", 2), ("b", 3)]
    assert (found[-1]["loss"], found[-1]["grad_norm"], found[-1]["learning_rate"]) == (0.5, 2.0, 1e-3)
    StepLines(tmp_path / "gone" / "steps.jsonl").add("b", 4, None, {})
    assert "step 4 of b is not in" in caplog.text


def test_what_the_page_remembers_is_bounded() -> None:
    from primerl.tinker.history import MOST_POINTS, MOST_SAMPLES, Curve, Samples

    curve = Curve()
    for step in range(5 * MOST_POINTS):
        curve.add(step, float(step))
    assert len(curve.x) <= MOST_POINTS
    assert curve.x == sorted(curve.x) == [int(value) for value in curve.y]
    assert curve.x[-1] == 5 * MOST_POINTS - 1

    class Tokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return " ".join(map(str, ids))

    samples, content = Samples(), {"content": [{"logprob": -1.0}, {"logprob": -3.0}]}
    for index in range(2 * MOST_SAMPLES):
        samples.add("s", [1] * 1000, [{"token_ids": [index, 7], "logprobs": content, "finish_reason": "stop"}] * 3)
    described = samples.described(Tokenizer())
    assert len(described) == MOST_SAMPLES
    newest = described[0]
    assert (newest["text"], newest["of"], newest["stopped"]) == (f"{2 * MOST_SAMPLES - 1} 7", 3, True)
    assert (newest["mean_logprob"], newest["prompt_tokens"], len(newest["prompt"].split())) == (-2.0, 1000, 256)


# Saved states


def test_states_are_loaded_as_they_were_saved(base: BaseModel, tmp_path: Path) -> None:
    store, client = Store(tmp_path, base.digest, 32.0), TrainingClient(base, OPTIONS, MOST)
    how: dict[str, Any] = {"base_model": "tiny", "ttl_s": None, "overwrite": False, "user_metadata": {"run": "a"}}
    for _ in range(2):
        client.forward_backward(message("cross_entropy", policy_data()))
        client.optim_step({"learning_rate": 1e-2})
    saved = store.save(client, "s:train:0", WEIGHTS, "two", **how)
    sampler = store.save(client, "s:train:0", SAMPLER, "two", **how)
    assert saved.path == "tinker://s:train:0/weights/two"
    assert {one.path for one in store.all()} == {saved.path, sampler.path}
    facts, tensors, state = store.load(saved.path)
    assert (facts.options, facts.user_metadata) == (OPTIONS, {"run": "a"})
    resumed, fresh = TrainingClient(base, OPTIONS, MOST), TrainingClient(base, OPTIONS, MOST)
    resumed.load(tensors, state)
    fresh.load(tensors, None)
    for one in (client, resumed, fresh):
        one.forward_backward(message("cross_entropy", policy_data(1)))
        one.optim_step({"learning_rate": 1e-2})
    assert all(torch.equal(one, resumed.tensors()[name]) for name, one in client.tensors().items())
    assert any(not torch.equal(one, fresh.tensors()[name]) for name, one in client.tensors().items())
    assert store.load(sampler.path)[2] is None
    with pytest.raises(LossInputError, match="exists; give another name, or overwrite=True"):
        store.save(client, "s:train:0", WEIGHTS, "two", **how)
    store.save(client, "s:train:0", WEIGHTS, "two", **{**how, "overwrite": True})
    # As states were noted before there was an adapter of the output layer.
    file = tmp_path / "s:train:0" / "sampler_weights" / "two" / "primerl.json"
    noted = json.loads(file.read_text())
    del noted["options"]["train_unembed"]
    file.write_text(json.dumps(noted))
    assert store.facts(sampler.path).options == replace(OPTIONS, train_unembed=False)
    store.delete(sampler.path)
    assert [one.path for one in store.all("s:train:0")] == [saved.path]


def test_states_that_cannot_be_used_are_named(base: BaseModel, tmp_path: Path) -> None:
    store, client = Store(tmp_path, base.digest, 32.0), TrainingClient(base, OPTIONS, MOST)
    how: dict[str, Any] = {"base_model": "tiny", "overwrite": False, "user_metadata": None}
    for name in ("../up", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises(LossInputError, match="cannot be used"):
            store.save(client, "s:train:0", WEIGHTS, name, ttl_s=None, **how)
    path = store.save(client, "s:train:0", WEIGHTS, "one", ttl_s=None, **how).path
    for other in (
        "tinker://s:train:0/weights/two",
        "tinker://../../etc/weights/one",
        "/etc/passwd",
        "tinker://a/b/c/d",
    ):
        with pytest.raises(NotFoundError, match="there is no saved state"):
            store.load(other)
    with pytest.raises(LossInputError, match="other weights than this server's base model"):
        Store(tmp_path, "0" * 16, 32.0).load(path)
    with pytest.raises(LossInputError, match=r"lora_alpha = 32, and this server's is 8") as refused:
        Store(tmp_path, base.digest, 8.0).load(path)
    assert not isinstance(refused.value, NotFoundError)
    with pytest.raises(LossInputError, match="at most ten years"):
        store.save(client, "s:train:0", WEIGHTS, "long", ttl_s=1e15, **how)
    with pytest.raises(AssertionError):
        store.save(client, "s:train:../../x", WEIGHTS, "one", ttl_s=None, **how)
    unfinished = tmp_path / "s:train:0" / "weights" / ".one.7.tmp"
    unfinished.mkdir()
    (unfinished / "primerl.json").write_text((tmp_path / "s:train:0" / "weights" / "one" / "primerl.json").read_text())
    assert len(store.all()) == 1
    store.clean()
    assert not unfinished.exists()
    file = tmp_path / "s:train:0" / "weights" / "one" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-3] + b"abc")
    with pytest.raises(LossInputError, match=r"damaged on the server's disk: optimizer\.pt"):
        store.load(path)
    expired = store.save(client, "s:train:0", SAMPLER, "short", ttl_s=1e-9, **how)
    assert expired.path not in {one.path for one in store.all()}
    with pytest.raises(LossInputError, match="there is no saved state"):
        store.load(expired.path)


def test_a_state_that_was_being_replaced_when_the_server_was_killed_is_restored(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two renames, when the name is no one's."""
    store, client = Store(tmp_path, base.digest, 32.0), TrainingClient(base, OPTIONS, MOST)
    how: dict[str, Any] = {"base_model": "tiny", "ttl_s": None, "user_metadata": None}
    path = store.save(client, "s:train:0", WEIGHTS, "one", overwrite=False, **how).path
    before = store.load(path)[1]
    client.forward_backward(message("cross_entropy", policy_data()))
    client.optim_step({"learning_rate": 1e-2})
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp" and self.is_dir():
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(client, "s:train:0", WEIGHTS, "one", overwrite=True, **how)
    assert store.all() == []
    store.clean()
    assert [one.path for one in store.all()] == [path]
    assert all(torch.equal(one, before[name]) for name, one in store.load(path)[1].items())
    # One that was killed after both: what was replaced is gone.
    store.save(client, "s:train:0", WEIGHTS, "one", overwrite=True, **how)
    shutil.copytree(tmp_path / "s:train:0/weights/one", tmp_path / "s:train:0/weights/.one.7.former")
    store.clean()
    assert os.listdir(tmp_path / "s:train:0/weights") == ["one"]
    assert any(not torch.equal(one, before[name]) for name, one in store.load(path)[1].items())


@pytest.mark.parametrize("size", [0, 1000, 30_000])
def test_a_full_disk_is_named_and_costs_nothing_that_was_saved(base: BaseModel, tmp_path: Path, size: int) -> None:
    """While the optimizer's state, the adapter, or the facts are written."""
    store, client = Store(tmp_path / "states", base.digest, 32.0), TrainingClient(base, OPTIONS, MOST)
    client.forward_backward(message("cross_entropy", policy_data()))
    client.optim_step({"learning_rate": 1e-2})
    how: dict[str, Any] = {"base_model": "tiny", "ttl_s": None, "user_metadata": None}
    path = store.save(client, "s:train:0", WEIGHTS, "one", overwrite=False, **how).path
    adapter = (tmp_path / "states/s:train:0/weights/one/adapter_model.safetensors").stat().st_size
    assert 1000 < adapter < 60_000

    async def saved(name: str, *, overwrite: bool) -> dict[str, Any]:
        async def work() -> Any:
            return {"path": store.save(client, "s:train:0", WEIGHTS, name, overwrite=overwrite, **how).path}

        future = Future("save_weights")
        await future.run(work)
        return dict(json.loads(future.body))

    for name, overwrite in (("two", False), ("one", True)):
        with no_file_above(size):
            answer = run(saved(name, overwrite=overwrite))
            with pytest.raises(SavingError, match=r"broadcasts/step_1 cannot be written"):
                Published(base, tmp_path).write(1, (OPTIONS, client.tensors()))
        assert answer["category"] == "server"
        assert f"{tmp_path}/states/s:train:0/weights/{name} cannot be written" in answer["error"]
        assert "make room on the server's disk" in answer["error"]
        # Half of what was written would keep the disk full.
        assert os.listdir(tmp_path / "states/s:train:0/weights") == ["one"]
        assert store.load(path)[2] is not None
    assert run(saved("two", overwrite=False))["path"].endswith("/two")


# The order of calls


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 30))


class Calls:
    """Calls of made-up clients, and the order in which they ran."""

    def __init__(self, gap_s: float = 30.0) -> None:
        self.ran: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.futures = Futures()
        self.turn = asyncio.Lock()
        self.gap_s = gap_s

    def queue(self) -> Queue:
        return Queue(self.turn, self.gap_s, lambda kind, why: self.lost.append((kind, why)))

    def put(self, queue: Queue, name: str, seq_id: int, error: Exception | None = None) -> Future:
        future = self.futures.new(name)

        async def work() -> Any:
            self.ran.append(f"{name}{seq_id}")
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return {"ran": seq_id}

        queue.put(seq_id, future, work)
        return future


def test_calls_run_in_their_order_and_clients_in_turn() -> None:
    async def scenario() -> list[str]:
        calls = Calls()
        one, two = calls.queue(), calls.queue()
        futures = [calls.put(one, "a", seq_id) for seq_id in (3, 2, 1)]
        futures += [calls.put(two, "b", seq_id) for seq_id in (1, 2)]
        await asyncio.gather(*(future.done.wait() for future in futures))
        return calls.ran

    assert run(scenario()) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_call_before_which_one_is_missing_fails_by_name() -> None:
    async def scenario() -> tuple[list[str], dict[str, Any], dict[str, Any]]:
        calls = Calls(gap_s=0.05)
        queue = calls.queue()
        first, third, fourth = (calls.put(queue, "a", seq_id) for seq_id in (1, 3, 4))
        await asyncio.gather(*(future.done.wait() for future in (first, third, fourth)))
        late = calls.put(queue, "a", 2)
        await late.done.wait()
        assert calls.lost == [("a", "the call with seq_id 2 has not arrived within 0.05 s")]
        return calls.ran, json.loads(third.body), json.loads(late.body)

    ran, third, late = run(scenario())
    assert ran == ["a1", "a4"]
    assert third["category"] == "user"
    assert "seq_id 2 has not arrived within 0.05 s" in third["error"]
    assert "seq_id 2 comes after" in late["error"]


def test_errors_are_results_and_later_calls_run() -> None:
    async def scenario() -> list[dict[str, Any]]:
        calls = Calls()
        queue = calls.queue()
        futures = [
            calls.put(queue, "a", 1, LossInputError("data is empty")),
            calls.put(queue, "a", 2, RuntimeError("out of memory")),
            calls.put(queue, "a", 3),
        ]
        await asyncio.gather(*(future.done.wait() for future in futures))
        return [json.loads(future.body) for future in futures]

    assert run(scenario()) == [
        {"error": "data is empty", "category": "user"},
        {"error": "RuntimeError: out of memory", "category": "server"},
        {"ran": 3},
    ]


def test_a_client_that_ends_answers_what_waits() -> None:
    async def scenario() -> dict[str, Any]:
        calls = Calls()
        queue = calls.queue()
        future = calls.put(queue, "a", 2)
        await queue.close("the session has ended")
        await future.done.wait()
        return dict(json.loads(future.body))

    assert run(scenario()) == {"error": "the session has ended", "category": "user"}


def test_results_are_kept_for_a_while() -> None:
    async def scenario() -> None:
        futures = Futures()
        future = futures.new("x", None, ("m", 1))
        futures.forget_old(1e12)
        assert futures.of_call(("m", 1)) is future  # it has not ended
        future.fail("x", "user")
        assert future.ended is not None
        futures.forget_old(future.ended + 899)
        assert futures.get(future.id) is future
        futures.forget_old(future.ended + 901)
        assert futures.get(future.id) is None
        assert futures.of_call(("m", 1)) is None

    run(scenario())


# Which engine answers


class Engines(Pool):
    """Engines whose loads and answers take as long as a test says."""

    def __init__(self, engines: int, load_s: float, answer_s: float) -> None:
        super().__init__([f"e{index}" for index in range(engines)], "m", ThreadPoolExecutor(1))
        self.load_s, self.answer_s = load_s, answer_s
        self.loaded: list[str] = []
        self.clock = monotonic

    async def _load(self, engine: Engine, weights: Weights) -> None:
        await asyncio.sleep(self.load_s)
        self.loaded.append(weights.key)
        async with self._changed:
            engine.holds, engine.digest, engine.is_loading, engine.since = weights.key, weights.key, False, self.clock()
            self._changed.notify_all()

    async def _asked(self, engine: Engine, body: dict[str, Any], until: Any) -> dict[str, Any]:
        assert engine.digest == body["wanted"], "answered by other weights"
        await asyncio.sleep(self.answer_s)
        assert engine.digest == body["wanted"], "other weights were loaded meanwhile"
        return {"choices": []}


def weights_of(key: str) -> Weights:
    return Weights(key, lambda version: Path())


async def answered(pool: Engines, keys: Sequence[str]) -> None:
    for name in pool.names:
        await pool.joined(name, "http://127.0.0.1:1")
    await asyncio.gather(*(pool.generate(weights_of(key), {"wanted": key}) for key in keys))
    await pool.close()


@pytest.mark.parametrize("engines", [1, 2])
def test_samplers_take_turns_without_loading_for_each_request(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take longer than patience lasts."""
    monkeypatch.setattr("primerl.tinker.engines.PATIENCE_S", 0.05)
    pool = Engines(engines, load_s=0.1, answer_s=0.01)
    # Only loads take time: on a busy machine patience would be over before all that wait have seen the weights.
    pool.clock = lambda: pool.load_s * len(pool.loaded)
    monkeypatch.setattr("primerl.tinker.engines.time", SimpleNamespace(monotonic=pool.clock))
    run(answered(pool, ["a", "b"] * 50))
    assert sorted(pool.loaded) == ["a", "b"]


def test_more_samplers_than_engines_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primerl.tinker.engines.PATIENCE_S", 0.05)
    pool = Engines(2, load_s=0.02, answer_s=0.02)

    async def scenario() -> None:
        async def ask(key: str) -> None:
            for _ in range(10):
                await pool.generate(weights_of(key), {"wanted": key})

        for name in pool.names:
            await pool.joined(name, "http://127.0.0.1:1")
        await asyncio.gather(*(ask(key) for key in "abcd" for _ in range(3)))
        await pool.close()

    run(scenario())
    assert set(pool.loaded) == set("abcd")


# Requests for samples


def table(data: list[Any], shape: list[int]) -> dict[str, Any]:
    return {"data": data, "dtype": "int64", "shape": shape}


def asked(**more: Any) -> sampling.SampleRequest:
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}, "num_samples": 2, **more}
    return sampling.request_of(body, 100, 16)


def test_a_request_becomes_an_engines() -> None:
    plain = asked()
    assert plain.sampling == {
        "ignore_eos": False, "max_tokens": 13, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0
    }  # fmt: skip
    assert asked(sampling_params={"stop": []}).sampling["ignore_eos"] is True
    ids = asked(sampling_params={"stop": [7, 8], "max_tokens": 99, "top_k": 5})
    assert (ids.sampling["stop_token_ids"], ids.sampling["max_tokens"], ids.sampling["top_k"]) == ([7, 8], 13, 5)
    assert asked(sampling_params={"stop": "end"}).stop_texts == ["end"]
    scored = asked(prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    assert (scored.sampling["prompt_logprobs"], scored.sampling["logprobs"]) == (3, 3)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_params": {"top_p": 0}}, "top_p is 0"),
        ({"sampling_params": {"top_k": -2}}, "top_k is -2"),
        ({"sampling_params": {"stop": [100]}}, r"stop is \[100\]"),
        ({"sampling_params": {"stop": [""]}}, "give texts"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 10**7}, "num_samples is 10000000"),
        ({"topk_sample_logprobs": 20}, "at most 19"),
        ({"sampling_params": "x"}, "sampling_params is 'x'"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature is nan"),
        ({"prompt_logprobs_last_n": "x"}, "prompt_logprobs_last_n is 'x'"),
        ({"prompt": "x"}, "no list of chunks"),
        ({"target_prompt_logprobs": {"data": []}}, "has to be a tensor of int64"),
        ({"target_prompt_logprobs": table([1], [1, 1])}, r"shape \[1, 1\]; the prompt has 3 tokens, so .* \[2, K\]"),
        ({"target_prompt_logprobs": table([1], [2, 1])}, "has 1 values, which are not those of its shape"),
        ({"target_prompt_logprobs": table([1, 100], [2, 1])}, "ids that are not the model's"),
        ({"target_prompt_logprobs": table([1, -2], [2, 1])}, "ids that are not the model's"),
        ({"target_prompt_logprobs": table(["x", 1], [2, 1])}, "cannot be read"),
        ({"target_prompt_logprobs": table([1, 1], [2, "1"])}, r"shape \[2, '1'\]"),
        ({"target_prompt_logprobs": table([1], [2, 2**40])}, "has 1 values, which are not those of its shape"),
        ({"target_prompt_logprobs": table([1], [2, 1]) | {"sparse_crow_indices": [0, 1]}}, "cannot be read"),
        ({"prompt_alt_tokens_k": 257}, "prompt_alt_tokens_k is 257"),
        ({"record_stability_info": True}, "record_stability_info: this server does not give"),
        ({"prompt": {"chunks": []}}, "the prompt is empty"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "chunk 0 is an image; this server reads text only"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "the id -1"),
        ({"prompt": {"chunks": [{"tokens": [1] * 16}]}}, "16 tokens; this server's longest sequence is 16"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(LossInputError, match=words):
        asked(**more)


def test_named_tokens_of_a_prompt_are_scored_by_the_samplers_weights(base: BaseModel, tmp_path: Path) -> None:
    """A table with holes, a sparse one, and tokens that are drawn, against peft's model and its whole distributions."""
    from tinker.proto.response_conv import deserialize_sample_response

    client = TrainingClient(base, OPTIONS, MOST)
    for _ in range(3):
        client.forward_backward(message("cross_entropy", policy_data()))
        client.optim_step({"learning_rate": 1e-2})
    adapter = (OPTIONS, client.tensors())
    with torch.no_grad():
        logprobs = client.model(torch.tensor([[1, 2, 3]]), packed=PackedSequences.from_lengths([3])).logits[0].float()
    logprobs = logprobs.log_softmax(-1)
    published = Published(base, tmp_path)

    def answer(samplers: Any = adapter, **more: Any) -> Any:
        made = pb.SampleResponse()
        published.scored(samplers, asked(**more)).add_to(made)
        return deserialize_sample_response(made.SerializeToString())

    dense = answer(target_prompt_logprobs=table([5, -1, 7, 9], [2, 2])).target_prompt_logprobs
    expected = [logprobs[0, 5].item(), 0.0, logprobs[1, 7].item(), logprobs[1, 9].item()]
    assert dense.shape == [2, 2]
    assert list(dense.data) == pytest.approx(expected, abs=1e-5)
    sparse = table([7], [2, 3]) | {"sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [2]}
    found = answer(target_prompt_logprobs=sparse).target_prompt_logprobs
    assert (list(found.sparse_crow_indices), list(found.sparse_col_indices)) == ([0, 0, 1], [2])
    assert list(found.data) == pytest.approx([expected[2]], abs=1e-5)
    plain = answer(None, target_prompt_logprobs=table([5, 7], [2, 1])).target_prompt_logprobs
    assert abs(plain.data[0] - expected[0]) > 1e-3  # the base model's
    drawn = answer(prompt_alt_tokens_k=200, sampling_params={"seed": 3, "temperature": 0.5}).prompt_alt_tokens
    again = answer(prompt_alt_tokens_k=200, sampling_params={"seed": 3, "temperature": 0.5}).prompt_alt_tokens
    tokens = torch.tensor(np.array(drawn.tokens.data)).view(2, 200)
    assert list(drawn.tokens.data) == list(again.tokens.data)
    # At temperature 1, whatever they are drawn at.
    assert list(drawn.logprobs.data) == pytest.approx(logprobs[:2].gather(1, tokens).flatten().tolist(), abs=1e-5)
    chances, likeliest = (2 * logprobs[:2]).softmax(-1).topk(3)
    for row in range(2):
        for chance, token in zip(chances[row].tolist(), likeliest[row].tolist(), strict=True):
            share = float((tokens[row] == token).float().mean())
            assert abs(share - chance) <= 4 * (chance * (1 - chance) / 200) ** 0.5 + 1e-3
    (greedy,) = {tuple(answer(prompt_alt_tokens_k=1, sampling_params={"temperature": 0}).prompt_alt_tokens.tokens.data)}
    assert greedy == tuple(logprobs[:2].argmax(-1).tolist())


# Clients

LIMITS = Limits(
    ("tiny",), max_rank=8, max_clients=2, most_tokens=MOST, context=MOST, most_samples=4, gap_s=30.0, session_s=60.0
)


def test_a_client_that_vanishes_leaves_nothing(base: BaseModel, tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, Any]]:
        service = Service(base, Pool(["e0"], "m", ThreadPoolExecutor(1)), tmp_path, LIMITS, None)
        session, other = service.begin(), service.begin()
        body = {"base_model": "tiny", "lora_config": {"rank": 2}, "model_seq_id": 0}
        made = [service.create_model({**body, "session_id": one.id}) for one in (session, other)]
        refused = service.create_model({**body, "session_id": other.id, "model_seq_id": 1})
        await asyncio.gather(*(future.done.wait() for future in (*made, refused)))
        name = f"{session.id}:train:0"
        snapshot = service.save({"model_id": name, "seq_id": 1}, SAMPLER)
        await snapshot.done.wait()
        assert len(list(tmp_path.glob("snapshots/*/*"))) == 1
        waits = service.optim_step({"model_id": name, "seq_id": 3})  # for the call before it
        session.heard -= LIMITS.session_s + 1
        await service.tend()
        await waits.done.wait()
        assert list(service.models) == [f"{other.id}:train:0"]
        assert (list(service.sessions), service.samplers) == ([other.id], {})
        assert list(tmp_path.glob("snapshots/*/*")) == []
        again = service.create_model({**body, "session_id": other.id, "model_seq_id": 2})  # there is room again
        await again.done.wait()
        with pytest.raises(UnknownError, match="has ended"):
            service.heartbeat(session.id)
        await service.close()
        return [json.loads(future.body) for future in (refused, waits, again)]

    refused, waits, again = run(scenario())
    assert "2 training clients, as many as it takes (trainer.max_clients)" in refused["error"]
    assert waits["error"] == "the session has ended"
    assert again["model_id"].endswith(":train:2")


@pytest.mark.parametrize("answer", [True, False, MemoryError("no room")])
def test_weights_are_looked_at_once_for_all_requests_that_engines_fail(
    answer: bool | MemoryError, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def is_finite(_: Published, adapter: Any, prompt: Sequence[int]) -> bool:
        looked.append(list(prompt))
        if isinstance(answer, MemoryError):
            raise answer
        return answer

    async def generate(*_: Any) -> Any:
        raise EngineError("engine e0 answered 500")

    async def scenario() -> set[str]:
        pool = Pool(["e0"], "m", ThreadPoolExecutor(1))
        monkeypatch.setattr(pool, "generate", generate)
        monkeypatch.setattr(Published, "is_finite", is_finite)
        service = Service(base, pool, tmp_path, LIMITS, None)
        sampler = await service.create_sampler({"session_id": service.begin().id, "base_model": "tiny"})
        body = {"sampling_session_id": sampler.id, "sampling_params": {"max_tokens": 2}}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
        asked = [service.sample({**body, "seq_id": number}) for number in range(3)]
        await asyncio.gather(*(one.done.wait() for one in asked))
        asked.append(service.sample({**body, "seq_id": 3}))
        await asked[-1].done.wait()
        await service.close()
        return {json.loads(one.body)["error"] for one in asked}

    (said,) = run(scenario())
    assert looked == [[4, 5]]
    assert ("not finite" in said) == (answer is False)
    assert ("engine e0 answered 500" in said) == (answer is not False)


def test_steps_of_clients_are_no_curves_of_a_policy(base: BaseModel, tmp_path: Path) -> None:
    """Of several clients at the same step, and of one that was loaded at an earlier one."""
    lines = StepLines(tmp_path / STEPS)
    for client, step in (("a", 3), ("b", 3), ("a", 1)):
        lines.add(client, step, 1.0, {})
    found = json.loads(RunCurves(tmp_path).curves(["loss"]))
    assert (found["steps"], found["damaged"]) == ([None, None], [])


def test_what_clients_say_is_cut_in_the_log() -> None:
    assert printable("a\nb") == "a?b"
    assert printable("x" * 1000, 1000) == "x" * 1000
    assert printable("x" * 1000 + "\ny", 1000) == "x" * 1000 + ".. (1002 characters)"


def test_an_sdk_that_does_not_know_exports_gets_a_list_without_them(base: BaseModel, tmp_path: Path) -> None:
    store, client = Store(tmp_path / "states", base.digest, 32.0), TrainingClient(base, OPTIONS, MOST)
    how: dict[str, Any] = {"base_model": "tiny", "ttl_s": None, "overwrite": False, "user_metadata": None}
    for kind in (WEIGHTS, EXTERNAL):
        store.save(client, "s:train:0", kind, "one", **how)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as thread:
            service = Service(base, Pool([], "tiny", thread), tmp_path, LIMITS, None)
            transport = httpx.ASGITransport(application(service, None, "the-engines-key", MOST))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asking:
                both = ["external", "training"]
                old, new = "x-stainless-package-version", "x-sdk-version"
                for name, version, kinds in (
                    (old, "0.25.0", ["training"]),
                    (new, "0.28.0", ["training"]),
                    (new, "0.38.0", both),
                    (new, "later", both),
                    (new, "0.\u00b2", both),
                ):
                    answer = await asking.get("/api/v1/checkpoints", headers={name: version.encode("latin-1")})
                    found = sorted(one["checkpoint_type"] for one in answer.json()["checkpoints"])
                    assert found == kinds, version
            await service.close()

    run(scenario())


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primerl.tinker.routes.MOST_BODY", 1000)
    service: Any = None  # is not asked

    async def answered(size: int) -> tuple[int, str]:
        transport = httpx.ASGITransport(application(service, None, "the-engines-key", MOST))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            kind = {"Content-Type": "application/x-protobuf"}
            answer = await client.post("/api/v1/forward_backward", content=bytes(size), headers=kind)
            return answer.status_code, answer.json()["detail"]

    assert asyncio.run(answered(1001)) == (413, "the body is larger than 1000 bytes; send fewer datums in a call")
    assert asyncio.run(answered(1000))[0] == 422


# Without a key


def test_only_this_machine_is_answered_without_a_key() -> None:
    service: Any = None  # is not asked

    async def answered(headers: dict[str, str]) -> tuple[int, str]:
        transport = httpx.ASGITransport(application(service, None, "the-engines-key", MOST))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1") as client:
            answer = await client.get("/nothing", headers=headers)
            return answer.status_code, answer.json()["detail"]

    for host in ("localhost:1", "127.0.0.2", "[::1]:1"):
        assert asyncio.run(answered({"Host": host}))[0] == 404, host
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "evil.example/127.0.0.1"):
        code, detail = asyncio.run(answered({"Host": host}))
        assert code == 403, host
        assert "ask for it as 127.0.0.1" in detail
    code, detail = asyncio.run(answered({"Origin": "http://localhost:1"}))
    assert code == 403
    assert "pages of a browser" in detail
