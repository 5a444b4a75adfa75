"""Layers with a state over packed rows: what `transformers`' own functions give one sequence at a time, where each of
them begins; and which kernel is taken on a GPU, with which arguments."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from families import WITH_STATE, gradients, packed_loss, single_loss
from primerl.train.adapters.lora import add_adapter
from primerl.train.model import recurrent
from primerl.train.model.layers import prepare
from primerl.train.model.packed import by_bucket
from primerl.train.model.packed_model import ModelError, PackedSequences, load_model
from primerl.train.model.proof import prove
from primerl.train.model.recurrent import Kernel, convolution, delta_rule, in_parts, mixers, scan, slower_kernels
from primerl.train.settings import LoraConfig
from settings_helpers import filled
from torch import Tensor
from transformers import AutoModelForCausalLM

LENGTHS = (3, 70, 1, 5)
T = sum(LENGTHS)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def stock(family: str, name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found = getattr(module, name)
    return getattr(found, "__wrapped__", found) if hasattr(found, recurrent.MARK) else found


# ---- Exact, on a CPU


@pytest.mark.parametrize("family", sorted(WITH_STATE))
def test_loss_and_gradients_are_those_of_one_sequence_at_a_time(
    family: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = load_model(folders(family))
    prove(ours)
    theirs = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32, attn_implementation="eager")
    loss, expected = packed_loss(ours), single_loss(theirs)
    assert abs(loss.item() - expected.item()) <= 1e-6
    loss.backward()
    expected.backward()
    for name, gradient in gradients(theirs).items():
        off = (gradients(ours)[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert off.item() <= 1e-4, name
    # The control: as `transformers` computes the row, where nothing says where sequences begin.
    monkeypatch.setattr(recurrent, "_packed_of", lambda given: given.pop("packed", None) and given.pop("seq_idx", None))
    assert abs(packed_loss(ours).item() - expected.item()) > 1e-4
    with pytest.raises(ModelError, match="depend on the sequences it is packed with"):
        prove(ours)


def test_gradients_that_leak_are_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel whose forward pass alone knows where sequences begin."""
    model = load_model(folders("qwen3_5_text"))

    class Leaks(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: Any, gradient: Tensor) -> Tensor:
            return gradient + 0.1 * gradient.roll(20, dims=1)

    module = recurrent._home(mixers(model)[0])
    told = module.torch_chunk_gated_delta_rule

    def leaking(query: Tensor, *args: Any, **given: Any) -> Any:
        out, state = told(query, *args, **given)
        return Leaks.apply(out), state

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", leaking)
    with pytest.raises(ModelError, match="gradients of a sequence depend on the sequences it is packed with"):
        prove(model)


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5_text", "lfm2"])
def test_activation_checkpointing(family: str, how: str, folders: Any) -> None:
    plain, saving = load_model(folders(family)), load_model(folders(family))
    prepare(saving, how, compile_layers=False)
    for model in (plain, saving):
        packed_loss(model).backward()
    for name, gradient in gradients(plain).items():
        assert torch.allclose(gradients(saving)[name], gradient, atol=1e-7), name


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "lfm2_moe"])
def test_an_adapter_has_none_of_the_convolutions(family: str, folders: Any) -> None:
    model = load_model(folders(family))
    add_adapter(model, filled(LoraConfig, rank=4), folders(family), seed=0)
    loss = packed_loss(model)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(gradients(model))
    assert any("in_proj" in name for name in trained)
    assert not any("conv1d" in name or ".conv.conv" in name for name in trained)


def test_by_bucket_gives_each_sequence_its_own_row() -> None:
    packed, x = PackedSequences.from_lengths(LENGTHS), random(1, T, 2)
    found = by_bucket(lambda rows: rows.cumsum(1), packed, [x])
    expected = torch.cat([part.cumsum(0) for part in torch.split(x[0], list(LENGTHS))])
    assert torch.allclose(found[0], expected, atol=1e-6)


def test_a_state_to_begin_with_is_refused() -> None:
    rule = delta_rule(lambda *_args, **_given: None, recurrent.DELTA_RULE)
    x, packed = random(1, T, 1, 2), PackedSequences.from_lengths(LENGTHS)
    with pytest.raises(ModelError, match="cannot begin with a state"):
        rule(x, x, x, x[..., 0], x[..., 0], packed=packed, initial_state=x)


def test_other_models_compute_what_they_did(folders: Any) -> None:
    """Without `packed`, `transformers`' own function is called with its own arguments."""
    load_model(folders("qwen3_5_text"))
    given: dict[str, Any] = {}
    own = convolution(lambda *_args, **keywords: given.update(keywords), recurrent.CONVOLUTION)
    own(random(1, 2, T), random(2, 4), activation="silu", seq_idx=None)
    assert given == {"activation": "silu", "seq_idx": None}


