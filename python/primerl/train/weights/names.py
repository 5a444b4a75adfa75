"""Names of weights: as a model of `transformers` has them, and as its folder and engines have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from primerl.train.weights.mxfp4 import whole_name


def published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model's state under the names of its folder, with what loading joined split again (a mixture's
    experts). `tensors`: at least one whole layer; they may be on the meta device, for names and shapes only."""
    from transformers.core_model_loading import revert_weight_conversion

    named: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return named


def note_names(model: Any, names: Iterable[str]) -> list[str]:
    """Lets a model that was made without files know how its weights are named in its folder, as loading them does, so
    that all ranks publish the same names. Returns which of the folder's names the model does not hold."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    absent = []
    for name in sorted(names):
        renamed, _ = rename_source_key(whole_name(name), renamings, converters, prefix, state)
        if renamed not in state:
            absent.append(name)
    if any(one.was_used() for one in mapping) and getattr(model, "_weight_conversions", None) is None:
        model._weight_conversions = [one for one in mapping if one.was_used()]
    return absent
