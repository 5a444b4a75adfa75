"""Tiny random models of many families: packed, in fp32, each gives the loss and the gradients that `transformers`
gives one sequence at a time; what cannot be exact is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import primerl.train.attention
import pytest
import torch
from primerl.train.checkpoint import training_tensors
from primerl.train.config import OptimConfig
from primerl.train.distributed import Ranks
from primerl.train.flops import ModelShape
from primerl.train.logprobs import token_logprobs
from primerl.train.memory import prepare
from primerl.train.model import ModelError, PackedSequences, load_model, output_head, predicted_hidden
from primerl.train.optim import Optimizer
from primerl.train.proof import prove
from primerl.train.routing import RoutingLoad, routing_metrics
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "output_router_logits": False}
ALTERNATING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "glm4": {},
    "starcoder2": {"use_bias": True, "embedding_dropout": 0.0, "residual_dropout": 0.0},
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8, "layer_types": ALTERNATING},
    "gemma": {},
    "gemma2": {
        "sliding_window": 8,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"sliding_window": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16},
    "qwen3_moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "mixtral": {**MOE, "num_local_experts": 4, "sliding_window": None},
    "olmoe": {**MOE, "num_experts": 4},
    "gpt_oss": {**MOE, "num_local_experts": 4, "sliding_window": 8, "layer_types": ALTERNATING},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
    },
}
ROUTED = {"qwen3_moe", "mixtral", "olmoe", "gpt_oss"}
LENGTHS = [30, 5, 21, 8, 9, 2, 33]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(family: str, **changes: Any) -> Path:
        key = f"{family}{changes}"
        if key not in made:
            config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **changes})
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    # Zeros and ones, which norms, biases and sinks begin with, would hide what is left out.
                    parameter.add_(0.1 * torch.randn_like(parameter))
                    assert parameter.dtype == torch.float32, name
            made[key] = tmp_path_factory.mktemp("models") / family
            model.save_pretrained(made[key])
        return made[key]

    return folder


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, SMALL["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def packed_loss(model: Any) -> Tensor:
    rows = sequences()
    packed, token_ids = PackedSequences.from_lengths(LENGTHS), torch.cat(rows)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    hidden = predicted_hidden(model, token_ids, packed, targets)
    logprobs, _ = token_logprobs(hidden, output_head(model), token_ids[targets], chunk_tokens=16)
    return -logprobs.mean()


def single_loss(model: Any) -> Tensor:
    losses = []
    for row in sequences():
        logits = model(input_ids=row.unsqueeze(0)).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return torch.stack(losses).sum() / sum(length - 1 for length in LENGTHS)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_at_a_time(family: str, folders: Any) -> None:
    ours = load_model(folders(family))
    prove(ours)
    theirs = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32, attn_implementation="eager")
    theirs.train()
    loss, expected = packed_loss(ours), single_loss(theirs)
    assert abs(loss.item() - expected.item()) <= 1e-5
    loss.backward()
    expected.backward()
    ours_by_name, expected_by_name = gradients(ours), gradients(theirs)
    assert ours_by_name.keys() == expected_by_name.keys()
    worth = 0
    for name, gradient in expected_by_name.items():
        assert (ours_by_name[name] - gradient).abs().max().item() <= 1e-5, name
        worth += bool(gradient.abs().max() > 1e-5)
    assert worth >= 0.9 * len(expected_by_name), "gradients should be worth comparing"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_written_out_attention_in_blocks(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(folders(family))
    expected = packed_loss(whole)
    expected.backward()
    monkeypatch.setattr(primerl.train.attention, "QUERIES", 7)
    blocks = load_model(folders(family))
    loss = packed_loss(blocks)
    loss.backward()
    assert abs(loss.item() - expected.item()) <= 1e-6
    for name, gradient in gradients(whole).items():
        assert (gradients(blocks)[name] - gradient).abs().max().item() <= 1e-6, name


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_activation_checkpointing_changes_nothing_but_memory(family: str, how: str, folders: Any) -> None:
    plain, saving = load_model(folders(family)), load_model(folders(family))
    prepare(saving, how, compile_layers=False)
    kept = []
    for model in (plain, saving):
        held = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal held
            held += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = packed_loss(model)
        kept.append(held)
        loss.backward()
    for name, gradient in gradients(plain).items():
        assert torch.allclose(gradients(saving)[name], gradient, atol=1e-7), name
    assert kept[1] < kept[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own tracing
def test_compiled_layers_give_the_same(folders: Any) -> None:
    plain, compiled = load_model(folders("qwen3")), load_model(folders("qwen3"))
    prepare(compiled, "none", compile_layers=True, backend="aot_eager")
    for model in (plain, compiled):
        packed_loss(model).backward()
    for name, gradient in gradients(plain).items():
        assert (gradients(compiled)[name] - gradient).abs().max().item() <= 1e-6, name
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.parametrize("family", sorted(ROUTED))
def test_routing_is_measured(family: str, folders: Any) -> None:
    model = load_model(folders(family))
    load = RoutingLoad(model)
    prepare(model, "full", compile_layers=False)
    with load.recording():
        loss = packed_loss(model)
    loss.backward()  # computes the layers again, unrecorded
    ranks = Ranks(0, 1, torch.device("cpu"))
    counted = load.take(ranks)
    assert counted is not None
    loads, confidence = counted
    assert loads.shape == (2, 4)
    assert loads.sum(1).tolist() == [2.0 * sum(LENGTHS)] * 2
    assert confidence[:, 1].tolist() == [float(sum(LENGTHS))] * 2
    metrics = routing_metrics(loads, confidence)
    expected = [(max(row) / (sum(row) / 4)) - 1 for row in loads.tolist()]
    assert metrics["max_vio/mean"] == pytest.approx(sum(expected) / 2)
    assert 0.5 < metrics["routing_confidence/mean"] < 1.0
    assert load.take(ranks) is None


def test_a_dense_model_has_no_routing(folders: Any) -> None:
    load = RoutingLoad(load_model(folders("qwen3")))
    assert load.take(Ranks(0, 1, torch.device("cpu"))) is None


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mamba", {"num_hidden_layers": 1}, "layers of type linear_attention"),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, "dropout"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ("llama", {"attention_dropout": 0.1}, "dropout"),
    ],
)
def test_what_cannot_be_exact_is_refused(family: str, changes: dict[str, Any], message: str, folders: Any) -> None:
    model = load_model(folders(family, **changes))
    with pytest.raises(ModelError, match=message) as caught:
        prove(model)
    assert "not supported" in str(caught.value) or "exact" in str(caught.value) or "config.json" in str(caught.value)


def test_logits_that_are_not_those_of_the_output_layer_are_refused(folders: Any) -> None:
    model = load_model(folders("qwen3"))
    model.config.logit_scale = 0.5  # which this architecture does not use
    with pytest.raises(ModelError, match="its logits are not those of its output layer"):
        prove(model)


def test_sequences_that_leak_are_refused(folders: Any) -> None:
    model = load_model(folders("qwen3"))
    layer = model.base_model.layers[0]
    layer.register_forward_hook(lambda _module, _given, output: output + 0.1 * output.roll(1, dims=1))
    with pytest.raises(ModelError, match="packing is not exact"):
        prove(model)


def test_bfloat16_is_updated_in_fp32(folders: Any) -> None:
    """Updates far below the spacing of bf16 add up, gradients of micro-batches too; a checkpoint holds the copies."""
    model = load_model(folders("qwen3"), "bfloat16")
    prove(model)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(type="sgd", lr=1.0, max_norm=1e9), 10)
    weight = model.base_model.layers[0].mlp.up_proj.weight
    index = [name for name, _ in model.named_parameters()].index("model.layers.0.mlp.up_proj.weight")
    copy = optimizer.parameters[index]
    start = weight.detach().float()
    assert torch.equal(copy, start)
    assert copy.dtype == torch.float32
    for _ in range(3):
        (weight * 2.0**-13).sum().backward()
    (weight * 2.0**-20).sum().backward()  # lost beside the others in bf16
    assert weight.grad is None
    assert torch.equal(copy.grad, torch.full_like(copy, 3 * 2.0**-13 + 2.0**-20))
    for step in range(1, 5):
        if step > 1:
            (weight * 2.0**-13).sum().backward()
        optimizer.step(step)
    expected = start - (6 * 2.0**-13 + 2.0**-20)
    assert torch.allclose(copy, expected, atol=1e-7, rtol=0)
    assert torch.equal(weight, copy.bfloat16())
    other_model = load_model(folders("qwen3"), "bfloat16")
    other = Optimizer(other_model.named_parameters(), optimizer.config, 10)
    saved = training_tensors(model, optimizer)
    for name, tensor in training_tensors(other_model, other).items():
        tensor.copy_(saved[name])
    other.use_copies()
    assert torch.equal(other.parameters[index], copy)
    assert torch.equal(other_model.base_model.layers[0].mlp.up_proj.weight, weight)


def test_bfloat16_is_near_fp32(folders: Any) -> None:
    exact, half = load_model(folders("qwen3")), load_model(folders("qwen3"), "bfloat16")
    optimizer = Optimizer(half.named_parameters(), OptimConfig(), 10)
    one, other = packed_loss(exact), packed_loss(half)
    assert other.dtype == torch.float32
    assert abs(one.item() - other.item()) < 0.02 * one.item()
    one.backward()
    other.backward()
    for parameter, kept in zip(exact.parameters(), optimizer.parameters, strict=True):
        assert kept.grad is not None
        similarity = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), kept.grad.flatten(), dim=0)
        assert similarity > 0.97


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_flops_by_counting(family: str, folders: Any) -> None:
    """Against torch's own counter, which counts nothing of the CPU's fused attention."""
    model = load_model(folders(family))
    shape = ModelShape.of(model)
    lengths, trained = [12, 12], torch.arange(1, 12)
    packed, token_ids = PackedSequences.from_lengths(lengths), torch.arange(24)
    with FlopCounterMode(display=False) as counter:
        hidden = predicted_hidden(model, token_ids, packed, trained)
        token_logprobs(hidden, output_head(model), token_ids[trained])
    pairs = 0
    for window in shape.windows:
        pairs += sum(min(i + 1, window or i + 1) for length in lengths for i in range(length))
    expected = counter.get_total_flops() + 4 * shape.attention_width * pairs
    assert shape.flops(lengths, len(trained)) == pytest.approx(3 * expected, rel=1e-9)


def test_flops_of_a_mixture_count_the_experts_a_token_is_sent_to(folders: Any) -> None:
    shape = ModelShape.of(load_model(folders("mixtral")))
    width, inner, heads, kv_heads, head = 32, 48, 4, 2, 8
    attention = width * head * (2 * heads + 2 * kv_heads)
    assert shape.matrix_parameters == 2 * (attention + 4 * width + 2 * 3 * width * inner)
    assert shape.output_parameters == 96 * width
