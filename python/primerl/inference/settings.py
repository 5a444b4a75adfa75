"""Settings of `primerl inference`: the contents of a resolved file, read without the config library."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl.inference import backends
from primerl.inference.backend import LOGPROBS_MODES
from primerl.process import setting_checks
from primerl.process.log_levels import LEVELS

CHOICES = {
    "dtype": (None, "float32", "bfloat16"),
    "logprobs_mode": LOGPROBS_MODES,
}
DEVICE_PATTERN = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"
# More than any engine decodes at a time, and than the orchestrator takes connections.
MOST_NUM_SEQS = 65_536
RANGES: setting_checks.Ranges = {
    "max_model_len": (2, setting_checks.MOST_COUNT),
    "max_num_seqs": (1, MOST_NUM_SEQS),
    "kv_cache_tokens": (2, setting_checks.MOST_LARGE_COUNT),
    "threads": (1, setting_checks.MOST_THREADS),
    "port": (0, setting_checks.MOST_PORTS),
    "seed": (0, setting_checks.MOST_LARGE_COUNT),
    "start_s": (0, setting_checks.LONGEST_S),
}
LORA_RANGES: setting_checks.Ranges = {
    "rank": (1, setting_checks.MOST_COUNT),
    "max_adapters": (1, setting_checks.MOST_COUNT),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str
    """Model folder."""
    name: str | None = None
    """Name under which it is served; defaults to the folder's name."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that the engine is sent in place of whole weights."""

    rank: int
    target_modules: list[str]
    max_adapters: int = 4
    """Adapters that vLLM answers requests by at the same time."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    level: str = "info"
    """Least severe level that is logged."""


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    model: ModelConfig
    backend: str = "auto"
    """A name of `inference.backends`, or an import path; `auto` takes the first of ours that this machine prefers."""
    python: str | None = None
    """Interpreter of the environment that the backend is installed in; defaults to this one."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """vLLM's own options."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a backend that is not part of primerl."""
    start_s: float = 300.0
    """Seconds until the engine has generated a token."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    join: str | None = None
    """URL of an orchestrator to join once the engine is ready."""
    join_as: str | None = None
    """Name to join by: an engine that joins by it again, at another address, takes its place."""
    max_model_len: int | None = None
    """Longest prompt and completion together, in tokens; defaults to the model's own limit."""
    max_num_seqs: int = 128
    """Requests that are decoded at the same time."""
    kv_cache_tokens: int | None = None
    """Tokens the KV cache holds; defaults to enough for max_num_seqs."""
    seed: int = 0
    dtype: str | None = None
    """Number format of weights and activations; defaults to the backend's choice."""
    device: str = "cpu"
    """Where the embedded engine computes: `cpu`, `cuda`, `cuda:<n>`, or `auto`: a GPU where there is one."""
    logprobs_mode: str = "raw_logprobs"
    threads: int = 1
    """CPU threads of the model."""
    lora: LoraConfig | None = None
    log: LogConfig = LogConfig()

    @classmethod
    def from_toml(cls, settings: Mapping[str, Any]) -> InferenceConfig:
        """Checks the contents of a resolved file; a ValueError names the field."""
        values = _known("", settings, cls)
        model = values.get("model")
        if not isinstance(model, Mapping) or not isinstance(model.get("path"), str):
            raise ValueError("model.path: give the folder of a model")
        values["model"] = ModelConfig(**_known("model.", model, ModelConfig))
        setting_checks.check(values["model"], {}, "model.")
        if values.get("lora") is not None:
            values["lora"] = _lora(values["lora"])
        if "log" in values:
            values["log"] = _log(values["log"])
        config = cls(**values)
        for name, choices in CHOICES.items():
            if getattr(config, name) not in choices:
                known = ", ".join(choice for choice in choices if choice is not None)
                raise ValueError(f"{name}: must be one of {known}, not {getattr(config, name)!r}")
        setting_checks.check(config, RANGES)
        if not re.fullmatch(DEVICE_PATTERN, config.device):
            raise ValueError(f"device: must be auto, cpu, cuda or cuda:<number>, not {config.device!r}")
        backends.check_name(config.backend)
        backends.check_options(config.backend, config.options, {"vllm": config.vllm})
        return config

    @property
    def served_name(self) -> str:
        return self.model.name or Path(self.model.path).name


def _known(prefix: str, settings: Mapping[str, Any], section: type[Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(section)}
    if unknown := sorted(settings.keys() - names):
        raise ValueError(f"{prefix}{unknown[0]}: no such setting; there are {', '.join(sorted(names))}")
    return dict(settings)


def _log(settings: object) -> LogConfig:
    if not isinstance(settings, Mapping):
        raise ValueError("log: must be a table with a `level`")
    found = LogConfig(**_known("log.", settings, LogConfig))
    setting_checks.check(found, {}, "log.")
    if found.level not in LEVELS:
        raise ValueError(f"log.level: must be one of {', '.join(LEVELS)}, not {found.level!r}")
    return found


def _lora(settings: object) -> LoraConfig:
    if not isinstance(settings, Mapping):
        raise ValueError("lora: must be a table with `rank` and `target_modules`")
    found = _known("lora.", settings, LoraConfig)
    if missing := sorted({"rank", "target_modules"} - found.keys()):
        raise ValueError(f"lora.{missing[0]}: is missing")
    lora = LoraConfig(**found)
    setting_checks.check(lora, LORA_RANGES, "lora.")
    if not lora.target_modules:
        raise ValueError("lora.target_modules: must not be empty")
    return lora
