"""Packed sequences give what one sequence at a time gives, and the tiny model is the one its module describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import primerl.train.model.packed_model as model_module
import pytest
import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.model.packed_model import (
    ModelError,
    PackedSequences,
    _by_bucket,
    _varlen,
    dtype_on,
    flash_sizes,
    load_model,
    packed_attention,
    predicted_logits,
    takes_gqa,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, seed=3)
    return path


def random_sequences(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def packed_loss(model: Any, sequences: list[Tensor]) -> Tensor:
    """Sum of the cross-entropy of every token but the first of each sequence."""
    packed = PackedSequences.from_lengths([len(sequence) for sequence in sequences])
    token_ids = torch.cat(sequences)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    logits = predicted_logits(model, token_ids, packed, targets)
    return torch.nn.functional.cross_entropy(logits, token_ids[targets], reduction="sum")


def single_loss(model: Any, sequences: list[Tensor]) -> Tensor:
    """The same, one sequence at a time through `transformers`' own attention."""
    losses = []
    for sequence in sequences:
        logits = model(input_ids=sequence.unsqueeze(0)).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum"))
    return torch.stack(losses).sum()


def assert_same_loss_and_gradients(ours: Any, theirs: Any, sequences: list[Tensor]) -> None:
    loss, expected = packed_loss(ours, sequences), single_loss(theirs, sequences)
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    assert (loss - expected).abs().item() / tokens <= 1e-5
    (loss / tokens).backward()
    (expected / tokens).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = 0
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).abs().max().item() <= 1e-5, name
        compared += bool(parameter.grad.abs().max() > 1e-4)
    assert compared == len(gradients), "every parameter should have a gradient worth comparing"


