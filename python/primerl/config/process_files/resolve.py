"""From the run's one config to one file for each process."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from primerl.config.process_files import monitored
from primerl.config.process_files.files import ProcessConfig, absolute, process, shared
from primerl.config.schema.base import Log, RolloutLog
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.config.schema.environment import (
    EvaluationEnvironment,
    EvaluationSource,
    JoinedSettings,
    ServedEvaluationSource,
    ServedTrainSource,
    TrainEnvironment,
    TrainSource,
)
from primerl.config.schema.evaluation import EvalConfig, MeasuredEnvironment
from primerl.config.schema.inference import EngineModel, InferenceConfig, InferenceSettings
from primerl.config.schema.monitors import MonitorConfig
from primerl.config.schema.orchestrator import Orchestration, OrchestratorConfig, ServedModel
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.services import TailnetNode, Tailscale, node_name
from primerl.config.schema.sft import SFTConfig
from primerl.config.schema.trainer import (
    EngineLora,
    TrainedModel,
    TrainerConfig,
    TrainerLog,
    TrainerLora,
    TrainerSettings,
)
from primerl.inference import backends
from primerl.inference.backend import EngineBackend, UnservableError
from primerl.process.log_levels import LogLevel
from primerl.train.model import support

EXACT_TOLERANCE = 1e-3
"""Nats. Sums in another order are 1e-5 apart at most, in fp32."""
MOST_LIVE_VERSIONS = 6
"""Engines keep room for each adapter in the GPU's memory."""
TRAINER_LEVELS = {"trace": "debug", "warn": "warning"}
"""The run's log levels by the names that the trainer uses, which are Python's."""


def orchestrator(
    config: RLConfig, variables: Mapping[str, list[str]] | None = None, *, own_trainer: bool = False
) -> ProcessConfig:
    """`variables`: names of those that env workers get, by their environment's name. `own_trainer`: the user's training
    loop trains the batches, in place of the run's trainer."""
    source, own_trainer = config.orchestrator, own_trainer or config.trainer.external
    train = [ServedTrainSource(**shared(environment, TrainSource)) for environment in source.train.env]
    evaluation = [_evaluation(environment, config) for environment in source.eval.env]
    for served, environment in zip([*train, *evaluation], [*source.train.env, *source.eval.env], strict=True):
        # Without a name, a file of the orchestrator's own has another rule for it.
        served.name = environment.label
        served.worker = _joined(config, environment, (variables or {}).get(environment.label, []))
    keeps = {"keep_spool": True} if config.keep_broadcasts else {}
    timeouts = source.timeouts
    if (
        "no_engine_s" not in timeouts.model_fields_set
        and config.inference.replicas
        and engine_backend(config).starts_slowly
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
            # Samples with the same tokens may have other experts.
            "shared_prefixes": not own_trainer and not config.trainer.enable_router_replay and _shares_prefixes(config),
            "router_replay": config.trainer.enable_router_replay,
            "log": Log(level=log_level(config, source.log)),
            "model": ServedModel(path=absolute(config.model.path), name=model_name(config)),
            "train": {"env": train},
            "eval": {"env": evaluation},
        }
    )
    return process(config, "orchestrator", "orchestrator", resolved, threads=1)


def _shares_prefixes(config: RLConfig) -> bool:
    """Whether the run's trainer computes tokens that samples begin with alike once. A layer with a state would need the
    state of every branch."""
    if config.trainer.shared_prefixes == "off":
        return False
    try:
        model = json.loads((Path(absolute(config.model.path)) / "config.json").read_bytes())
    except (OSError, ValueError):  # the checks before a start say so
        return False
    return isinstance(model, dict) and not support.has_state(model)


def inference(config: RLConfig, orchestrator_url: str) -> list[ProcessConfig]:
    plain = all(sampling.is_plain for _, sampling in config.orchestrator.samplings())
    needed = "raw_logprobs" if plain else "processed_logprobs"
    model = EngineModel(path=absolute(config.model.path), name=model_name(config))
    lora = trained_lora(config)
    adapters = _engine_lora(config, lora) if lora and lora.broadcast == "adapter" else None
    replays = config.trainer.enable_router_replay
    return engines(
        config,
        orchestrator_url,
        model,
        context=config.seq_len,
        logprobs_mode=needed,
        lora=adapters,
        returns_experts=replays,
    )


