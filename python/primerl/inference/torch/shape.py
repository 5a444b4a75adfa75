"""The shape of a decoder, read from a Hugging Face model folder. What this engine cannot compute exactly is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl.inference.backend import UnservableError
from primerl.train.model.support import Config, embedded_engine_refusal, no_config, rope_parameters


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864); `scaling` holds Llama 3's parameters, if any."""

    theta: float
    scaling: dict[str, float] | None = None

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each rotated pair, `[head_dim / 2]`.

        Scaled as Llama 3.1 does: wavelengths beyond the original context are stretched by `factor`, short ones kept,
        those between interpolated (transformers, `modeling_rope_utils`, "llama3").
        """
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        if self.scaling is None:
            return plain
        factor, low, high, original = (
            self.scaling[name]
            for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        scaled = []
        for frequency in plain:
            turns = original * frequency / (2 * math.pi)
            weight = min(max((turns - low) / (high - low), 0.0), 1.0)
            scaled.append((1 - weight) * frequency / factor + weight * frequency)
        return scaled


@dataclass(frozen=True, kw_only=True)
class Shape:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    tied_embeddings: bool
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...] = field(default=())

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Reads `config.json` (and `generation_config.json` for the end-of-sequence ids)."""
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UnservableError.at("model.path", f"{no_config(file.parent)}") from None
        except ValueError as error:
            raise UnservableError.at("model.path", f"{file} is not JSON: {error}") from None
        try:
            return cls._from_config(config, file, eos_token_ids(config, folder))
        except KeyError as error:
            raise UnservableError.at("model.path", f"{file} has no {error}") from None

    @classmethod
    def _from_config(cls, config: dict[str, Any], file: Path, eos_token_ids: tuple[int, ...]) -> Shape:
        problem = embedded_engine_refusal(config)
        if problem is not None:
            raise UnservableError.at("model.path", f"{file}: {problem}")
        model_type = str(config["model_type"])
        heads = int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            max_positions=int(config["max_position_embeddings"]),
            rms_norm_eps=float(config["rms_norm_eps"]),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            eos_token_ids=eos_token_ids,
        )


def _rope(config: dict[str, Any]) -> Rope:
    parameters = rope_parameters(config)
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return Rope(theta=theta)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return Rope(theta=theta, scaling={name: float(parameters[name]) for name in names})


def eos_token_ids(config: Config, folder: Path) -> tuple[int, ...]:
    """The model's own end of sequence first, then further ones of its generation config."""
    found: list[int] = []
    sources = [config]
    file = folder / "generation_config.json"
    if file.exists():
        sources.append(json.loads(file.read_text(encoding="utf-8")))
    for source in sources:
        ids = source.get("eos_token_id")
        found += [ids] if isinstance(ids, int) else list(ids or [])
    return tuple(dict.fromkeys(found))
