"""From the config of `primerl eval` to one file for each of its processes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from primerl.config.process_files.files import ProcessConfig, absolute, process
from primerl.config.process_files.resolve import engine_backend, engines, spread_over_cores, workers
from primerl.config.schema.base import NAME_LENGTH, Log
from primerl.config.schema.environment import EvaluationSampling, ServedEvaluationSource
from primerl.config.schema.evaluation import EvalConfig, MeasuredEnvironment
from primerl.config.schema.inference import EngineModel
from primerl.config.schema.orchestrator import OrchestratorConfig, OrchestratorTimeouts, Retention, ServedModel
from primerl.config.schema.rollouts import Sampling

# The results are read from the journal, so nothing of it may go.
WHOLE_JOURNAL_MB = 2**30
TEXT_FOLDER = Path("run") / "text"
"""The tokenizer of an endpoint is unknown here: a byte-level one replaces it, for counts that agents may ask
for. Requests go to the endpoint as messages."""


def orchestrator(config: EvalConfig) -> ProcessConfig:
    timeouts = config.timeouts
    # An engine that was killed takes as long to come back as to start.
    is_slow_to_start = config.base_url is None and engine_backend(config).starts_slowly
    resolved = OrchestratorConfig(
        output_dir=absolute(config.output_dir),
        seed=config.seed,
        max_steps=0,
        seq_len=config.sequence_length,
        batch_size=config.concurrency,
        group_size=1,
        model=ServedModel(path=os.fspath(model_folder(config)), name=model_name(config)),
        sampling=Sampling(
            max_tokens=config.longest_answer,
            rollout_max_tokens=config.rollout_max_tokens,
            chat_template_kwargs=config.chat_template_kwargs,
        ),
        parsers=config.parsers,
        control_tokens=config.control_tokens,
        eval={"env": [_source(entry, config) for entry in config.env]},
        timeouts=OrchestratorTimeouts(
            rollout_s=timeouts.rollout_s,
            evaluation_s=timeouts.evaluation_s,
            engine_request_s=timeouts.answer_s,
            engine_update_s=timeouts.start_s,
            no_engine_s=max(timeouts.outage_s, timeouts.start_s) if is_slow_to_start else timeouts.outage_s,
        ),
        retention=Retention(journal_mb=WHOLE_JOURNAL_MB),
        log=Log(level=config.log.level),
        **({} if config._host is None else {"host": config._host}),
    )
    return process(config, "orchestrator", "orchestrator", resolved, threads=1)


def _source(entry: MeasuredEnvironment, config: EvalConfig) -> ServedEvaluationSource:
    def chosen(name: str) -> Any:
        own = getattr(entry, name)
        return getattr(config, name) if own is None else own

    return ServedEvaluationSource(
        id=entry.id,
        name=entry.label,
        num_examples=chosen("num_examples") if entry.example_places is None else len(entry.example_places),
        rollouts_per_example=chosen("rollouts_per_example"),
        pass_threshold=chosen("pass_threshold"),
        sampling=EvaluationSampling(
            temperature=chosen("temperature"),
            max_tokens=chosen("max_tokens"),
            rollout_max_tokens=chosen("rollout_max_tokens"),
        ),
        rollout_s=entry.rollout_s,
        client=config.client(),
    )


def inference(config: EvalConfig, orchestrator_url: str) -> list[ProcessConfig]:
    if config.base_url is not None:
        return []
    model = EngineModel(path=os.fspath(model_folder(config)), name=model_name(config))
    return engines(config, orchestrator_url, model, context=config.sequence_length, logprobs_mode="raw_logprobs")


def env_workers(config: EvalConfig, orchestrator_url: str) -> list[ProcessConfig]:
    return spread_over_cores(workers(config, config.env, "eval", orchestrator_url, config.log))


def model_folder(config: EvalConfig) -> Path:
    """Folder of the checkpoint; for an endpoint, of the tokenizer that replaces its own."""
    if config.base_url is not None:
        return Path(absolute(config.output_dir)) / TEXT_FOLDER
    return Path(absolute(config.model))


def model_name(config: EvalConfig) -> str:
    """Name of the model as environments see it. Requests to an endpoint carry the endpoint's own name for it."""
    if config.base_url is not None:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", config.model).strip("._-")[:NAME_LENGTH] or "model"
    return config.served_name or Path(absolute(config.model)).name
