"""The embedded engine on a device that is not the CPU: one that this test makes up, so that no GPU is needed."""

from __future__ import annotations

import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import model_tensors, new_model
from primerl.config.schema.inference import InferenceConfig as EngineProcess
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch import step
from primerl.inference.torch.sampling import Rows, sample
from primerl.inference.torch.step import TorchBackend, device_of
from settings_helpers import filled, refusal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

ELSEWHERE = torch.device("meta")
"""What the made-up device is called: torch knows the name, and has no driver for it."""
BETWEEN = ("aten::copy_", "aten::_to_copy")
"""What may read a tensor of another device."""


class Placed(Tensor):
    """A tensor on the made-up device, whose values are on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Placed:
        made: Placed = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=ELSEWHERE,
            storage_offset=held.storage_offset(),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        return computed(operator, given, options or {})


class SecondDevice(TorchDispatchMode):
    """Computes as the CPU does, counts copies to it, and refuses to mix tensors of the two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_back = 0

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        answer = computed(operator, given, options or {})
        if operator.name().startswith("aten::_to_copy"):
            self.copied_back += isinstance(given[0], Placed) and not isinstance(answer, Placed)
        return answer


def computed(operator: Any, given: Any, options: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((given, options))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    placed = [isinstance(tensor, Placed) for tensor in tensors]
    if any(placed) and not operator.name().startswith(BETWEEN):
        # As on a GPU, a single number may come from the CPU.
        mixed = [tensor.shape for tensor in tensors if not isinstance(tensor, Placed) and tensor.dim()]
        assert not mixed, f"{operator} mixes devices: {mixed}"
    wanted = options.get("device")
    options = {name: value for name, value in options.items() if name not in ("device", "pin_memory", "non_blocking")}
    answer = operator(*tree_map(held, given), **tree_map(held, options))
    is_elsewhere = any(placed) if wanted is None else torch.device(wanted) == ELSEWHERE
    if operator.name().startswith("aten::copy_"):
        return given[0]
    if not is_elsewhere:
        return answer
    flat, layout = tree_flatten(answer)
    return tree_unflatten([Placed(value) if isinstance(value, Tensor) else value for value in flat], layout)


def held(value: Any) -> Any:
    return value.held if isinstance(value, Placed) else value


WORDS = 9
"""Of 32 tokens each, that hold the vocabulary."""


def integers(values: list[int]) -> bytearray:
    return bytearray(array.array("q", values).tobytes())


def numbers(values: list[float], kind: str = "f") -> bytearray:
    return bytearray(array.array(kind, values).tobytes())


def plainly(backend: TorchBackend, name: str) -> Any:
    """Its method without inference mode, in which torch makes no views of tensors of one's own."""
    method = getattr(TorchBackend, name).__wrapped__
    return torch.no_grad()(partial(method, backend))


def steps(backend: TorchBackend) -> Iterator[Any]:
    """Three prompts of several lengths in one block, padded and scored; then tokens in slots apart, with every setting
    of sampling, beside the rest of a prompt."""
    most, forward = backend.decoder.max_len, plainly(backend, "forward")
    prompts = [[5, 6, 7], list(range(40, 57)), [9, 8]]
    ends = [3, 20, 22]
    yield forward(
        token_ids=integers([token for prompt in prompts for token in prompt]),
        positions=integers([place for prompt in prompts for place in range(len(prompt))]),
        cache_rows=integers([slot * most + place for slot, own in enumerate(prompts) for place in range(len(own))]),
        segments=[(0, 3, 17, 17)],
        slots=integers([0, 1, 2]),
        query_lens=integers([3, 17, 2]),
        context_lens=integers([3, 17, 2]),
        sample_rows=integers([end - 1 for end in ends]),
        uniforms=numbers([0.1, 0.5, 0.9], "d"),
        temperatures=None,
        top_p=None,
        top_k=None,
        min_p=None,
        banned=None,
        allowed=None,
        top=0,
        prompt_rows=integers([0, 3, 4]),
        prompt_targets=integers([6, 41, 42]),
        prompt_top=3,
    )
    yield forward(
        token_ids=integers([11, 12, 13, 14]),
        positions=integers([3, 2, 17, 18]),
        cache_rows=integers([3, 2 * most + 2, most + 17, most + 18]),
        segments=[(0, 2, 1, 4), (2, 1, 2, 19)],
        slots=integers([0, 2, 1]),
        query_lens=integers([1, 1, 2]),
        context_lens=integers([4, 3, 19]),
        sample_rows=integers([0, 1, 3]),
        uniforms=numbers([0.2, 0.6, 0.999], "d"),
        temperatures=numbers([0.0, 0.7, 1.5]),
        top_p=numbers([1.0, 0.8, 0.9]),
        top_k=integers([0, 20, 0]),
        min_p=numbers([0.0, 0.01, 0.0]),
        banned=(integers([0, 1]), integers([3, 4])),
        allowed=lambda: (integers([0, 2]), bytearray([0b10101010]) * (2 * WORDS * 4)),
        top=2,
        prompt_rows=None,
        prompt_targets=None,
        prompt_top=0,
    )


def made(folder: Path, device: str, **given: Any) -> TorchBackend:
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 64, **given}
    return TorchBackend(folder, device=device, **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_of_a_step_is_on_the_device(tmp_path: Path, dtype: str) -> None:
    folder = new_model(tmp_path / "m", 0)
    here = made(folder, "cpu", dtype=dtype)
    # Written out, as it is on the made-up device.
    with sdpa_kernel(SDPBackend.MATH):
        expected = list(steps(here))
    with SecondDevice() as second:
        there = made(folder, "meta", dtype=dtype)
        for step, answer in zip(steps(there), expected, strict=True):
            assert step == answer
            # What was sampled and all of its scores come in one copy.
            assert second.copied_back == 1
            second.copied_back = 0
        held_there = [*there.decoder.tensors.values(), *(layer.keys for layer in there.decoder.layers)]
        assert {tensor.device for tensor in held_there} == {ELSEWHERE}
        assert plainly(there, "digest")() == here.digest()


def test_weights_are_converted_and_proved_on_the_device(tmp_path: Path) -> None:
    folder = new_model(tmp_path / "m", 0)
    tensors = {name: tensor + 0.3 for name, tensor in model_tensors(folder).items()}
    digests = []
    with SecondDevice():
        for device in ("cpu", "meta"):
            backend = made(folder, device, dtype="bfloat16")
            for name, tensor in tensors.items():
                plainly(backend, "load_tensor")(name, "F32", bytearray(tensor.numpy().tobytes()))
            plainly(backend, "weights_changed")()
            digests.append(plainly(backend, "digest")())
    assert digests[0] == digests[1]


def test_an_adapter_is_merged_on_the_device(tmp_path: Path) -> None:
    folder = new_model(tmp_path / "m", 0)
    generator = torch.Generator().manual_seed(0)
    weights, digests = [], []
    with SecondDevice():
        for device in ("cpu", "meta"):
            backend = made(folder, device, lora=(2, ["q_proj", "down_proj"]))
            for name, shape in backend.info()["tensors"]:
                if "lora_" in name and ".weight" in name:
                    values = torch.randn(shape, generator=generator.manual_seed(len(name)))
                    plainly(backend, "load_tensor")(name, "F32", bytearray(values.numpy().tobytes()))
            plainly(backend, "load_tensor")("lora_alpha", "F32", numbers([4.0]))
            plainly(backend, "weights_changed")()
            digests.append(plainly(backend, "digest")())
            weights.append({name: held(tensor) for name, tensor in backend.decoder.tensors.items()})
    assert digests[0] == digests[1]
    before = model_tensors(folder)
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
        assert torch.equal(tensor, before[name]) == (not name.endswith(("q_proj.weight", "down_proj.weight")))


def test_a_token_that_cannot_be_sampled_is_never_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel sums round each in its own way: here that of a token left out is above that of the one before."""
    cumsum = Tensor.cumsum

    def rounded(values: Tensor, *given: Any, **options: Any) -> Tensor:
        sums = cumsum(values, *given, **options)
        bump = torch.zeros(sums.shape[-1], dtype=sums.dtype)
        bump[1] = 1e-9
        return sums + bump.to(sums.device)

    monkeypatch.setattr(Tensor, "cumsum", rounded)
    # Just above the first one's share.
    logits = torch.tensor([[1.0, -torch.inf, 1.0]])
    uniforms = torch.tensor([0.5 + 1e-10], dtype=torch.float64)
    with SecondDevice(), torch.no_grad():
        rows = Rows(uniforms.to(ELSEWHERE), None, None, None, None, None)
        token_ids, _, _ = sample(logits.to(ELSEWHERE), rows)
    assert held(token_ids).tolist() == [0]


def test_devices_are_named_as_torch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device_of(name).type for name in ("cpu", "auto")] == ["cpu", "cpu"]
    with pytest.raises(ValueError, match=r'^device: is "cuda", but torch sees no CUDA GPU here; set it to "cpu"'):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = [str(device_of(name)) for name in ("cpu", "auto", "cuda", "cuda:1")]
    assert found == ["cpu", "cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r'^device: is "cuda:2", but torch sees 2 CUDA GPUs here'):
        device_of("cuda:2")


def test_too_little_memory_names_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB.")

    monkeypatch.setattr(step, "Decoder", full)
    with pytest.raises(ValueError, match=r"^device: the model in float32 and a KV cache of 3 sequences of 64 "):
        made(new_model(tmp_path / "m", 0), "cpu")


@pytest.mark.parametrize(("device", "works"), [("cuda:1", True), ("auto", True), ("cuda:", False), ("tpu", False)])
def test_the_setting_is_checked(device: str, works: bool) -> None:
    settings = {"model": {"path": "/m"}, "device": device}
    if works:
        assert filled(InferenceConfig, **settings).device == device
        assert EngineProcess.model_validate(settings).device == device
        return
    assert refusal(InferenceConfig, settings).startswith("device: String should match pattern")
    with pytest.raises(ValueError, match="device"):
        EngineProcess.model_validate(settings)
