"""Tiny random models of many families: packed, in fp32, each gives the loss and the gradients that `transformers`
gives one sequence at a time; what cannot be exact is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import primerl.train.model.packed
import pytest
import torch
from families import ALTERNATING, FAMILIES, gradients, packed_loss, single_loss
from primerl.train.checkpoint.state import training_tensors
from primerl.train.model import families, support
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import ModelError, load_model
from primerl.train.model.proof import prove
from primerl.train.optim import Optimizer
from primerl.train.settings import OptimConfig
from settings_helpers import filled
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode uses
def test_packed_equals_one_at_a_time(family: str, folders: Any) -> None:
    ours = load_model(folders(family))
    prove(ours)
    theirs = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32, attn_implementation="eager")
    theirs.eval()  # as an engine computes
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


def test_the_page_lists_what_is_tested(repository: Path) -> None:
    text = (repository / "docs" / "models.md").read_text()
    table = text.partition("## Supported\n")[2].partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", table.partition("|---|")[2].replace("`h`", "h"))
    assert sorted(listed) == sorted(FAMILIES)


def test_the_page_lists_what_is_refused_by_its_type(repository: Path) -> None:
    text = (repository / "docs" / "models.md").read_text()
    table = text.partition("## Refused\n")[2].partition("\n\n")[2].partition("\n\n")[0]
    refused = table.partition("|---|---|")[2].replace("`transformers`", "").replace("`is_decoder`", "")
    assert sorted(re.findall(r"`([\w-]+)`", refused)) == sorted({*families.REFUSED, *families.ENCODERS})
    (row,) = [row for row in text.splitlines() if row.startswith("| `flash-linear-attention`")]
    fla = {family for family, needed in families.GPU_PACKAGES.items() if needed == families.FLASH_LINEAR_ATTENTION}
    assert set(re.findall(r"`(\w+)`", row.partition("|")[2])) >= fla
    (row,) = [row for row in text.splitlines() if row.startswith("| `mamba-ssm`")]
    assert set(re.findall(r"`(\w+)`", row)) >= set(families.GPU_PACKAGES) - fla


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_written_out_attention_in_blocks(family: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(folders(family))
    expected = packed_loss(whole)
    expected.backward()
    monkeypatch.setattr(primerl.train.model.packed, "BLOCK_QUERIES", 7)
    blocks = load_model(folders(family))
    loss = packed_loss(blocks)
    loss.backward()
    assert abs(loss.item() - expected.item()) <= 1e-6
    for name, gradient in gradients(whole).items():
        assert (gradients(blocks)[name] - gradient).abs().max().item() <= 1e-6, name


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "stablelm", "llama4_text"])
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
@pytest.mark.parametrize("family", ["qwen3", "stablelm"])
def test_compiled_layers_give_the_same(family: str, folders: Any) -> None:
    plain, compiled = load_model(folders(family)), load_model(folders(family))
    counters.clear()
    prepare(compiled, "none", compile_layers=True, backend="aot_eager")
    for model in (plain, compiled):
        packed_loss(model).backward()
    for name, gradient in gradients(plain).items():
        assert (gradients(compiled)[name] - gradient).abs().max().item() <= 1e-6, name
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # Family, changes, why its type is refused, what the proof finds.
    (
        "mamba",
        {"num_hidden_layers": 1},
        "the scan of its Mamba-1 layers cannot be given the starts of packed sequences",
        "layers of type linear_attention, which cannot be given",
    ),
    ("jamba", JAMBA, "the scan of its Mamba-1 layers cannot be given", "layers of type linear_attention, which cannot"),
    (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"]},
        "its lightning attention cannot be given",
        "layers of type linear_attention",
    ),
    (
        "recurrent_gemma",
        {"lru_width": 32, "num_hidden_layers": 3},
        "its recurrence cannot be given",
        "depend on the sequences it is packed with",
    ),
    ("xlstm", {}, "its recurrence cannot be given", "depend on the sequences it is packed with"),
    ("bloom", {"n_layer": 2, "n_head": 4}, "with attention of its own", "with attention of its own"),
    (
        "phimoe",
        {"num_local_experts": 4},
        "computes with random numbers while it is trained",
        "computes with random numbers while it is trained",
    ),
    (
        "mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 2},
        "with attention of its own",
        r"\(mpt\): its forward pass over packed sequences fails: Attr",
    ),
    ("doge", {}, "its attention computes its own mask", "computes its own attention mask"),
    ("bert", {"is_decoder": False}, "lets tokens see later ones", "lets tokens see later ones"),
    (
        "modernbert-decoder",
        ALTERNATING,
        "its output layer has arithmetic",
        "its logits are not those of its output layer",
    ),
]


@pytest.mark.parametrize(("family", "changes", "by_type", "by_proof"), REFUSED)
@pytest.mark.filterwarnings("ignore")  # of models that are not trained
def test_what_cannot_be_exact_is_refused(
    family: str,
    changes: dict[str, Any],
    by_type: str,
    by_proof: str,
    folders: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its type, before the weights are loaded; and by the proof too, so that the list refuses nothing that could be
    trained, and others of the kind are found out."""
    with pytest.raises(ModelError, match=by_type) as caught:
        load_model(folders(family, **changes))
    assert family in str(caught.value)
    assert "docs/models.md" in str(caught.value) or "train a decoder" in str(caught.value)
    monkeypatch.setattr(support, "REFUSED", {})
    monkeypatch.setattr(support, "ENCODERS", frozenset())
    model = load_model(folders(family, **changes))
    with pytest.raises(ModelError, match=by_proof) as caught:
        prove(model)
    told = str(caught.value)
    assert type(model).__name__ in told or "Attention" in told
    assert "not supported" in told or "docs/models.md" in told or "train a decoder" in told


