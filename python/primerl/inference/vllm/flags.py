"""vLLM's command line and environment for one engine of a run: what primerl decides, what it suggests, and what it
hands on from `[inference.vllm]` as it is."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.inference import pulling
from primerl.inference.backend import UnservableError
from primerl.inference.vllm import serve
from primerl.inference.vllm.as_numbers import LOAD_FORMAT
from primerl.inference.vllm.installation import Installation, default_dtype, head_size, lora_rank, model_config
from primerl.process.log_levels import LEVELS
from primerl.train.adapters.files import targeted_layers, tensor_bytes
from primerl.train.model.support import has_state

if TYPE_CHECKING:
    from primerl.inference.settings import InferenceConfig, LoraConfig

_ONE = "one engine is one API server on one machine; for more, raise inference.replicas or start more engines"
_LORA = "it follows from trainer.model.lora; omit it"
_TLS = "engines that a run starts are reached without TLS; omit it"
_WEIGHTS = "new weights are loaded and proved through it"
_SURFACE = "the run needs it as primerl sets it"
OWNED = {
    "model": "set model.path",
    "served-model-name": "set model.name",
    "host": "set inference.host",
    "port": "set inference.port",
    "dtype": "set inference.dtype",
    "max-model-len": "set inference.max_model_len",
    "max-num-seqs": "set inference.max_num_seqs",
    "logprobs-mode": "set inference.logprobs_mode",
    "seed": "set seed",
    "worker-extension-cls": _WEIGHTS,
    "weight-transfer-config": _WEIGHTS,
    "worker-cls": _WEIGHTS,
    "enable-scale-out": _SURFACE,
    "enable-prompt-tokens-details": _SURFACE,
    "enable-server-load-tracking": _SURFACE,
    "disable-log-stats": "the orchestrator reads the engine's load from its metrics; omit it",
    "enable-return-routed-experts": "it follows from trainer.enable_router_replay; omit it",
    "api-key": "the orchestrator sends engines no key; keep inference.host on an address that only the run reaches",
    "root-path": "the orchestrator asks for vLLM's own paths; omit it",
    "uds": "the orchestrator reaches engines by TCP; omit it",
    "grpc": "the orchestrator reaches engines by HTTP; omit it",
    "tokens-only": _SURFACE,
    "logits-processors": "they change what is sampled from, and log-probabilities would be of something else",
    "config": "a file of flags may hold some that are primerl's; write them into [inference.vllm]",
    "api-server-count": _ONE,
    "headless": _ONE,
    "nnodes": _ONE,
    "node-rank": _ONE,
}
OWNED_PREFIXES = {
    "data-parallel": _ONE,
    "ssl-": _TLS,
    "enable-lora": _LORA,
    "max-lora": _LORA,
    "max-cpu-lora": _LORA,
    "lora-": _LORA,
}
CPU_BLOCK_TOKENS = 128
CPU_LEAST_BATCHED_TOKENS = 2048
BYTES = {"float32": 4, "bfloat16": 2}
CPU_CACHE_LIMITS = (64 << 20, 4 << 30)


def check(options: Mapping[str, Any]) -> None:
    """Raises UnservableError for an option of `[inference.vllm]` that is primerl's own, or no option."""
    seen: dict[str, str] = {}
    for name, value in options.items():
        flag = name.replace("_", "-")
        plain = flag.removeprefix("no-")
        # vLLM takes any beginning of a flag that only one has.
        reason = next((why for name_, why in OWNED.items() if name_.startswith(plain)), None) or next(
            (why for start, why in OWNED_PREFIXES.items() if plain.startswith(start) or start.startswith(plain)), None
        )
        if reason is not None:
            raise UnservableError.at(f"vllm.{name}", reason)
        if flag.startswith("-") or not flag.replace("-", "").isalnum() or len(flag) < 2:
            how = f"write vLLM's long option without its dashes, such as {'max-logprobs'!r}"
            raise UnservableError.at(f"vllm.{name}", how)
        if value is None or (isinstance(value, float) and value != value):
            raise UnservableError.at(f"vllm.{name}", "give it a value")
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and word.startswith("-") for word in words):
            raise UnservableError.at(f"vllm.{name}", "a value that begins with a dash would be read as another flag")
        if flag in seen:
            raise UnservableError.at(f"vllm.{name}", f"is set twice, as {seen[flag]} too")
        seen[flag] = name


def command(config: InferenceConfig, installation: Installation, port: int, as_numbers: str | None = None) -> list[str]:
    """`as_numbers`: the folder to be served in place of the model's, if that is in MXFP4 (`as_numbers.folder_for`)."""
    own: dict[str, Any] = {
        "model": as_numbers or config.model.path,
        "served-model-name": config.served_name,
        "host": config.host,
        "port": port,
        "dtype": config.dtype or default_dtype(installation),
        "max-num-seqs": config.max_num_seqs,
        "seed": config.seed,
        "logprobs-mode": config.logprobs_mode,
        "worker-extension-cls": "primerl.inference.vllm.worker.WorkerExtension",
        "weight-transfer-config": {"backend": "primerl"},
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "enable-server-load-tracking": True,
        "disable-uvicorn-access-log": True,
    }
    if config.max_model_len is not None:
        own["max-model-len"] = config.max_model_len
    if config.enable_return_routed_experts:
        own["enable-return-routed-experts"] = True
    if as_numbers is not None:
        own["load-format"] = LOAD_FORMAT
    if config.lora is not None:
        own |= _adapters(config.lora, Path(config.model.path))
    given = {name.replace("_", "-"): value for name, value in config.vllm.items()}
    usual = {name: value for name, value in _usual(config, installation, given).items() if not _is_given(name, given)}
    # -P: the folder of the script holds modules that would hide others.
    start = [installation.python, "-P", os.fspath(Path(serve.__file__))]
    return [*start, *_arguments(own | usual | given)]


