"""From the run's one config to one file for each process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import tomli_w
from pydantic import BaseModel

from primerl.config import monitored
from primerl.config.base import Log, LogLevel, RolloutLog
from primerl.config.environment import (
    Environment,
    EnvWorkerConfig,
    EvaluationEnvironment,
    EvaluationSource,
    JoinedSettings,
    ServedEvaluationSource,
    ServedTrainSource,
    TrainEnvironment,
    TrainSource,
    Workers,
)
from primerl.config.inference import EngineModel, InferenceConfig, InferenceSettings
from primerl.config.lora import EngineLora, TrainerLora
from primerl.config.monitors import MonitorConfig
from primerl.config.orchestrator import Orchestration, OrchestratorConfig, ServedModel
from primerl.config.rl import RLConfig
from primerl.config.sft import SFTConfig
from primerl.config.trainer import TrainedModel, TrainerConfig, TrainerLog, TrainerSettings
from primerl.inference.vllm.flags import default_dtype
from primerl.inference.vllm.installation import UnusableError, chosen_backend, find

Source = TypeVar("Source", bound=Environment)
EXACT_TOLERANCE = 1e-3
"""Nats. Sums in another order are 1e-5 apart at most, in fp32."""
MOST_LIVE_VERSIONS = 6
"""vLLM keeps room for each adapter in the GPU's memory."""
TRAINER_LEVELS = {"trace": "debug", "warn": "warning"}
"""As the trainer, which has Python's names, calls the run's levels."""
Kind = Literal["orchestrator", "inference", "env-worker", "trainer", "monitor", "store-worker"]


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """One process of the run: its subcommand, its name, where its config and its log go."""

    kind: Kind
    name: str
    config: BaseModel
    file: Path
    log: Path
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of its environment alone: keys and secrets, which are in no file."""
    python: str | None = None
    """Interpreter that runs it, where it is not this one."""


def orchestrator(config: RLConfig, variables: Mapping[str, list[str]] | None = None) -> ProcessConfig:
    """`variables`: names of those that env workers get, by their environment's name."""
    source = config.orchestrator
    train = [ServedTrainSource(**shared(environment, TrainSource)) for environment in source.train.env]
    evaluation = [_evaluation(environment, config) for environment in source.eval.env]
    for served, environment in zip([*train, *evaluation], [*source.train.env, *source.eval.env], strict=True):
        served.worker = _joined(config, environment, (variables or {}).get(environment.label, []))
    keeps = {"keep_spool": True} if config.keep_broadcasts else {}
    timeouts = source.timeouts
    if (
        "no_engine_s" not in timeouts.model_fields_set
        and config.inference.replicas
        and engine_backend(config) == "vllm"
    ):
        # An engine that was killed takes as long to come back as to start.
        timeouts = timeouts.model_copy(update={"no_engine_s": max(timeouts.no_engine_s, config.timeouts.start_s)})
    resolved = OrchestratorConfig.model_validate(
        {
            **shared(source, Orchestration),
            "timeouts": timeouts,
            "retention": source.retention.model_copy(update=keeps),
            "probe_tolerance": _probe_tolerance(config),
            "output_dir": absolute(config.output_dir),
            "seed": config.seed,
            "max_steps": config.max_steps,
            "seq_len": config.seq_len,
            "data_ranks": config.trainer.ranks,
            "log": Log(level=log_level(config, source.log)),
            "model": ServedModel(path=absolute(config.model.path), name=model_name(config)),
            "train": {"env": [named(environment) for environment in train]},
            "eval": {"env": [named(environment) for environment in evaluation]},
        }
    )
    return _process(config, "orchestrator", "orchestrator", resolved, threads=1)


