"""Model FLOPs of every family, against what torch counts; and the peaks of devices."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from families import FAMILIES, UNCOUNTED
from primerl.train.distributed.ranks import ALONE
from primerl.train.model import flops, recurrent
from primerl.train.model.flops import COMPUTE_MORE, ModelShape, Performance, attentions, peak_of
from primerl.train.model.packed_model import ATTENTION, PackedSequences, load_model, output_head, predicted_hidden
from primerl.train.objective.logprobs import token_logprobs
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, DeepseekV3Config

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode uses

LENGTHS = [12, 12]
TRAINED = torch.arange(1, 12)

NOT_EXACT = {
    "gemma3n_text": 0.06,  # multiplies its streams with each other, which is nothing beside the rest in a real model
    "longcat_flash": 0.1,  # some experts compute nothing, and how often they are chosen is chance
}
"""Families -> how far the count may be off."""


def counted_states(monkeypatch: pytest.MonkeyPatch, model: Any, given: list[float]) -> None:
    """Layers with a state answer with what they are given, and note what they would multiply a token's vectors with."""

    def convolution(x: Any, weight: Any, *_args: Any, **_given: Any) -> Any:
        given.append(2 * weight.numel() * x.shape[2])
        return x

    def delta_rule(_query: Any, key: Any, value: Any, *_args: Any, **_given: Any) -> Any:
        given.append(2 * 3 * value.shape[2] * key.shape[3] * value.shape[3] * value.shape[1])
        return value, None

    def scan(x: Any, _dt: Any, _a: Any, b: Any, *_args: Any, **_given: Any) -> Any:
        given.append(2 * 2 * x.shape[2] * x.shape[3] * b.shape[3] * x.shape[1])
        return x

    for home in {sys.modules[type(mixer).__module__] for mixer in recurrent.mixers(model)}:
        for name in recurrent.TOLD:
            stand_in = convolution if "conv1d_fn" in name else delta_rule if "delta" in name else scan
            if hasattr(home, name) and "split" not in name:
                monkeypatch.setattr(home, name, stand_in)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COMPUTE_MORE) - UNCOUNTED))
