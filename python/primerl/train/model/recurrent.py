"""Layers that carry a state from token to token (gated delta rule, Mamba-2, short convolutions), over packed rows.

`transformers` computes them by functions that it looks up in the module of each architecture, and passes the keyword
arguments of the model's forward pass to them. `install` replaces these by functions that take the argument `packed` and
start from an empty state at each sequence; without it they are `transformers`' own.

                       on a CPU                                       on a GPU
    convolution        torch, with zeros between sequences            causal-conv1d with `seq_idx`
    gated delta rule   `transformers`' torch code, sequences as rows  flash-linear-attention with `cu_seqlens`
    Mamba-2 scan       the same                                       mamba-ssm with `seq_idx`

A GPU computes as a CPU does in fp32, and where the package is missing or known to fail, which is slower. The tensors'
device decides between them: `transformers` takes the packages whenever they can be imported, but they compute on GPUs
only. The fused kernel of a whole Mamba-2 layer is not used, since it reads the weights of the layer's last matrix and
would ignore an adapter there.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from primerl.train.model.packed import ModelError, PackedSequences, by_bucket
from primerl.train.model.support import SLOWER, slower_without

MARK = "primerl_packed"
"""Attribute of functions that replace `transformers`' own."""
UNTOLD = ("mamba_selective_scan",)
"""Functions of layers whose kernels have no argument for sequence boundaries (Mamba-1)."""


CHOSEN: dict[str, Callable[..., Any] | None] = {}
"""By name of the function: what this process computes with on its GPU. A plain dict, which compiled layers can read."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a package that computes on GPUs."""

    package: str
    """Name of the distribution."""
    module: str
    name: str
    fails: Callable[[torch.device], str] = lambda _device: ""
    """Why it cannot be used on this GPU; empty where nothing is known against it."""
    is_exact: bool = False
    """Whether fp32 is computed as such. Triton multiplies it as TF32, with a mantissa of 10 bits; torch's own operators
    take the place of such a kernel in fp32."""
    saves_time: bool = True
    """Whether torch code in its place is far slower."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether it can be used for such a tensor, where it is installed and works."""
        return on_gpu(tensor) and (self.is_exact or tensor.dtype != torch.float32)

    def find(self, tensor: Tensor) -> Callable[..., Any] | None:
        """None where torch code has to take its place."""
        return self.chosen(tensor.device) if self.takes(tensor) else None

    def chosen(self, device: torch.device) -> Callable[..., Any] | None:
        if self.name not in CHOSEN:
            found, _problem = _imported(self.module, self.name)
            CHOSEN[self.name] = None if found is None or self.fails(device) else found
        return CHOSEN[self.name]

    def slower(self, device: torch.device) -> str | None:
        """Why this GPU is slower than it could be, and what to install."""
        if not self.saves_time:
            return None
        found, problem = _imported(self.module, self.name)
        if found is None:
            return slower_without(self.package, problem)
        fault = self.fails(device)
        return f"{SLOWER}: {fault}" if fault else None


