"""Reads a folder in MXFP4 into a model in bfloat16 (`as_numbers`). Runs in vLLM's workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from primerl.inference.vllm.as_numbers import LOAD_FORMAT
from primerl.train.weights.mxfp4 import joined


@register_model_loader(LOAD_FORMAT)
class Mxfp4Loader(DefaultModelLoader):  # type: ignore[misc] # vLLM is not installed where types are checked
    def __init__(self, load_config: LoadConfig) -> None:
        # Its own files are plain ones.
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, *given: Any) -> Iterator[tuple[str, Tensor]]:
        return joined(super().get_all_weights(*given))