def inference(config: RLConfig, orchestrator_url: str) -> list[ProcessConfig]:
    source = config.inference
    needed = "raw_logprobs" if config.orchestrator.sampling.is_plain else "processed_logprobs"
    lora = trained_lora(config)
    processes = []
    for index in range(source.replicas):
        name = "inference" if source.replicas == 1 else f"inference_{index}"
        resolved = InferenceConfig.model_validate(
            {
                **shared(source, InferenceSettings),
                "backend": engine_backend(config),
                "start_s": config.timeouts.start_s,
                "max_model_len": source.max_model_len or config.seq_len,
                "logprobs_mode": source.logprobs_mode or needed,
                "model": EngineModel(path=absolute(config.model.path), name=model_name(config)),
                # Two engines with one seed would sample the same tokens for the same prompt.
                "seed": config.seed + index,
                "join": orchestrator_url,
                "join_as": name,
                "lora": _engine_lora(config, lora) if lora and lora.broadcast == "adapter" else None,
                "log": Log(level=log_level(config, source.log)),
            }
        )
        processes.append(_process(config, "inference", name, resolved, threads=source.threads))
    return processes


def _engine_lora(config: RLConfig, lora: TrainerLora) -> EngineLora:
    # Rollouts in flight are no older than so many versions; the newest is loaded beside those that they began with.
    live = min(config.orchestrator.max_off_policy_steps, MOST_LIVE_VERSIONS) + 2
    return EngineLora(**shared(lora, EngineLora), max_adapters=live)


def adapters_to_keep(config: RLConfig) -> int | None:
    """How many versions' folders vLLM may read, which reads one again where it had no room for it: also those that
    rollouts in flight began with. None where it is sent no adapters."""
    lora = trained_lora(config)
    if lora is None or lora.broadcast != "adapter" or engine_backend(config) != "vllm":
        return None
    return config.orchestrator.max_off_policy_steps + 2 + config.orchestrator.max_async_level


def engine_backend(config: RLConfig) -> str:
    """`torch` or `vllm`: where it is left to be found out, what this machine has."""
    return chosen_backend(config.inference.backend, config.inference.python)


def engine_dtype(config: RLConfig) -> str:
    """Of the engines that the run starts: what they compute in where it is left out."""
    if config.inference.dtype is not None:
        return config.inference.dtype
    if engine_backend(config) == "torch":
        return "float32"
    try:
        return default_dtype(find(config.inference.python))
    except UnusableError:  # the checks before a start say so
        return "float32"


def _joined(
    config: RLConfig, environment: TrainEnvironment | EvaluationEnvironment, variables: list[str]
) -> dict[str, Any]:
    rollout_log = config.orchestrator.log
    settings = JoinedSettings(
        args=environment.arguments,
        seed=config.seed,
        max_concurrent=environment.max_concurrent,
        memory_mb=environment.memory_mb,
        log=RolloutLog(level=log_level(config, rollout_log), vf_level=rollout_log.vf_level),
        held_out=getattr(environment, "held_out", 0),
        variables=variables,
        local_workers=environment.num_workers,
    )
    told: dict[str, Any] = settings.model_dump(mode="json", exclude_none=True)
    return told


def env_workers(config: RLConfig, orchestrator_url: str) -> list[ProcessConfig]:
    processes = []
    rollout_log = config.orchestrator.log
    roles: list[tuple[Literal["train", "eval"], list[Any]]] = [
        ("train", list(config.orchestrator.train.env)),
        ("eval", list(config.orchestrator.eval.env)),
    ]
    for role, environments in roles:
        for environment in environments:
            for index in range(environment.num_workers):
                resolved = EnvWorkerConfig(
                    orchestrator_url=orchestrator_url,
                    environment=environment.label,
                    role=role,
                    worker_name=f"{environment.label}-{index}",
                    id=environment.id,
                    args=environment.arguments,
                    seed=config.seed,
                    held_out=getattr(environment, "held_out", 0),
                    max_concurrent=cast(Workers, environment).max_concurrent,
                    log=RolloutLog(level=log_level(config, rollout_log), vf_level=rollout_log.vf_level),
                    memory_mb=cast(Workers, environment).memory_mb,
                    limits=environment.limits,
                    metrics_port=port_of(cast(Workers, environment).metrics_port, index),
                )
                name = f"env_{environment.label}_{index}"
                log = Path("envs") / role / environment.label / f"env_worker_{index}.log"
                processes.append(_process(config, "env-worker", name, resolved, threads=1, log=log))
    return processes