def _wrong_on_hopper(device: torch.device) -> str:
    """flash-linear-attention refuses the backward pass of the gated delta rule where Triton computes it wrongly
    (fla-org/flash-linear-attention, issue 640), once it has compiled the forward pass for a minute."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return ""
    if find_spec("tilelang") is not None:
        return ""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
    first, fixed = WRONG_TRITON
    if not first <= tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < fixed:
        return ""
    return (
        f"Triton {version} computes the backward pass of flash-linear-attention wrongly on Hopper GPUs; install "
        f"tilelang (`pip install tilelang`), or Triton {'.'.join(map(str, fixed))} or later"
    )


CONVOLUTION = Kernel("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", is_exact=True, saves_time=False)
DELTA_RULE = Kernel(
    "flash-linear-attention",
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    _wrong_on_hopper,
)
KIMI_DELTA_RULE = Kernel("flash-linear-attention", "fla.ops.kda", "chunk_kda")
MAMBA_2 = Kernel("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
HOPPER = 9
"""Compute capability."""
WRONG_TRITON = ((3, 4, 0), (3, 7, 1))
"""The first version that computes it wrongly, and the first that no longer does."""


@lru_cache
def _imported(module: str, name: str) -> tuple[Callable[..., Any] | None, str]:
    try:
        return getattr(import_module(module), name), ""
    except Exception as error:  # noqa: BLE001 (compiled packages fail in ways of their own, which are reported)
        return None, f"{type(error).__name__}: {error}"


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _packed_of(given: dict[str, Any]) -> PackedSequences | None:
    """Pops `packed` from a function's keyword arguments, or `seq_idx` if the layer passes nothing else on."""
    packed = given.pop("packed", None)
    if isinstance(given.get("seq_idx"), PackedSequences):
        packed = given.pop("seq_idx")
    if packed is None:
        return None
    if given.get("initial_state") is not None or given.get("initial_states") is not None:
        raise ModelError("packed sequences cannot begin with a state; leave the cache out")
    known: PackedSequences = packed
    return known


def convolution(own: Callable[..., Tensor], kernel: Kernel) -> Callable[..., Tensor]:
    """Replaces `causal_conv1d_fn(x [1, C, T], weight [C, K], bias, activation)`."""
    in_torch = inspect.unwrap(own)

    @wraps(own)
    def packed_convolution(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **given: Any) -> Tensor:
        packed = _packed_of(given)
        if packed is None:
            return own(x, weight, bias, activation=activation, **given)
        found = kernel.find(x) if activation in (None, "silu", "swish") else None
        if found is not None:
            answer: Tensor = found(channels_last(x), weight, bias, activation=activation, seq_idx=packed.sequence_ids)
            return answer
        gap = (weight.shape[-1] - 1) * packed.sequence_ids[0].long()
        places = torch.arange(x.shape[2], device=x.device) + gap
        spread = x.new_zeros(1, x.shape[1], x.shape[2] + (weight.shape[-1] - 1) * (len(packed.lengths) - 1))
        answer = in_torch(spread.index_copy(2, places, x), weight, bias, activation=activation)
        return answer.index_select(2, places)

    return packed_convolution


def channels_last(x: Tensor) -> Tensor:
    """[1, C, T] in the layout in which causal-conv1d knows of sequences: channels next to each other in memory, tokens
    at multiples of 8."""
    if x.stride(1) == 1 and x.stride(2) % 8 == 0:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def delta_rule(own: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """Replaces `chunk_gated_delta_rule(q, k, v [1, T, H, D], g, beta)` and Kimi's, which return the output and the last
    state."""
    in_torch = inspect.unwrap(own)

    @wraps(own)
    def packed_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any) -> Any:
        packed = _packed_of(given)
        if packed is None:
            return own(query, key, value, g=g, beta=beta, **given)
        options = {"use_qk_l2norm_in_kernel": given.get("use_qk_l2norm_in_kernel", False)}
        found = kernel.find(query)
        if found is not None:
            return found(query, key, value, g=g, beta=beta, cu_seqlens=packed.starts, **options)

        def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            answer: Tensor = in_torch(query, key, value, g=g, beta=beta, **options)[0]
            return answer

        return by_bucket(rule, packed, (query, key, value, g, beta)), None

    return packed_rule