@pytest.mark.parametrize(("family", "changes"), [("gptj", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4})])
def test_attention_that_cannot_be_told_anything_is_refused(
    family: str, changes: dict[str, Any], folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "REFUSED", {})
    with pytest.raises(
        ModelError, match=rf"this architecture \({family}\) with attention of its own, .* not supported"
    ):
        load_model(folders(family, **changes))


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("seed_oss", "attention_dropout 0.1, residual_dropout 0.1"),
        ("gpt2", "resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1"),
    ],
)
def test_dropout_is_set_to_0(family: str, asked: str, folders: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Engines compute without; and what is saved says what was computed."""
    folder = folders(family)
    caplog.set_level("INFO", logger="primerl")
    model = load_model(folder)
    assert f"asks for dropout ({asked}" in caplog.text
    prove(model)
    asking = [name for name, value in model.config.to_dict().items() if "drop" in name and value]
    assert asking == []
    caplog.clear()
    load_model(folders("qwen3"))
    assert "dropout" not in caplog.text


def test_dropout_that_no_key_is_known_of_is_refused(folders: Any) -> None:
    model = load_model(folders("qwen3"))
    model.base_model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match=r"Qwen3Attention asks for dropout \(0.1\).* set it to 0 in the model's"):
        prove(model)
    model = load_model(folders("qwen3"))
    model.base_model.layers[1].mlp.act_fn = torch.nn.Dropout(0.1)
    with pytest.raises(ModelError, match=r"dropout \(model.layers.1.mlp.act_fn, 0.1\)"):
        prove(model)


LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": 4 * [1.0], "long_factor": 4 * [3.0]}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("phi3", {**LONG, "original_max_position_embeddings": 16}),
        ("llama", {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}),
    ],
)
def test_positions_of_a_longer_sequence_are_not_given_to_shorter_ones(family: str, rope: Any, folders: Any) -> None:
    folder = folders(family, rope_parameters=rope, original_max_position_embeddings=16)
    model, theirs = load_model(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prove(model)
    # The frequencies of the longest sequence would be those of the whole row.
    with pytest.raises(
        ModelError, match=r"above 16 tokens.* cannot be packed together; .* longer than 16 \(`seq_len`\)"
    ):
        packed_loss(model, [9, 30])
    for lengths in ([9, 16, 3], [30, 17]) if family == "phi3" else ([9, 16, 3],):
        assert abs(packed_loss(model, lengths).item() - single_loss(theirs, lengths).item()) <= 1e-5


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
    optimizer = Optimizer(model.named_parameters(), filled(OptimConfig, type="sgd", lr=1.0, max_norm=1e9), 10)
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
    optimizer = Optimizer(half.named_parameters(), filled(OptimConfig), 10)
    one, other = packed_loss(exact), packed_loss(half)
    assert other.dtype == torch.float32
    assert abs(one.item() - other.item()) < 0.02 * one.item()
    one.backward()
    other.backward()
    for parameter, kept in zip(exact.parameters(), optimizer.parameters, strict=True):
        assert kept.grad is not None
        similarity = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), kept.grad.flatten(), dim=0)
        assert similarity > 0.97