def port_of(first: int | None, index: int) -> int | None:
    """Of the worker with this number."""
    return first + index if first else first


def trainer(config: RLConfig, orchestrator_url: str) -> ProcessConfig:
    settings = shared(config.trainer, TrainerSettings)
    changes: dict[str, Any] = {"keep_all": True} if config.keep_broadcasts else {}
    if "probe" not in config.trainer.weights.model_fields_set and not config.orchestrator.engines:
        changes["probe"] = engine_backend(config) != "torch"
    lora = trained_lora(config)
    if "keep_last" not in config.trainer.weights.model_fields_set:
        changes["keep_last"] = max(config.trainer.weights.keep_last, adapters_to_keep(config) or 0)
    weights = config.trainer.weights.model_copy(update=changes)
    # The launcher goes back to that step, once; a trainer that is started again goes on from the newest.
    ckpt = config.trainer.ckpt and config.trainer.ckpt.model_copy(update={"resume_step": None})
    resolved = TrainerConfig.model_validate(
        {
            **settings,
            "weights": weights,
            "ckpt": ckpt,
            "log": _trainer_log(config),
            "output_dir": absolute(config.output_dir),
            "orchestrator_url": orchestrator_url,
            "max_steps": config.max_steps,
            "seed": config.seed,
            "environments": [environment.label for environment in config.orchestrator.train.env],
            "distributions_interval": monitored.trainer_interval(config),
            "stored_adapters_interval": (config.store and config.store.adapters.interval) or None,
            "model": TrainedModel(path=absolute(config.model.path), lora=lora),
        }
    )
    return _process(config, "trainer", "trainer", resolved, threads=config.trainer.threads)


def log_level(config: RLConfig, own: Log) -> LogLevel:
    """Of a process: its own, else the run's."""
    return own.level if "level" in own.model_fields_set else config.log.level


def _trainer_log(config: RLConfig) -> TrainerLog:
    own = config.trainer.log
    if "level" in own.model_fields_set or "level" not in config.log.model_fields_set:
        return own
    found: TrainerLog = TrainerLog.model_validate({"level": TRAINER_LEVELS.get(config.log.level, config.log.level)})
    return found


def monitor(config: RLConfig | SFTConfig, variables: Mapping[str, str]) -> ProcessConfig | None:
    """None where the run has no monitor. `variables`: keys."""
    entries = monitored.entries(config)
    if not entries:
        return None
    path = config.model.path
    name = model_name(config) if isinstance(config, RLConfig) else None
    resolved = MonitorConfig(
        output_dir=absolute(config.output_dir),
        kind="rl" if isinstance(config, RLConfig) else "sft",
        model=name or (Path(absolute(path)).name if path else "tiny"),
        model_path=absolute(path) if path else None,
        max_steps=config.max_steps,
        finish_s=config.monitor.finish_s,
        monitors=entries,
        run=monitored.shown(config),
    )
    return _process(config, "monitor", "monitor", resolved, threads=1, variables=variables)


def _probe_tolerance(config: RLConfig) -> float:
    """Of engines that run elsewhere nobody says here what they compute in."""
    source, exact = config.orchestrator, {"float32"}
    if "probe_tolerance" in source.model_fields_set or source.engines:
        return source.probe_tolerance
    sent = config.trainer.weights.dtype or config.trainer.dtype
    computed = {config.trainer.dtype, sent, engine_dtype(config)}
    return EXACT_TOLERANCE if computed == exact else source.probe_tolerance


def sft(config: SFTConfig) -> SFTConfig:
    """With the paths that processes in other folders understand. Of data, hub names look like paths."""
    model = config.model
    if model.path is not None:
        model = model.model_copy(update={"path": absolute(model.path)})
    if model.lora is not None and model.lora.adapter_path is not None:
        adapter_path = absolute(model.lora.adapter_path)
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"adapter_path": adapter_path})})
    resolved: SFTConfig = config.model_copy(update={"output_dir": absolute(config.output_dir), "model": model})
    return resolved