@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [9, 9, 9],  # equal lengths need no empty slots
        [31, 40, 33, 25, 36],  # one bucket
        [2, 90, 41, 3, 17, 88, 1, 40, 5],  # several buckets, out of order
    ],
)
def test_packed_equals_one_at_a_time(folder: Path, lengths: list[int]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert_same_loss_and_gradients(load_model(folder), theirs, random_sequences(lengths))


def test_sliding_window_equals_one_at_a_time(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_same_loss_and_gradients(load_model(tmp_path), theirs, random_sequences([30, 5, 21, 8, 9]))


def test_a_sequence_does_not_see_its_neighbours(folder: Path) -> None:
    model = load_model(folder)
    first, second, third = random_sequences([12, 20, 15])
    packed = PackedSequences.from_lengths([12, 20, 15])
    targets = torch.arange(13, 32)
    with torch.no_grad():
        before = predicted_logits(model, torch.cat([first, second, third]), packed, targets)
        after = predicted_logits(model, torch.cat([255 - first, second, 255 - third]), packed, targets)
        changed = predicted_logits(model, torch.cat([first, 255 - second, third]), packed, targets)
    assert torch.allclose(before, after, atol=1e-6)
    assert not torch.allclose(before, changed, atol=1e-2)


def test_buckets_hold_every_token_once_and_bound_the_waste() -> None:
    lengths = [1, 64, 3, 33, 31, 2, 64, 7]
    packed = PackedSequences.from_lengths(lengths)
    tokens = torch.cat([bucket.tokens for bucket in packed.buckets])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for bucket in packed.buckets:
        assert len(bucket.tokens) * 2 >= bucket.rows * bucket.length
    assert packed.boundaries.tolist() == [0, 1, 65, 68, 101, 132, 134, 198, 205]


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_lengths_must_be_positive(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PackedSequences.from_lengths(lengths)


def test_attention_that_is_not_told_of_sequences_refuses(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"does not get the sequence boundaries, .* the architecture is not supported"):
        load_model(folder)(input_ids=torch.zeros(1, 4, dtype=torch.int64))


class _Bidirectional(torch.nn.Linear):
    is_causal = False


@pytest.mark.parametrize(
    ("asked", "mask", "module", "message"),
    [
        ({"dropout": 0.1}, None, torch.nn.Linear(1, 1), r"dropout \(0.1\).*; set it to 0 in the model's config.json"),
        ({}, torch.ones(1, 1, 4, 4), torch.nn.Linear(1, 1), "its own attention mask, .* is not supported"),
        ({}, None, _Bidirectional(1, 1), r"lets tokens see later ones .*; train a decoder"),
    ],
    ids=["dropout", "mask", "bidirectional"],
)
def test_attention_that_asks_for_more_is_refused(
    asked: dict[str, Any], mask: Tensor | None, module: torch.nn.Module, message: str
) -> None:
    tensor = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ModelError, match=message):
        packed_attention(
            module,
            tensor,
            tensor,
            tensor,
            mask,
            scaling=1.0,
            packed=PackedSequences.from_lengths([4]),
            **asked,
        )


def documented_varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its documentation describes it, written out sequence by sequence."""
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    left, right = options["window_size"]
    assert right == 0
    parts = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        own_q, own_k, own_v = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        own_k, own_v = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (own_k, own_v))
        scores = own_q @ own_k.transpose(1, 2) * options["scale"]
        distance = torch.arange(end - begin).unsqueeze(1) - torch.arange(end - begin)
        visible = (distance >= 0) & ((left < 0) | (distance <= left))
        parts.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(parts)


def varlen_attn_with_gqa(q: Tensor, k: Tensor, v: Tensor, *given: Any, enable_gqa: bool, **options: Any) -> Tensor:
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return documented_varlen_attn(q, k, v, *given, **options)


def varlen_attn_of_2_11(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    return documented_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kernel", [varlen_attn_with_gqa, varlen_attn_of_2_11])
def test_varlen_path_is_called_for_the_same_attention(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, window: int | None
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(model_module, "FLASH_TAKES_GQA", takes_gqa(kernel))
    packed = PackedSequences.from_lengths([5, 19, 1, 8])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(33, heads, 8, generator=generator) for heads in (4, 2, 2))
    ours = _varlen(q, k, v, packed, 0.3, window)
    assert torch.allclose(ours, _by_bucket(q, k, v, packed, 0.3, window), atol=1e-5)


def test_compiled_attention_is_the_same_for_any_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles a layer a few times only, and then never again. Flash attention itself is one opaque call."""

    @torch.library.custom_op("primerl_tests::flash", mutates_args=())
    def flash(q: Tensor, boundaries: Tensor, longest: int) -> Tensor:
        return q.clone()

    flash.register_fake(lambda q, boundaries, longest: torch.empty_like(q))
    graphs = []

    def counting(graph: Any, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def through_flash(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, *_: Any) -> Tensor:
        return _varlen(q, k, v, packed, 1.0, None)

    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, cu, _cu, most, *_, **__: flash(q, cu, most))
    monkeypatch.setattr(model_module, "_by_bucket", through_flash)
    torch._dynamo.reset()
    module = torch.nn.Identity()

    @torch.compile(backend=counting, dynamic=True)
    def attend(q: Tensor, packed: PackedSequences) -> Tensor:
        return packed_attention(module, q, q, q, None, scaling=1.0, packed=packed, sliding_window=64)[0]

    for count in range(1, 13):
        lengths = [3 + (7 * index) % 11 for index in range(count)]
        attend(torch.ones(1, 2, sum(lengths), 8), PackedSequences.from_lengths(lengths))
    torch._dynamo.reset()
    assert len(graphs) <= 3


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_attention_on_a_gpu_keeps_the_scores_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    """Heads of 512, which flash attention has no kernel for: nothing may ask for GQA or bring a mask of [L, L], which
    only the kernel takes that writes the scores out."""
    asked: list[tuple[int, ...]] = []

    def fused(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, enable_gqa: bool, **_: Any) -> Tensor:
        assert not enable_gqa
        assert attn_mask is None
        assert q.shape[1] == k.shape[1] == v.shape[1]
        asked.append(tuple(q.shape))
        return torch.empty_like(q)

    monkeypatch.setattr(model_module, "scaled_dot_product_attention", fused)
    with FakeTensorMode():
        packed = PackedSequences.from_lengths([40, 7], "cuda")
        q, k, v = (torch.empty(1, heads, 47, 512, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=1.0, packed=packed, sliding_window=window)
        assert (tuple(out.shape), out.device.type, out.dtype) == ((1, 47, 4, 512), "cuda", dtype)
    assert len(asked) == (2 if window is None else 0)


@pytest.mark.parametrize("window", [None, 6])
def test_what_a_gpu_computes_without_flash_attention_is_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    packed = PackedSequences.from_lengths([5, 19, 1, 8])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(33, heads, 8, generator=generator) for heads in (4, 2, 2))
    here = _by_bucket(q, k, v, packed, 0.3, window)
    monkeypatch.setattr(model_module, "_on_gpu", lambda tensor: True)
    assert torch.allclose(_by_bucket(q, k, v, packed, 0.3, window), here, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 6])
def test_varlen_path_on_a_gpu(window: int | None) -> None:
    packed = PackedSequences.from_lengths([5, 190, 1, 64], "cuda")
    q, k, v = (torch.randn(260, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    ours = _varlen(q, k, v, packed, 0.125, window).float()
    exact = _by_bucket(q.float(), k.float(), v.float(), packed, 0.125, window)
    assert (ours - exact).abs().max().item() < 2e-2


def test_heads_that_flash_attention_has_no_kernel_for_go_another_way() -> None:
    found = [flash_sizes(*sizes) for sizes in ((128, 128), (256, 256), (192, 128), (512, 512), (60, 60))]
    assert found == [True, True, False, False, False]


def test_what_is_computed_in_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert (dtype_on(cpu, None), dtype_on(gpu, None)) == ("float32", "bfloat16")
    assert (dtype_on(cpu, "bfloat16"), dtype_on(gpu, "float32")) == ("bfloat16", "float32")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert dtype_on(gpu, None) == "float32"  # a V100


def test_missing_and_broken_model_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere has no config\.json"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)


def test_tiny_model_and_its_tokenizer(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 140_224
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 262
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Reverse: qwxyz"}], add_generation_prompt=True, return_dict=False
    )
    assert ids == [258, 260, 198, 49, 68, 85, 68, 81, 82, 68, 25, 220, 80, 86, 87, 88, 89, 256, 198, 258, 261, 198]
    text = "user: naïve 文字\t\x00\n  assistant<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a user<|im_end|>") == [64, 220, 260, 256]
    assert tokenizer.eos_token_id == 256
    assert tokenizer.pad_token_id == 257


def test_tiny_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    states = []
    for name, seed, noise in (("a", 1, 0), ("b", 1, 7), ("c", 2, 0)):
        torch.manual_seed(noise)
        write_model(tmp_path / name, TinyConfig(hidden_size=32, num_hidden_layers=1), seed=seed)
        states.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).model.embed_tokens.weight)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_tiny_vocabulary_must_hold_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size is 256"):
        write_model(tmp_path, TinyConfig(vocab_size=256))


def test_a_folder_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    """transformers would train on random numbers in their place."""
    write_model(tmp_path, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks tensors .*: model\.layers\.1\.self_attn\.q_proj\.weight;"):
        load_model(tmp_path)
