"""Model FLOPs of a step, and their share of what the device could do (MFU; Chowdhery et al., "PaLM",
arXiv:2204.02311, appendix B).

    FLOPs = 6 * (parameters of the layers that a token goes through) * tokens
          + 6 * vocabulary * hidden size * trained tokens                (logits are computed of these only)
          + 12 * query heads * head size * (pairs of query and key) of each layer
    pairs = n * (n + 1) / 2 of a sequence of n tokens; with a sliding window w, at most w keys a query
    MFU   = FLOPs / seconds / peak of the device

Two operations a multiplication, three times the forward pass for forward and backward; twice it (4 in place of 6) for
parameters that are not trained, those under a low-rank adapter, which need no gradient of their own. Parameters are
those of matrices: no embedding, no norm. Of a mixture's experts those count that a token is sent to. What is computed
again for want of memory does not count, nor does the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from primerl.train.distributed import Ranks
from primerl.train.metrics import peak_memory
from primerl.train.optim import is_matrix

PEAKS = {
    # Substring of the device's name -> dense TFLOP/s in bf16, and in fp32 (without TF32). The vendors' data sheets.
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "MI300X": (1307.0, 163.4),
    "MI250X": (383.0, 47.9),
}
"""In an order in which the first match is the device."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device; None of a CPU and of one that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part, (half, single) in PEAKS.items():
        if part in name:
            return 1e12 * (single if dtype == torch.float32 else half)
    return None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formula needs of a model."""

    matrix_parameters: float
    """That one token is multiplied by, output layer aside; of one that is not trained, two thirds."""
    output_parameters: float
    attention_width: int
    """Query heads times head size."""
    windows: tuple[int | None, ...]
    """Of each layer."""

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        config = model.config.get_text_config()
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        active = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k")
        share = active / experts if experts and active else 1.0
        matrices = 0.0
        for name, parameter in model.named_parameters():
            if is_matrix(name, parameter):
                # One tensor holds all experts.
                used = share if parameter.dim() == 3 or ".experts." in name else 1.0
                matrices += parameter.numel() * used * _work(parameter)
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        output = model.get_output_embeddings().weight
        return cls(matrices, output.numel() * _work(output), heads * head, _windows(config))

    def flops(self, lengths: Iterable[int], trained_tokens: int) -> float:
        """Of forward and backward over sequences of these lengths."""
        lengths = list(lengths)
        pairs = sum(_pairs(length, window) for window in self.windows for length in lengths)
        dense = self.matrix_parameters * sum(lengths) + self.output_parameters * trained_tokens
        return 6.0 * dense + 12.0 * self.attention_width * pairs


@dataclass(frozen=True, slots=True)
class Performance:
    """`perf/*` of a step."""

    shape: ModelShape
    peak: float | None
    """Of the device."""
    ranks: Ranks

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, ranks: Ranks) -> Performance:
        """Of a model that is not divided among the ranks yet."""
        return cls(ModelShape.of(model), peak_flops(ranks.device, dtype), ranks)

    def metrics(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """`tokens` and `flops` of all ranks. Without `perf/mfu` where the device's peak is unknown."""
        throughput = tokens / seconds
        metrics = {
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.ranks.size,
            "perf/peak_memory": peak_memory(self.ranks.device),
        }
        return metrics if self.peak is None else metrics | {"perf/mfu": flops / seconds / self.ranks.size / self.peak}


def _work(parameter: torch.Tensor) -> float:
    """Share of the three passes that its multiplications take part in."""
    return 1.0 if parameter.requires_grad else 2 / 3


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window,) * int(config.num_hidden_layers)


def _pairs(length: int, window: int | None) -> int:
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _first(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None