# ---- On a GPU: the choice and what is handed over


@pytest.fixture
def called(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Packages whose functions note what they are called with, as on a machine with a GPU."""
    # `transformers` takes what there is when it imports a model's code, which stays.
    for family in sorted(WITH_STATE):
        load_model(folders(family))
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def recorder(name: str, kernel: Kernel) -> Callable[..., Any]:
        def record(*args: Any, **given: Any) -> Any:
            calls[name] = args, given
            return (args[2], None) if kernel.package == "flash-linear-attention" else args[0]

        return record

    for kernel in (recurrent.CONVOLUTION, recurrent.DELTA_RULE, recurrent.KIMI_DELTA_RULE, recurrent.MAMBA_2):
        parts = kernel.module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        monkeypatch.setattr(sys.modules[kernel.module], kernel.name, recorder(kernel.name, kernel), raising=False)
    monkeypatch.setattr(recurrent, "on_gpu", lambda _tensor: True)
    monkeypatch.setattr(recurrent, "CHOSEN", {})
    recurrent._imported.cache_clear()
    yield calls
    recurrent._imported.cache_clear()


def never(*_args: Any, **_given: Any) -> Any:
    raise AssertionError("torch code is called on a GPU")


def test_convolutions_on_a_gpu_are_given_sequence_ids(called: Any) -> None:
    packed, weight, bias = PackedSequences.from_lengths(LENGTHS), random(16, 4), random(16)
    x = random(1, T, 24).transpose(1, 2)[:, 4:20]
    convolution(never, recurrent.CONVOLUTION)(x, weight, bias, activation="silu", packed=packed)
    (given, *others), keywords = called["causal_conv1d_fn"]
    assert torch.equal(given, x)
    assert given.stride(1) == 1
    assert given.stride(2) % 8 == 0
    assert [one is other for one, other in zip(others, (weight, bias), strict=True)] == [True, True]
    assert keywords.keys() == {"activation", "seq_idx"}
    assert keywords["activation"] == "silu"
    assert keywords["seq_idx"].dtype == torch.int32
    assert keywords["seq_idx"].tolist() == [[0] * 3 + [1] * 70 + [2] + [3] * 5]


def test_convolutions_in_an_unfit_layout_are_copied(called: Any) -> None:
    x = random(1, 16, T)
    convolution(never, recurrent.CONVOLUTION)(x, random(16, 4), seq_idx=PackedSequences.from_lengths(LENGTHS))
    (given, *_), _keywords = called["causal_conv1d_fn"]
    assert torch.equal(given, x)
    assert (given.stride(1), given.stride(2)) == (1, 16)


@pytest.mark.parametrize(
    ("kernel", "name"), [(recurrent.DELTA_RULE, "chunk_gated_delta_rule"), (recurrent.KIMI_DELTA_RULE, "chunk_kda")]
)
def test_the_delta_rule_on_a_gpu_is_given_boundaries(kernel: Kernel, name: str, called: Any) -> None:
    packed = PackedSequences.from_lengths(LENGTHS)
    query, key, value = (random(1, T, 2, size).bfloat16() for size in (8, 8, 4))
    g, beta = -random(1, T, 2).abs(), random(1, T, 2).sigmoid()
    rule = delta_rule(never, kernel)
    out, state = rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None,
        packed=packed,
    )
    positional, keywords = called[name]
    assert [one is other for one, other in zip(positional, (query, key, value), strict=True)] == [True] * 3
    assert keywords.keys() == {"g", "beta", "cu_seqlens", "use_qk_l2norm_in_kernel"}
    assert keywords["g"] is g
    assert keywords["beta"] is beta
    assert keywords["use_qk_l2norm_in_kernel"] is True
    assert keywords["cu_seqlens"].dtype == torch.int64
    assert keywords["cu_seqlens"].tolist() == [0, 3, 73, 74, 79]
    assert (out is value, state) == (True, None)


def test_mamba_2_on_a_gpu_is_given_sequence_ids(called: Any) -> None:
    packed = PackedSequences.from_lengths(LENGTHS)
    x, dt, a = random(1, T, 4, 8).bfloat16(), random(1, T, 4), -random(4).abs()
    b, c, d, dt_bias = random(1, T, 2, 16), random(1, T, 2, 16), random(4), random(4)
    scan(never, recurrent.MAMBA_2)(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=16,
        D=d,
        z=None,
        return_final_states=False,
        dt_bias=dt_bias,
        dt_softplus=True,
        initial_states=None,
        dt_limit=(0.001, float("inf")),
        packed=packed,
    )
    positional, keywords = called["mamba_chunk_scan_combined"]
    assert [one is other for one, other in zip(positional, (x, dt, a, b, c), strict=True)] == [True] * 5
    assert keywords.pop("seq_idx") is packed.sequence_ids
    assert (keywords.pop("D") is d, keywords.pop("dt_bias") is dt_bias) == (True, True)
    assert keywords == {"chunk_size": 16, "z": None, "dt_softplus": True, "dt_limit": (0.001, float("inf"))}


def test_the_fused_kernel_of_a_layer_is_not_used() -> None:
    whole = in_parts(lambda *args, **_given: args, recurrent.MAMBA_2)
    assert whole(1, packed=PackedSequences.from_lengths(LENGTHS)) is None
    assert whole(1, dt_limit=None) == (1,)


def test_arguments_are_those_of_the_functions_that_torch_code_stands_in_for() -> None:
    """`transformers` hands on the same names, so the functions' own signatures have what is taken of them here."""
    for family, name, taken in [
        ("qwen3_5", "torch_chunk_gated_delta_rule", {"g", "beta", "use_qk_l2norm_in_kernel"}),
        ("kimi_linear", "chunk_kimi_delta_attention", {"g", "beta", "use_qk_l2norm_in_kernel"}),
        ("nemotron_h", "mamba2_chunk_scan", {"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit"}),
        ("lfm2", "causal_conv1d_fn", {"weight", "bias", "activation"}),
    ]:
        assert taken <= inspect.signature(inspect.unwrap(stock(family, name))).parameters.keys()


def test_a_cpu_takes_torch_code_where_packages_can_be_imported(
    called: Any, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "on_gpu", lambda tensor: tensor.is_cuda)
    for family in ("qwen3_5_text", "nemotron_h", "lfm2"):
        packed_loss(load_model(folders(family)))
    assert called == {}


def test_fp32_is_computed_as_such_on_a_gpu(called: Any, folders: Any) -> None:
    """Triton multiplies it as TF32; convolutions multiply what they are given."""
    for family in ("qwen3_5_text", "nemotron_h"):
        model = load_model(folders(family))
        assert slower_kernels(model, torch.device("cuda"), torch.float32) == []
        packed_loss(model)
    assert called.keys() == {"causal_conv1d_fn"}


# ---- Missing packages


@pytest.mark.parametrize(
    ("family", "package"),
    [("qwen3_5_text", "flash-linear-attention"), ("kimi_linear", "flash-linear-attention"), ("bamba", "mamba-ssm")],
)
def test_a_gpu_without_the_package_takes_torch_code_and_says_so(
    family: str, package: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CHOSEN", {})
    model = load_model(folders(family))
    assert slower_kernels(model, torch.device("cpu"), torch.bfloat16) == []
    (why,) = slower_kernels(model, torch.device("cuda"), torch.bfloat16)
    assert re.search(rf"is slower: {package} is missing \(ModuleNotFoundError.*pip install {package}", why)
    expected = packed_loss(model).item()
    monkeypatch.setattr(recurrent, "on_gpu", lambda _tensor: True)
    assert packed_loss(model).item() == expected


@pytest.mark.parametrize(
    ("generation", "triton", "tilelang", "uses"),
    [
        *((9, "3.6.0", False, "torch"), (9, "3.7.0+git1", False, "torch")),
        *((9, "3.3.1", False, "kernel"), (9, "3.7.1", False, "kernel"), (9, "3.6.0", True, "kernel")),
        (10, "3.6.0", False, "kernel"),
    ],
)
def test_a_delta_rule_that_triton_gets_wrong_is_torch_code(
    generation: int,
    triton: str,
    tilelang: bool,
    uses: str,
    called: Any,
    folders: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (generation, 0))
    monkeypatch.setattr(recurrent.metadata, "version", lambda _name: triton)
    monkeypatch.setattr(recurrent, "find_spec", lambda name: object() if tilelang and name == "tilelang" else None)
    model = load_model(folders("qwen3_5_text"), "bfloat16")
    slower = slower_kernels(model, torch.device("cuda"), torch.bfloat16)
    packed_loss(model)
    assert ("chunk_gated_delta_rule" in called) is (uses == "kernel")
    assert [f"Triton {triton} computes" in why and "or Triton 3.7.1 or later" in why for why in slower] == (
        [True] if uses == "torch" else []
    )


def test_convolutions_alone_need_no_package_on_a_gpu(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folders("lfm2"))
    assert slower_kernels(model, torch.device("cuda"), torch.bfloat16) == []
    expected = packed_loss(model).item()
    monkeypatch.setattr(recurrent, "on_gpu", lambda _tensor: True)
    assert packed_loss(model).item() == expected