def scan(own: Callable[..., Any], kernel: Kernel) -> Callable[..., Any]:
    """Replaces `mamba2_chunk_scan(x [1, T, H, P], dt [1, T, H], A [H], B, C [1, T, G, N])`."""
    in_torch = inspect.unwrap(own)

    @wraps(own)
    def packed_scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **given: Any) -> Any:
        packed = _packed_of(given)
        if packed is None:
            return own(hidden_states, dt, A, B, C, **given)
        options = {
            name: given[name] for name in ("chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit") if name in given
        }
        found = kernel.find(hidden_states)
        if found is not None:
            return found(hidden_states, dt, A, B, C, z=given.get("z"), seq_idx=packed.sequence_ids, **options)

        def rule(hidden_states: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            answer: Tensor = in_torch(hidden_states, dt, A, B, C, **options)
            return answer

        return by_bucket(rule, packed, (hidden_states, dt, B, C))

    return packed_scan


def in_parts(own: Callable[..., Any], _kernel: Kernel) -> Callable[..., Any]:
    """Replaces the fused kernel of a whole layer by one that returns None, so that the layer calls its parts."""

    @wraps(own)
    def whole_layer(*args: Any, **given: Any) -> Any:
        return own(*args, **given) if _packed_of(given) is None else None

    return whole_layer


TOLD: dict[str, tuple[Callable[..., Callable[..., Any]], Kernel]] = {
    "causal_conv1d_fn": (convolution, CONVOLUTION),
    "torch_chunk_gated_delta_rule": (delta_rule, DELTA_RULE),
    "chunk_kimi_delta_attention": (delta_rule, KIMI_DELTA_RULE),
    "mamba2_chunk_scan": (scan, MAMBA_2),
    "mamba2_split_conv1d_scan_combined": (in_parts, MAMBA_2),
}
"""`transformers`' names of the functions -> what takes their place."""


def install(model: Any) -> None:
    """Replace the functions that the layers of this model call by those above. Other models of these architectures in
    this process compute as before."""
    for module in {_home(mixer) for mixer in mixers(model)}:
        for name, (replace, kernel) in TOLD.items():
            own = getattr(module, name, None)
            if own is not None and not hasattr(own, MARK):
                told = replace(own, kernel)
                setattr(told, MARK, True)
                setattr(module, name, told)


def mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers' parts that carry a state from token to token in a known way; all of them have a convolution."""
    return [
        module
        for module in model.modules()
        if hasattr(_home(module), "causal_conv1d_fn")
        and any(isinstance(part, torch.nn.Conv1d) for part in module.children())
    ]


def untold(model: torch.nn.Module) -> str | None:
    """Name of a class whose scan takes no sequence boundaries."""
    named = (type(mixer).__name__ for mixer in mixers(model) if any(hasattr(_home(mixer), name) for name in UNTOLD))
    return next(named, None)


def slower_kernels(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why layers of this model are computed more slowly on this device than they could be. Also chooses what computes
    them, before layers are compiled."""
    if device.type != "cuda":
        return []
    homes = {_home(mixer) for mixer in mixers(model)}
    kernels = {kernel for home in homes for name, (_, kernel) in TOLD.items() if hasattr(home, name)}
    for kernel in kernels:
        kernel.chosen(device)
    if dtype == torch.float32:
        return []  # they are not used
    return sorted({why for kernel in kernels if (why := kernel.slower(device)) is not None})


def needs_sequence_ids(mixer: torch.nn.Module) -> bool:
    """Whether `seq_idx` is its only argument for sequence boundaries."""
    parameters = inspect.signature(mixer.forward).parameters
    return "seq_idx" in parameters and not any(one.kind == one.VAR_KEYWORD for one in parameters.values())


def longest_chunk(model: torch.nn.Module) -> int:
    """The largest number of tokens that a layer's scan computes at once; 0 without scans."""
    return max(_chunks(model), default=0)


def _chunks(model: torch.nn.Module) -> Iterator[int]:
    for mixer in mixers(model):
        home = _home(mixer)
        if hasattr(home, "mamba2_chunk_scan"):
            yield int(getattr(mixer, "chunk_size", 256))
        elif hasattr(home, "torch_chunk_gated_delta_rule") or hasattr(home, "chunk_kimi_delta_attention"):
            yield 64


def _home(module: torch.nn.Module) -> Any:
    """The Python module in which its class looks functions up."""
    return sys.modules.get(type(module).__module__)
