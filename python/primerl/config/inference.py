"""Inference engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from primerl.config.base import Port, Section, Seed, Threads
from primerl.config.lora import EngineLora


class InferenceSettings(Section):
    """The inference engine."""

    backend: Literal["torch"] = "torch"
    """`torch`: the embedded engine, for laptops and tests."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion together, in tokens; in `primerl rl` the run's seq_len where it is left out."""
    max_num_seqs: PositiveInt = 128
    """Requests that are decoded at the same time."""
    kv_cache_tokens: PositiveInt | None = None
    """Tokens the KV cache holds; enough for max_num_seqs where it is left out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and activations."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    """Log-probabilities before or after temperature and the other sampling settings; what the run needs where it is
    left out: after them if it samples at a temperature other than 1 or may truncate, else before."""
    threads: Annotated[Threads, Field(ge=1)] = 1
    """CPU threads of the model."""


class EngineModel(Section):
    """The model, as the engine needs it."""

    path: str
    """Model folder."""
    name: str | None = None
    """Name under which it is served; the folder's name where it is left out."""


class InferenceConfig(InferenceSettings):
    """One inference process (`primerl inference @ file`)."""

    model: EngineModel
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities before or after temperature and the other sampling settings."""
    seed: Seed = 0
    """Seed of sampling."""
    lora: EngineLora | None = None
    join: str | None = None
    """URL of an orchestrator to join once the engine is ready."""
