"""Changes of a config that make a process fit, by the same formula that says that it does not."""

from __future__ import annotations

from typing import Any

from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.train.model import memory
from primerl.train.model.memory import Checkpointing

SHOWN = 3
"""Changes that are named, the smallest first."""


def trainer_parts(config: RLConfig, shape: dict[str, Any], *, on_gpu: bool, **changed: Any) -> dict[str, int]:
    """Bytes of one rank, by what they are for; empty where they cannot be estimated. `changed`: arguments of
    `memory.training` that are not the config's."""
    trainer = config.trainer
    half = trainer.dtype == "bfloat16" if trainer.dtype is not None else on_gpu
    given: dict[str, Any] = {
        "ranks": trainer.ranks,
        "seq_len": config.seq_len,
        "checkpointing": trainer.activation_checkpointing,
        "adapter": trainer.model.lora is not None,
        "replicas": trainer.dp_replicate,
        "half": half,
        "on_gpu": on_gpu,
        **changed,
    }
    found = memory.training(shape, **given)
    if found is None:
        return {}
    return {name: getattr(found, name) for name in ("weights", "gradients", "optimizer", "activations", "temporary")}


def enough(
    config: RLConfig, shape: dict[str, Any], kind: str, limit: int, gpus: int, *, main: bool = False
) -> tuple[str, ...]:
    """Each of these changes alone makes the process fit into `limit` bytes of a device. `gpus`: those that the trainer
    can have, or an engine has. `main`: of main memory, which all ranks share."""
    if kind == "trainer":
        return _of_trainer(config, shape, limit, gpus, main=main)
    return _of_engine(config, shape, limit, gpus, main=main)


def _of_trainer(config: RLConfig, shape: dict[str, Any], limit: int, gpus: int, *, main: bool) -> tuple[str, ...]:
    ranks, seq_len = config.trainer.ranks, config.seq_len
    full: Checkpointing = "full"
    tried: list[tuple[str, dict[str, Any]]] = []
    recomputes = config.trainer.activation_checkpointing == full
    if not recomputes:
        tried.append(('trainer.activation_checkpointing = "full"', {"checkpointing": full}))
    adapts = config.trainer.model.lora is not None
    lora = ("[trainer.model.lora], which trains an adapter", {"adapter": True})
    tried += [] if adapts else [lora]
    more = [ranks * 2**power for power in range(1, 7) if ranks * 2**power <= gpus]
    if not main:
        tried += [_ranks(config, many, {}) for many in more]
        tried += [] if recomputes else [_ranks(config, many, {"checkpointing": full}) for many in more]
    least = max(sampling.max_tokens for _, sampling in config.orchestrator.samplings()) + 1
    shorter = [seq_len // 2**power for power in range(1, 5) if seq_len // 2**power > least]
    tried += [(f"seq_len = {length}", {"seq_len": length}) for length in shorter]
    less = {"adapter": True, "checkpointing": full}
    both = f'{lora[0]}, with trainer.activation_checkpointing = "full"'
    tried += [(both, less), *((f"{both} and seq_len = {length}", {**less, "seq_len": length}) for length in shorter)]
    found: dict[frozenset[str], str] = {}
    for said, changed in tried:
        parts = trainer_parts(config, shape, on_gpu=not main, **changed)
        needed = sum(parts.values()) * (ranks if main else 1)
        # The smallest change of each kind is enough.
        if parts and needed <= limit and not any(one <= set(changed) for one in found):
            found[frozenset(changed)] = f"{said} ({needed / 1e9:.1f} GB)"
    return tuple(found.values())[:SHOWN]


def _ranks(config: RLConfig, many: int, also: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    said = f"trainer.ranks = {many}" + (', with trainer.activation_checkpointing = "full"' if also else "")
    return said, {"ranks": many, **also}


def _of_engine(config: RLConfig, shape: dict[str, Any], limit: int, gpus: int, *, main: bool) -> tuple[str, ...]:
    engine, half = config.inference, resolve.engine_dtype(config) == "bfloat16"
    longest, found = engine.max_model_len or config.seq_len, []
    served = memory.serving(shape, gpus if not main else 1, half=half)
    if served is None:
        return ()
    room = (limit - served.weights) // served.token if served.token else 0
    if room >= longest:
        found.append(f"inference.kv_cache_tokens = {room // longest * longest}")
    if not half:
        less = memory.serving(shape, gpus, half=True)
        if less is not None and less.weights + less.token * longest <= limit:
            found.append('inference.dtype = "bfloat16"')
    if not main and resolve.engine_name(config) == "vllm":
        for size in (2, 4, 8):
            many = memory.serving(shape, gpus * size, half=half)
            if many is not None and many.weights + many.token * longest <= limit:
                found.append(f"inference.vllm.tensor-parallel-size = {gpus * size}")
                break
    return tuple(found[:SHOWN])