def engines(
    config: RLConfig | EvalConfig,
    orchestrator_url: str,
    model: EngineModel,
    *,
    context: int,
    logprobs_mode: str,
    lora: EngineLora | None = None,
    returns_experts: bool = False,
) -> list[ProcessConfig]:
    """All replicas. `context` (tokens) and `logprobs_mode` count where the settings do not set them."""
    source = config.inference
    trusted = isinstance(config, RLConfig) and config.model.trust_remote_code
    vllm = backends.vllm_options(source.backend, engine_name(config), source.vllm, trusted=trusted)
    processes = []
    for index in range(source.replicas):
        name = "inference" if source.replicas == 1 else f"inference_{index}"
        resolved = InferenceConfig.model_validate(
            {
                **shared(source, InferenceSettings),
                "vllm": vllm,
                "backend": engine_name(config),
                "start_s": config.timeouts.start_s,
                "max_model_len": source.max_model_len or context,
                "logprobs_mode": source.logprobs_mode or logprobs_mode,
                "model": model,
                # Where requests are seeded by their ids, each replica samples them alike. Engines that draw from one
                # generator would sample the same tokens for the same prompt, had they the same seed.
                "seed": config.seed + (0 if engine_backend(config).seeds_each_request else index),
                "join": orchestrator_url,
                "join_as": name,
                "lora": lora,
                "gpu_share": _engine_share(config),
                "enable_return_routed_experts": returns_experts,
                "log": Log(level=log_level(config, source.log)),
            }
        )
        processes.append(process(config, "inference", name, resolved, threads=source.threads))
    return processes


def engine_gpus(config: RLConfig | EvalConfig) -> int:
    """GPUs that one of the run's own engines asks for."""
    source = config.inference
    return engine_backend(config).gpus(source.device, source.options or source.vllm)


def _engine_share(config: RLConfig | EvalConfig) -> float | None:
    """An engine's part of the GPUs that engines share with the trainer, and with each other where they are more."""
    if not isinstance(config, RLConfig) or config.deployment.engine_share is None:
        return None
    wanted = config.inference.replicas * engine_gpus(config)
    return config.deployment.engine_share / max(1, math.ceil(wanted / config.trainer.ranks)) if wanted else None


def _trainer_share(config: RLConfig) -> float | None:
    share = config.deployment.engine_share
    return None if share is None else round(1.0 - share, 6)


def _engine_lora(config: RLConfig, lora: TrainerLora) -> EngineLora:
    # Rollouts in flight are no older than this; the newest version is loaded next to those they started with.
    live = min(config.orchestrator.max_off_policy_steps, MOST_LIVE_VERSIONS) + 2
    return EngineLora(**shared(lora, EngineLora), max_adapters=live)


def adapters_to_keep(config: RLConfig) -> int | None:
    """How many versions' folders engines may read that read one again where they had no room for it: also those that
    rollouts in flight began with. None where they read none again."""
    lora = trained_lora(config)
    if lora is None or lora.broadcast != "adapter" or not engine_backend(config).rereads_adapters:
        return None
    return config.orchestrator.max_off_policy_steps + 2 + config.orchestrator.max_async_level


def engine_name(config: RLConfig | EvalConfig) -> str:
    """Name of the engines' backend: for `auto`, what this machine has and what serves the model."""
    model = config.model.path if isinstance(config, RLConfig) else config.model
    return backends.chosen(config.inference.backend, config.inference.python, Path(absolute(model)))


def engine_backend(config: RLConfig | EvalConfig) -> EngineBackend:
    return backends.named(engine_name(config))


def engine_dtype(config: RLConfig) -> str:
    """Number format that the run's own engines compute in."""
    if config.inference.dtype is not None:
        return config.inference.dtype
    try:
        return engine_backend(config).default_dtype(config.inference.python)
    except UnservableError:  # the checks before a start say so
        return "float32"


def _joined(
    config: RLConfig, environment: TrainEnvironment | EvaluationEnvironment, variables: list[str]
) -> JoinedSettings:
    settings: JoinedSettings = JoinedSettings.model_validate(
        {
            **shared(environment, JoinedSettings),
            "args": environment.arguments,
            "seed": config.seed,
            "log": _rollout_log(config),
            "variables": variables,
            "local_workers": environment.num_workers,
        }
    )
    return settings


def env_workers(config: RLConfig, orchestrator_url: str, run_id: str | None = None) -> list[ProcessConfig]:
    """`run_id`: as the list of runs has it; None where it has none."""
    sources, log = config.orchestrator, _rollout_log(config)
    processes = [
        *workers(config, sources.train.env, "train", orchestrator_url, log),
        *workers(config, sources.eval.env, "eval", orchestrator_url, log),
    ]
    processes = spread_over_cores(processes)
    if not config.tailscale.enabled:
        return processes
    run = run_id or Path(absolute(config.output_dir)).name
    return [_in_tailnet(config.tailscale, worker, index, run) for index, worker in enumerate(processes)]


def spread_over_cores(processes: list[ProcessConfig]) -> list[ProcessConfig]:
    """Env workers of one machine: each that is bound to some cores begins where the previous one has ended."""
    found, first = [], 0
    for worker in processes:
        config = worker.config
        if isinstance(config, EnvWorkerConfig) and config.cpus is not None:
            found.append(replace(worker, config=config.model_copy(update={"first_cpu": first})))
            first += config.cpus
        else:
            found.append(worker)
    return found


