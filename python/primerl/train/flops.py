"""Model FLOPs of a step, and their share of what the device could do (MFU; Chowdhery et al., "PaLM",
arXiv:2204.02311, appendix B).

    FLOPs = 6 * (parameters of the layers that a token goes through) * tokens
          + 6 * vocabulary * hidden size * trained tokens                (logits are computed of these only)
          + 6 * query heads * (size of a query + size of a value) * (pairs of query and key) of each layer
    pairs = n * (n + 1) / 2 of a sequence of n tokens; with a sliding window w, at most w keys a query; of attention in
            chunks, of each chunk as of a sequence
    MFU   = FLOPs / seconds / peak of the device

Where queries and values are as wide as a head, 6 * (size + size) is the paper's 12 * head size; in multi-head latent
attention (DeepSeek) a query has a part without and one with positions, and a value a size of its own.

Two operations a multiplication, three times the forward pass for forward and backward; twice it (4 in place of 6) for
parameters that are not trained, those under a low-rank adapter, which need no gradient of their own. Parameters are
those of matrices: no embedding, no norm. Of a mixture's experts those count that a token is sent to. What is computed
again for want of memory does not count, nor does the optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from primerl.train.architectures import text_decoder
from primerl.train.attended import Attention, attentions
from primerl.train.distributed import Ranks
from primerl.train.metrics import peak_memory
from primerl.train.peaks import peak_flops

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the formula needs of a model."""

    matrix_parameters: float
    """That one token is multiplied by, output layer aside; of one that is not trained, two thirds."""
    output_parameters: float
    attentions: tuple[Attention, ...]
    """Of all layers."""

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

    def flops(self, lengths: Iterable[int], trained_tokens: int) -> float:
        """Of forward and backward over sequences of these lengths."""
        lengths = list(lengths)
        dense = self.matrix_parameters * sum(lengths) + self.output_parameters * trained_tokens
        return 6.0 * dense + 12.0 * sum(attention.products(lengths) for attention in self.attentions)


@dataclass(frozen=True, slots=True)
class Performance:
    """`perf/*` of a step."""

    shape: ModelShape | None
    """None where it is not known."""
    peak: float | None
    """Of the device, FLOP/s."""
    ranks: Ranks

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype, ranks: Ranks, peak_tflops: float | None = None) -> Performance:
        """Of a model that is not divided among the ranks yet. `peak_tflops`: of the device, in place of the table's."""
        peak = peak_flops(ranks.device, dtype) if peak_tflops is None else 1e12 * peak_tflops
        if peak is None and ranks.device.type == "cuda":
            name = torch.cuda.get_device_name(ranks.device)
            log.info("perf/mfu is left out: the peak of %s is not known in %s; set peak_tflops", name, dtype)
        try:
            shape = ModelShape.of(model)
        except Exception as error:  # noqa: BLE001 (configs differ; no metric may keep a model from being trained)
            shape = None
            log.warning(
                "perf/mfu is left out: the model FLOPs of %s are not known: %s: %s",
                type(model).__name__,
                type(error).__name__,
                error,
            )
        return cls(shape, peak, ranks)

    def flops(self, lengths: Iterable[int], trained_tokens: int) -> float:
        """Of this rank; 0 where nothing is made of it."""
        return 0.0 if self.shape is None or self.peak is None else self.shape.flops(lengths, trained_tokens)

    def metrics(self, tokens: float, flops: float, seconds: float) -> dict[str, float]:
        """`tokens` and `flops` of all ranks. Without `perf/mfu` where model FLOPs or the device's peak are unknown."""
        throughput = tokens / seconds
        metrics = {
            "perf/throughput": throughput,
            "perf/throughput_per_gpu": throughput / self.ranks.size,
            "perf/peak_memory": peak_memory(self.ranks.device),
        }
        if self.peak is None or self.shape is None:
            return metrics
        return metrics | {"perf/mfu": flops / seconds / self.ranks.size / self.peak}


def _matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Of a decoder: all that a token's vector is multiplied by."""
    for where, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) or "norm" in where.rsplit(".", 1)[-1].lower():
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # The biases of a mixture's experts are stacked, and have two dimensions.
            if parameter.dim() > 1 and not name.endswith("bias"):
                yield f"{where}.{name}", parameter


def _work(parameter: torch.Tensor) -> float:
    """Share of the three passes that its multiplications take part in."""
    return 1.0 if parameter.requires_grad else 2 / 3


def _share_of_experts(config: Any) -> float:
    """Of a mixture's experts, those a token is sent to; 1 of a model that is none."""
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
