"""Whether the model computes with what was loaded into it.

A digest says what was read. That vLLM's reload has put it where the kernels read is another matter: on CPUs linear
layers hold packed copies of their weights, and the reload does not renew the copy of a tied output layer. So each
module is compared with the checkpoint's tensors:

    weights as they are           equal, element by element, in the model's dtype
    packed copies (CPU)           the same packing of the checkpoint's tensor gives the same answers, bit by bit, to
                                  a few random inputs

Only for one worker: with tensor parallelism each has a part of every weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PROBES = 4
"""Random inputs that a packed layer is compared by."""


class NotLoadedError(RuntimeError):
    """The message names modules whose weights are not the checkpoint's."""


def refresh_packed_heads(model: nn.Module) -> int:
    """Packs output layers and embeddings again that have a packed copy; returns how many."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    packed = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear")
        and isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod)
    ]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
    return len(packed)


def forget_packed_experts(model: nn.Module) -> int:
    """Before a reload on a CPU: stacks of experts are packed once, when their kernel is made, and a reload keeps the
    kernel, which would read the new weights as if they were packed. Returns how many there are."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    made = {id(method): method for method in methods if getattr(method, "moe_kernel", None) is not None}
    for method in made.values():
        method.moe_kernel = None  # type: ignore[union-attr]
    return len(made)


@dataclass(frozen=True)
class Comparison:
    found: frozenset[str]
    """Names of the tensors that were found in the model."""
    wrong: tuple[str, ...]
    """Weights and biases of the model, by their paths, that are not the tensors'."""

    def check(self, known: Comparison) -> int:
        """How many tensors are as they have to be. Raises NotLoadedError for weights that are not.

        `known`: the comparison of a model that was just loaded with its own folder. What differs in it is what vLLM
        rearranges, which cannot be compared.
        """
        wrong = [path for path in self.wrong if path not in known.wrong]
        if wrong:
            raise NotLoadedError(
                f"after the update {len(wrong)} modules do not compute with the weights that were loaded, e.g. "
                f"{wrong[:3]}"
            )
        return len(self.found)


def compare(model: nn.Module, tensors: Mapping[str, Tensor]) -> Comparison:
    """Compares what the model computes with to a checkpoint's tensors.

    A tensor is looked for by its name, and in the module that vLLM makes of several layers (`packed_modules_mapping`).
    Those that vLLM renames or quantises are not found.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    found: set[str] = set()
    wrong: list[str] = []
    for path, module in model.named_modules():
        if hasattr(module, "base_layer"):
            continue  # it wraps the layer, for adapters, and shows the layer's weights as its own
        path = path.removesuffix(".base_layer")
        for kind in ("weight", "bias"):
            held = getattr(module, kind, None)
            names = _sources(path, kind, fused, tensors)
            if not isinstance(held, Tensor) or not names or _is_quantised(module):
                continue
            parts = [tensors[name] for name in names]
            source = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(held.device, held.dtype)
            same = _same(module, kind, held, source)
            if same:
                found.update(names)
            elif same is False:
                wrong.append(f"{path}.{kind}")
    return Comparison(frozenset(found), tuple(wrong))


def _is_quantised(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def _sources(path: str, kind: str, fused: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that make up a module's weight or bias; none where they are not known."""
    prefix, _, last = path.rpartition(".")
    names = [f"{prefix}.{part}.{kind}" for part in fused.get(last, [])] or [f"{path}.{kind}"]
    if path == "lm_head" and names[0] not in tensors and kind == "weight":
        names = ["model.embed_tokens.weight"]
    return names if all(name in tensors for name in names) else []


def _same(module: nn.Module, kind: str, held: Tensor, source: Tensor) -> bool | None:
    """None if it cannot be known."""
    is_packed = kind == "weight" and hasattr(module, "cpu_linear")
    if held.numel() == 0:  # the packed copy is all there is
        return _same_answers(module, source) if is_packed else None
    if held.shape[1:] != source.shape[1:] or held.shape[0] < source.shape[0]:
        return None
    # A vocabulary may be padded.
    same = torch.equal(held[: source.shape[0]], source)
    return same and (not is_packed or _same_answers(module, source))


def _same_answers(module: Any, source: Tensor) -> bool:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(PROBES, source.shape[1], generator=generator).to(source.dtype)
    rows = module.cpu_linear(inputs, module.weight, None)
    padded = torch.zeros(rows.shape[1], source.shape[1], dtype=source.dtype)
    padded[: source.shape[0]] = source
    fresh = nn.Module()
    fresh.weight = nn.Parameter(padded, requires_grad=False)
    dispatch_cpu_unquantized_gemm(fresh, remove_weight=False)
    expected = fresh.cpu_linear(inputs, fresh.weight, None)  # type: ignore[operator]
    return torch.equal(rows[:, : source.shape[0]], expected[:, : source.shape[0]])