def trained_lora(config: RLConfig) -> TrainerLora | None:
    """With what is left out decided: engines of elsewhere may not have been started for adapters, whose dtype is
    float32."""
    lora = config.trainer.model.lora
    if lora is None:
        return None
    merges = bool(config.orchestrator.engines) or config.trainer.weights.dtype is not None
    changes: dict[str, Any] = {"broadcast": lora.broadcast or ("merged" if merges else "adapter")}
    if lora.adapter_path is not None:
        changes["adapter_path"] = absolute(lora.adapter_path)
    resolved: TrainerLora = lora.model_copy(update=changes)
    return resolved


def model_name(config: RLConfig) -> str:
    return config.model.name or Path(absolute(config.model.path)).name


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def shared(config: BaseModel, target: type[BaseModel]) -> dict[str, Any]:
    """Values of the fields both have."""
    return {name: getattr(config, name) for name in type(config).model_fields if name in target.model_fields}


def named(environment: Source) -> Source:
    copy: Source = environment.model_copy(update={"name": environment.label})
    return copy


def _evaluation(environment: EvaluationEnvironment, config: RLConfig) -> ServedEvaluationSource:
    source = ServedEvaluationSource(**shared(environment, EvaluationSource))
    if source.sampling.max_tokens is not None:
        return source
    longest = config.orchestrator.sampling.max_tokens
    source.sampling = source.sampling.model_copy(update={"max_tokens": longest})
    return source


def _process(
    config: RLConfig | SFTConfig,
    kind: Kind,
    name: str,
    resolved: BaseModel,
    *,
    threads: int,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> ProcessConfig:
    folder = Path(absolute(config.output_dir))
    return ProcessConfig(
        kind=kind,
        name=name,
        config=resolved,
        file=folder / "configs" / f"{name}.toml",
        log=folder / "logs" / (log or f"{name}.log"),
        threads=threads,
        variables=variables or {},
    )


def run_file(config: RLConfig) -> Path:
    return Path(absolute(config.output_dir)) / "configs" / "rl.toml"


def run_to_toml(config: RLConfig) -> str:
    return dump_toml(given_settings(config))


def given_settings(config: RLConfig | SFTConfig) -> dict[str, Any]:
    """What was given, so that what is left out is decided anew (some defaults depend on its being left out). Without
    what is asked for once, to begin with."""
    exclude: dict[str, Any] = {"dry_run": True, "clean_output_dir": True}
    if isinstance(config, RLConfig) and config.ckpt is not None:
        exclude["trainer"] = {"ckpt"}  # the same settings
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude=exclude)
    if isinstance(config, RLConfig) and config.orchestrator.val is not None:
        _without_validation(found["orchestrator"])
    return found


def _without_validation(orchestrator: dict[str, Any]) -> None:
    """Takes out what follows from `val`, which would contradict it once it is changed."""
    for environment in orchestrator["train"]["env"]:
        environment.pop("held_out", None)
    kept = [environment for environment in orchestrator["eval"]["env"] if "validates" not in environment]
    if kept:
        orchestrator["eval"]["env"] = kept
    else:
        del orchestrator["eval"]  # nothing else is in it


def to_toml(config: BaseModel) -> str:
    # TOML has no null: a key that is left out is one that was not given.
    return dump_toml(config.model_dump(mode="json", exclude_none=True))


def dump_toml(settings: dict[str, Any]) -> str:
    return tomli_w.dumps(settings)


def write(process: ProcessConfig) -> None:
    write_text(process.file, to_toml(process.config))


def write_text(path: Path, text: str) -> None:
    """Under a temporary name, synced, then renamed: a reader sees the whole file or none."""
    write_parts(path, [text])


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """The same of a text that is not in memory at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
