"""Model FLOPs of a step, and their share of what the device could do (MFU; Chowdhery et al., "PaLM",
arXiv:2204.02311, appendix B).

    FLOPs = 6 * (parameters of the layers that a token goes through) * tokens
          + 6 * vocabulary * hidden size * trained tokens                (logits are computed of these only)
          + 6 * query heads * (size of a query + size of a value) * (pairs of query and key) of each layer
    pairs = n * (n + 1) / 2 of a sequence of n tokens; with a sliding window w, at most w keys a query; of attention in
            chunks, of each chunk as of a sequence
            tokens that samples share and that are computed once (`prefixes`) count once, with their pairs
          + 6 * heads * (size of a key) * (size of a value) * r * tokens of each layer with a state: r = 3 for the gated
            delta rule, whose state is read for the key, written, and read for the query (arXiv:2412.06464, and
            arXiv:2510.26692 for Kimi's), r = 2 for Mamba-2, where it is written and read (arXiv:2405.21060)
MFU   = FLOPs / seconds / peak of the device

Where queries and values are as wide as a head, 6 * (size + size) is the paper's 12 * head size; in multi-head latent
attention (DeepSeek) a query has a part without and one with positions, and a value a size of its own.

Two operations a multiplication, three times the forward pass for forward and backward; twice it (4 in place of 6) for
parameters that are not trained, those under a low-rank adapter, which need no gradient of their own. Parameters are
those of matrices: no embedding, no norm. Of a mixture's experts those count that a token is sent to. What is computed
again for lack of memory does not count, nor does the optimizer.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from primerl.train.distributed.ranks import Ranks
from primerl.train.loop.metrics import peak_memory
from primerl.train.model.architectures import text_decoder
from primerl.train.model.families import WITH_STATE


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer."""

    width: float
    """Query heads times the mean of a query's and a value's size."""
    window: int | None = None
    """Keys that a query sees at most, its own included."""
    chunk: int | None = None
    """Tokens of a sequence that are attended to by themselves."""

    def products(self, lengths: Iterable[int]) -> float:
        """The width times the pairs of query and key."""
        return self.width * sum(_pairs(part, self.window) for length in lengths for part in self._parts(length))

    def _parts(self, length: int) -> list[int]:
        if self.chunk is None or length <= self.chunk:
            return [length]
        whole, rest = divmod(length, self.chunk)
        return [self.chunk] * whole + [rest] * bool(rest)


@dataclass(frozen=True, slots=True)
class State:
    """A state of one layer that each token changes, whatever its sequence's length."""

    width: float
    """Half of the multiplications with it: those of a pair of query and key are counted twice as well."""

    def products(self, lengths: Iterable[int]) -> float:
        return self.width * sum(lengths)