def test_flops_by_counting(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts the matrix products of a forward pass; what attention multiplies is told by what it is given."""
    model = load_model(folders(family))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # a loop over experts, which the counter understands
    shape = ModelShape.of(model)
    given: list[float] = []
    counted_states(monkeypatch, model, given)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        heads = query.shape[1]
        window = options.get("sliding_window")
        pairs = sum(min(i + 1, window or i + 1) for length in LENGTHS for i in range(length))
        given.append(2 * heads * (query.shape[3] + value.shape[3]) * pairs)
        return value.repeat_interleave(heads // value.shape[1], 1).transpose(1, 2).contiguous(), None

    own = AttentionInterface()[ATTENTION]
    AttentionInterface.register(ATTENTION, attention)
    packed, token_ids = PackedSequences.from_lengths(LENGTHS), torch.arange(24)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            hidden = predicted_hidden(model, token_ids, packed, TRAINED)
            token_logprobs(hidden, output_head(model), token_ids[TRAINED])
    finally:
        AttentionInterface.register(ATTENTION, own)
    if family == "llama4_text":
        # Attention in chunks of 8 of 12 tokens; and transformers computes every expert for every token.
        assert [part.chunk for part in shape.attentions] == [8, None]
        assert shape.attentions[0].products([12]) == 4 * 8 * (8 * 9 / 2 + 4 * 5 / 2)
        return
    expected = 3 * (counter.get_total_flops() + sum(given))
    assert shape.flops(LENGTHS, len(TRAINED)) == pytest.approx(expected, rel=NOT_EXACT.get(family, 1e-9))


def test_flops_of_a_mixture_count_the_experts_a_token_is_sent_to(folders: Any) -> None:
    shape = ModelShape.of(load_model(folders("mixtral")))
    width, inner, heads, kv_heads, head = 32, 48, 4, 2, 8
    attention = width * head * (2 * heads + 2 * kv_heads)
    assert shape.matrix_parameters == 2 * (attention + 4 * width + 2 * 3 * width * inner)
    assert shape.output_parameters == 264 * width


def test_the_kernel_of_a_convolution_is_none_of_a_mixtures_experts(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folders("qwen3_5_moe_text"))
    monkeypatch.setattr(flops, "attentions", lambda _config: ())
    whole = ModelShape.of(model).matrix_parameters
    kernel = model.base_model.layers[0].linear_attn.conv1d
    size, kernel.weight = kernel.weight.numel(), torch.nn.Parameter(torch.zeros(0))
    assert whole - ModelShape.of(model).matrix_parameters == size


def test_latent_attention_is_as_wide_as_its_queries_and_values() -> None:
    config = DeepseekV3Config()
    assert {part.width for part in attentions(config)} == {128 * (128 + 64 + 128) / 2} == {20480.0}


def test_heads_may_differ_from_layer_to_layer(folders: Any) -> None:
    found = ModelShape.of(load_model(folders("gemma4_text"))).attentions
    assert [(part.width, part.window) for part in found] == 2 * [(4 * 8, 8), (4 * 16, None)]


@pytest.mark.parametrize("family", sorted({*COMPUTE_MORE, *UNCOUNTED}))
def test_where_flops_are_not_known_there_is_no_mfu(family: str, folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A metric keeps no model from being trained."""
    performance = Performance.of(load_model(folders(family)), torch.float32, ALONE, peak_tflops=1.0)
    assert performance.flops([5, 3], 4) == 0.0
    assert "perf/mfu" not in performance.metrics(8.0, 0.0, 1.0)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert COMPUTE_MORE.get(family, "the formula does not count what layers of type") in said
    assert "perf/mfu is omitted" in said


def test_a_config_that_does_not_tell_its_heads_keeps_no_model_from_being_trained(
    folders: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folders("qwen3"))
    monkeypatch.setattr(flops, "attentions", lambda config: config.number_of_heads)
    performance = Performance.of(model, torch.float32, ALONE, peak_tflops=1.0)
    assert performance.shape is None
    assert "perf/mfu is omitted: the model FLOPs of Qwen3ForCausalLM are not known: AttributeError" in caplog.text


def test_a_peak_may_be_given(folders: Any) -> None:
    model = load_model(folders("qwen3"))
    given = Performance.of(model, torch.float32, ALONE, peak_tflops=0.5)
    work = given.flops([5, 3], 4)
    assert given.metrics(8.0, work, 2.0)["perf/mfu"] == pytest.approx(work / 2.0 / 0.5e12)
    assert "perf/mfu" not in Performance.of(model, torch.float32, ALONE).metrics(8.0, work, 2.0)  # of a CPU


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA L40", 181.0, 90.5),
        ("NVIDIA L40S", 362.0, 91.6),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA A10G", 70.0, 31.2),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None, None),
        ("NVIDIA RTX A1000", None, None),
        ("NVIDIA RTX A6000", 154.8, 38.7),
        ("NVIDIA H100 80GB HBM3", 989.0, 67.0),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA H200", 989.0, 67.0),
        ("NVIDIA H20", 148.0, 44.0),
        ("NVIDIA H800", 989.0, 67.0),
        ("NVIDIA GH200 480GB", 989.0, 67.0),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 500.0, 120.0),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None, None),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("Tesla V100-SXM2-32GB", 125.0, 15.7),
        ("AMD Instinct MI300X", 1307.4, 163.4),
        ("AMD Instinct MI300A", None, None),
        ("NVIDIA RTX 4000 Ada Generation", None, None),
    ],
)
def test_devices_are_told_by_whole_words(name: str, half: float | None, single: float | None) -> None:
    assert peak_of(name) == (half, single)