def _adapters(lora: LoraConfig, model: Path) -> dict[str, Any]:
    shapes = {name: shape for name, _, shape, _ in tensor_bytes(model)}
    layers = {name.rsplit(".", 1)[-1] for name in targeted_layers(shapes, lora.target_modules)}
    return {
        "enable-lora": True,
        "max-lora-rank": lora_rank(lora.rank),
        # An output layer with room for an adapter ends the engine where log-probabilities of prompts are asked for
        # alongside other requests.
        "lora-target-modules": sorted(layers),
        "max-loras": lora.max_adapters,
        # With room for those that are on their way out: one that lacked room would be read again at its next token.
        "max-cpu-loras": 2 * lora.max_adapters,
    }


def _is_given(name: str, given: Mapping[str, Any]) -> bool:
    return name in given or f"no-{name}" in given or name.removeprefix("no-") in given


def _usual(config: InferenceConfig, installation: Installation, given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that `[inference.vllm]` may override."""
    usual: dict[str, Any] = {}
    if config.kv_cache_tokens is not None or installation.device == "cpu":
        usual["kv-cache-memory-bytes"] = _cache_bytes(config, installation)
    if config.gpu_share is not None and installation.device != "cpu":
        usual["gpu-memory-utilization"] = config.gpu_share
    if installation.device == "cpu":
        usual["enforce-eager"] = True
        # Requests with a seed end the engine where prompts are cut ("CPU Generator does not use offset").
        usual["enable-chunked-prefill"] = False
        if has_state(model_config(Path(config.model.path))):
            # States are cached for prompts that are cut, and for no others.
            usual["enable-prefix-caching"] = False
        usual["max-num-batched-tokens"] = max(_longest(config), CPU_LEAST_BATCHED_TOKENS, config.max_num_seqs)
        if _workers(given) == 1:
            usual["distributed-executor-backend"] = "uni"
    return usual


def _workers(given: Mapping[str, Any]) -> int:
    sizes = [given.get(f"{kind}-parallel-size", 1) for kind in ("tensor", "pipeline")]
    return int(sizes[0]) * int(sizes[1])


def _longest(config: InferenceConfig) -> int:
    """Tokens of prompt and completion."""
    limit = model_config(Path(config.model.path)).get("max_position_embeddings")
    return int(config.max_model_len or limit or CPU_LEAST_BATCHED_TOKENS)


def _cache_bytes(config: InferenceConfig, installation: Installation) -> int:
    """Size of the KV cache: from `kv_cache_tokens`; else, on a CPU, enough for all requests, within limits."""
    model = model_config(Path(config.model.path))
    layers, size = model.get("num_hidden_layers", 0), head_size(model) or 0
    heads = model.get("num_key_value_heads") or model.get("num_attention_heads") or 0
    a_token = 2 * layers * heads * size * BYTES[config.dtype or default_dtype(installation)]
    # vLLM keeps one block back.
    if config.kv_cache_tokens is not None:
        return int(a_token * (_blocks(config.kv_cache_tokens) + 1) * CPU_BLOCK_TOKENS)
    wanted = int(a_token * (config.max_num_seqs * _blocks(_longest(config)) + 1) * CPU_BLOCK_TOKENS)
    least, most = CPU_CACHE_LIMITS
    return min(max(wanted, least), most)


def _blocks(tokens: int) -> int:
    return -(-tokens // CPU_BLOCK_TOKENS)


def _arguments(options: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            arguments += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def environment(config: InferenceConfig, installation: Installation) -> dict[str, str]:
    """The server's environment: this process's own, without what would harm it."""
    variables = dict(os.environ)
    # Without bytecode each start compiles all of vLLM, torch and transformers, in each process.
    for name in ("PYTHONDONTWRITEBYTECODE", "PRIMERL_API_KEY"):
        variables.pop(name, None)
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONUNBUFFERED": "1", serve.PARENT: str(os.getpid())}
    for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}.items():
        variables.setdefault(name, value)
    variables.setdefault("VLLM_LOGGING_LEVEL", logging.getLevelName(LEVELS[config.log.level]))
    # Longer than the orchestrator and its probes leave a connection idle.
    variables.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "30")
    if config.lora is not None:
        said = {"rank": config.lora.rank, "target_modules": config.lora.target_modules}
        variables |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", serve.LORA: json.dumps(said)}
    variables |= pulling.as_variables(config.pulled)
    if installation.device == "cpu":
        variables |= {"VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": str(config.threads)}
        # In whole GiB, and takes precedence over --kv-cache-memory-bytes.
        variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
        given = {name.replace("_", "-"): value for name, value in config.vllm.items()}
        if _workers(given) == 1 and "distributed-executor-backend" not in given:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else `uni` is not
        if given.get("enforce-eager", True):
            # The first request with log-probabilities would compile, for half a minute.
            variables["TORCH_COMPILE_DISABLE"] = "1"
    return variables