FEED_FORWARD = ("moe", "mlp")
"""Values of `layer_types` in Nemotron-H: layers without a mixer."""
STATES = (
    (3, "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    (3, "linear_num_heads", "linear_head_dim", "linear_head_dim"),
    (2, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    (2, "mamba_n_heads", "mamba_d_head", "mamba_d_state"),
)
"""Products with the state of a layer a token, and the keys of a config that say how large it is."""
COMPUTE_MORE = {
    "hrm_text": "it runs its layers several times",
    "diffllama": "it attends twice in a layer",
    "jetmoe": "its attention has experts",
}
"""Architectures that the formula does not hold for -> why."""


def attentions(config: Any) -> tuple[Attention | State, ...]:
    """What the layers of a model with this text config compute between tokens. Raises ValueError."""
    if config.model_type in COMPUTE_MORE:
        raise ValueError(f"{config.model_type}: {COMPUTE_MORE[config.model_type]}")
    kinds = getattr(config, "layer_types", None)
    layers = int(config.num_hidden_layers)
    # What differs from layer to layer is not to be read from the config as a whole.
    each = getattr(config, "per_layer_config", None) or [config] * layers
    found: list[Attention | State] = []
    for index in range(layers):
        kind = kinds[index] if kinds else None
        if kind in WITH_STATE:
            found.append(_state(each[index], kind))
        elif kind not in FEED_FORWARD:
            found.append(_attention(each[index], kind))
    return tuple(found)


def _state(config: Any, kind: str) -> State:
    """Raises ValueError where the config does not tell what a layer of this kind computes."""
    if kind == "conv":
        return State(0.0)  # its kernel counts as a matrix
    names = next((names for names in STATES if all(hasattr(config, name) for name in names[1:])), None)
    if names is None or kind not in ("linear_attention", "mamba"):
        raise ValueError(f"{config.model_type}: the formula does not count what layers of type {kind!r} compute")
    reads, *sizes = names
    return State(reads / 2 * math.prod(getattr(config, name) for name in sizes))


def _attention(config: Any, kind: str | None) -> Attention:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = getattr(config, "qk_rope_head_dim", None)
    query = size if rotary is None else config.qk_nope_head_dim + rotary
    value = getattr(config, "v_head_dim", None) or size
    width = heads * (query + value) / 2
    window = getattr(config, "sliding_window", None) if kind in (None, "sliding_attention") else None
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return Attention(width, window, chunk)


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


PEAKS: dict[str, tuple[float | None, float | None]] = {
    # Consecutive words of the device's name -> dense TFLOP/s in bf16, and in fp32 without TF32, by the vendors' data
    # sheets; None if unknown.
    "GB300": (2500.0, None),
    "GB200": (2500.0, 80.0),
    "B300": (2250.0, None),
    "B200": (2250.0, 75.0),
    "GH200": (989.0, 67.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800 PCIe": (756.0, 51.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX PRO 6000 Blackwell Max": (None, None),  # Max-Q: lower clocks
    "RTX PRO 6000 Blackwell": (500.0, 120.0),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX A6000": (154.8, 38.7),
    "RTX 5090 D": (None, None),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090 D": (None, None),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090 Ti": (80.0, 40.0),
    "RTX 3090": (71.0, 35.6),
    # In fp16: they have no bf16, which is computed there in fp32.
    "V100S": (130.0, 16.4),
    "V100 SXM2": (125.0, 15.7),
    "V100 SXM3": (None, None),
    "V100": (112.0, 14.0),
    "T4": (65.0, 8.1),
    "MI355X": (2516.6, 157.3),
    "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4),
    # One of the card's two dies, each of which is a device.
    "MI250X": (191.5, 23.9),
    "MI250": (181.0, 22.6),
    "MI210": (181.0, 22.6),
}
"""In an order in which the first match is the device."""

PARTS = {"MIG", "Laptop"}
"""Words of names of devices that are a part of the one in the table, or weaker."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device; None of a CPU and of one that is not in the table."""
    if device.type != "cuda":
        return None
    half, single = peak_of(torch.cuda.get_device_name(device))
    peak = single if dtype == torch.float32 else half
    return None if peak is None else 1e12 * peak


def peak_of(name: str) -> tuple[float | None, float | None]:
    """TFLOP/s of the device of this name in bf16 and in fp32."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    if not PARTS.intersection(words):
        for known, peaks in PEAKS.items():
            wanted = known.split()
            if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
                return peaks
    return None, None


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formula needs of a model."""

    matrix_parameters: float
    """That one token is multiplied by, output layer aside; of one that is not trained, two thirds."""
    output_parameters: float
    attentions: tuple[Attention | State, ...]
    """What each layer computes between tokens."""

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Raises ValueError where the model's config does not tell."""
        config = model.config.get_text_config()
        share = _share_of_experts(config)
        output = model.get_output_embeddings().weight
        matrices = 0.0
        decoder = text_decoder(model)
        kernels = {id(module.weight) for module in decoder.modules() if isinstance(module, torch.nn.Conv1d)}
        for name, parameter in _matrices(decoder):
            if parameter is not output:
                # One tensor holds all experts. Kernels of convolutions have three dimensions too.
                of_experts = (parameter.dim() == 3 and id(parameter) not in kernels) or ".experts." in name
                used = share if of_experts else 1.0
                matrices += parameter.numel() * used * _work(parameter)
        return cls(matrices, output.numel() * _work(output), attentions(config))

    def flops(self, lengths: Iterable[int], trained_tokens: int, shared: Iterable[int] = ()) -> float:
        """FLOPs of forward and backward over sequences of these lengths, of which `shared` leading tokens each were
        computed with another one: what a sequence of that length costs is subtracted."""
        lengths, shared = list(lengths), list(shared)
        dense = self.matrix_parameters * (sum(lengths) - sum(shared)) + self.output_parameters * trained_tokens
        pairs = sum(attention.products(lengths) - attention.products(shared) for attention in self.attentions)
        return 6.0 * dense + 12.0 * pairs


@dataclass(frozen=True, slots=True)
class Performance:
    """`perf/*` of a step."""

    shape: ModelShape | None
    """None where it is not known."""
    peak: float | None
    """Peak of the device, FLOP/s."""
    ranks: Ranks

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, ranks: Ranks, peak_tflops: float | None = None) -> Performance:
        """To be called before the model is divided among ranks. `peak_tflops` replaces the device's table entry."""
        peak = peak_flops(ranks.device, dtype) if peak_tflops is None else 1e12 * peak_tflops
        if peak is None and ranks.device.type == "cuda":
            name = torch.cuda.get_device_name(ranks.device)
            log.info("perf/mfu is omitted: the peak of %s is not known in %s; set peak_tflops", name, dtype)
        try:
            shape = ModelShape.of(model)
        except Exception as error:  # noqa: BLE001 (configs differ; no metric may keep a model from being trained)
            shape = None
            log.warning(
                "perf/mfu is omitted: the model FLOPs of %s are not known: %s: %s",
                type(model).__name__,
                type(error).__name__,
                error,
            )
        return cls(shape, peak, ranks)

    def flops(self, lengths: Iterable[int], trained_tokens: int, shared: Iterable[int] = ()) -> float:
        """FLOPs of this rank; 0 if no metric uses them."""
        return 0.0 if self.shape is None or self.peak is None else self.shape.flops(lengths, trained_tokens, shared)

    def metrics(self, tokens: float, flops: float, seconds: float, unique: float | None = None) -> dict[str, float]:
        """`tokens`, `flops` and `unique` of all ranks. `unique`: tokens that were computed, where those that samples
        share were computed once. Without `perf/mfu` where model FLOPs or the device's peak are unknown."""
        throughput = tokens / seconds
        unique = tokens if unique is None else unique
        metrics = {
            "perf/shared_tokens": unique / tokens,
            "perf/throughput_unique": unique / seconds,
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.ranks.size,
            "perf/peak_memory": peak_memory(self.ranks.device),
        }
        if self.peak is None or self.shape is None:
            return metrics
        return metrics | {"perf/mfu": flops / seconds / self.ranks.size / self.peak}


def _matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a decoder that a token's vector is multiplied by."""
    for where, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or "norm" in where.rsplit(".", 1)[-1].lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # The biases of a mixture's experts are stacked, and have two dimensions; Kimi's decay has four.
            if parameter.dim() > 1 and not name.endswith(("bias", "A_log")):
                yield f"{where}.{name}", parameter


def _work(parameter: torch.Tensor) -> float:
    """Share of the three passes that its multiplications take part in."""
    return 1.0 if parameter.requires_grad else 2 / 3


def _share_of_experts(config: Any) -> float:
    """Share of a mixture's experts that a token is sent to; 1 for a dense model."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    # LongCat's router has some that compute nothing.
    nothing = _first(config, "zero_expert_num") or 0
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    return chosen / (experts + nothing) if experts and chosen else 1.0


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