def _in_tailnet(source: Tailscale, worker: ProcessConfig, index: int, run: str) -> ProcessConfig:
    log = worker.log.with_name(worker.log.name.replace("env_worker", "tailscaled"))
    node = TailnetNode(name=node_name(source.hostname_prefix, index, run), log=os.fspath(log), login_s=source.login_s)
    return replace(worker, config=worker.config.model_copy(update={"tailnet": node}))


def workers(
    config: RLConfig | EvalConfig,
    environments: Sequence[TrainEnvironment | EvaluationEnvironment | MeasuredEnvironment],
    role: Literal["train", "eval"],
    orchestrator_url: str,
    log: RolloutLog,
) -> list[ProcessConfig]:
    """All env workers of these environments."""
    processes = []
    for environment in environments:
        label = environment.label
        for index in range(environment.num_workers):
            resolved = EnvWorkerConfig.model_validate(
                {
                    **shared(environment, EnvWorkerConfig),
                    "orchestrator_url": orchestrator_url,
                    "environment": label,
                    "role": role,
                    # The name of its process and of its log.
                    "worker_name": f"env_{label}_{index}",
                    "args": environment.arguments,
                    "seed": config.seed,
                    "log": log,
                    "metrics_port": port_of(environment.metrics_port, index),
                }
            )
            file = Path("envs") / role / label / f"env_worker_{index}.log"
            processes.append(process(config, "env-worker", f"env_{label}_{index}", resolved, threads=1, log=file))
    return processes


def _rollout_log(config: RLConfig) -> RolloutLog:
    own = config.orchestrator.log
    return RolloutLog(level=log_level(config, own), vf_level=own.vf_level)


def port_of(first: int | None, index: int) -> int | None:
    """Port of the worker with this number."""
    return first + index if first else first


def trainer(config: RLConfig, orchestrator_url: str) -> ProcessConfig:
    settings = shared(config.trainer, TrainerSettings)
    changes: dict[str, Any] = {"keep_all": True} if config.keep_broadcasts else {}
    if "probe" not in config.trainer.weights.model_fields_set and not config.orchestrator.engines:
        changes["probe"] = not engine_backend(config).digests_live_weights
    lora = trained_lora(config)
    if "keep_last" not in config.trainer.weights.model_fields_set:
        changes["keep_last"] = max(config.trainer.weights.keep_last, adapters_to_keep(config) or 0)
    weights = config.trainer.weights.model_copy(update=changes)
    # The launcher goes back to that step, once; a restarted trainer resumes from the newest checkpoint.
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
            "gpu_share": _trainer_share(config),
            "stored_adapters_interval": (config.store and config.store.adapters.interval) or None,
            "model": TrainedModel(
                path=absolute(config.model.path), trust_remote_code=config.model.trust_remote_code, lora=lora
            ),
        }
    )
    return process(config, "trainer", "trainer", resolved, threads=config.trainer.threads)


def log_level(config: RLConfig | EvalConfig, own: Log) -> LogLevel:
    """The level of a process: its own if given, else the run's."""
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
    return process(config, "monitor", "monitor", resolved, threads=1, variables=variables)


def _probe_tolerance(config: RLConfig) -> float:
    """The number format of engines on other machines is not known here; nor is the trainer's where it follows from its
    device."""
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
    """With unset keys decided: engines on other machines may not have been started for adapters, whose dtype is
    float32, and no engine has adapters of every model."""
    lora = config.trainer.model.lora
    if lora is None:
        return None
    changes: dict[str, Any] = {"broadcast": lora.broadcast or ("merged" if _merges(config, lora) else "adapter")}
    if lora.adapter_path is not None:
        changes["adapter_path"] = absolute(lora.adapter_path)
    resolved: TrainerLora = lora.model_copy(update=changes)
    return resolved


def _merges(config: RLConfig, lora: TrainerLora) -> bool:
    if config.orchestrator.engines or config.trainer.weights.dtype is not None:
        return True
    folder = Path(absolute(config.model.path))
    return engine_backend(config).merges(lora.target_modules, folder) is not None


def model_name(config: RLConfig) -> str:
    return config.model.name or Path(absolute(config.model.path)).name


def _evaluation(environment: EvaluationEnvironment, config: RLConfig) -> ServedEvaluationSource:
    source = ServedEvaluationSource(**shared(environment, EvaluationSource))
    if source.sampling.max_tokens is not None:
        return source
    longest = config.orchestrator.sampling.max_tokens
    source.sampling = source.sampling.model_copy(update={"max_tokens": longest})
    return source
