"""Loads folders whose experts are in MXFP4 (gpt-oss, as it is published) as a bfloat16 or float32 model.

`transformers` dequantises them; what it leaves behind would be saved with the model: a config that says the weights
are quantised, and conversions back that give the experts of all layers one name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from primerl.train.model.packed import ModelError
from primerl.train.weights.mxfp4 import BLOCKS, SCALES, is_part, whole_name

CONVERSION = "Mxfp4Dequantize"
OF_QUANTISED = ("hf_quantizer", "is_quantized", "quantization_method")
"""Attributes that `transformers` gives a model that it has loaded from quantised weights."""


def ask_for_numbers(config: Any) -> bool:
    """Have `from_pretrained` dequantise; returns whether there is something to do.

    `config`: of `transformers`, of a folder that `support.weights_refusal` accepts.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return False
    given = found if isinstance(found, dict) else found.to_dict()
    config.quantization_config = {**given, "dequantize": True}
    return True


def check_parts(names: Collection[str]) -> None:
    """Raises ModelError where a tensor's blocks or scales are missing. `names`: of the folder's tensors."""
    for name in filter(is_part, sorted(names)):
        other = {whole_name(name) + BLOCKS, whole_name(name) + SCALES} - {name}
        if not other <= set(names):
            raise ModelError(f"it has {name} and lacks {min(other)}; fetch the model again")


def forget_quantisation(model: Any, dtype: torch.dtype) -> None:
    """Let a model that was loaded in this way be one of `dtype` that never was quantised."""
    for name in OF_QUANTISED:
        if name in vars(model):
            delattr(model, name)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    conversions = getattr(model, "_weight_conversions", None) or []
    kept = [one for one in conversions if not any(map(_dequantises, getattr(one, "operations", ())))]
    if len(kept) < len(conversions):
        # They come as bfloat16, whatever was asked for.
        model.to(dtype)
        model._weight_conversions = kept


def _dequantises(operation: Any) -> bool:
    return type(operation).__name__ == CONVERSION
