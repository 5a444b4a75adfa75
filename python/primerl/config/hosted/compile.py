"""From the short form to the full one.

model                       model.path (a folder, or a name of the hub)
max_steps, output_dir, seed, seq_len, clean_output_dir, fork_server, skip_event, dry_run      the same
batch_size                  orchestrator.batch_size
rollouts_per_example        orchestrator.group_size
learning_rate               trainer.optim.lr
lora_alpha                  trainer.model.lora.alpha, with rank 16
oversampling_factor, max_async_level, trajectory_strategy            orchestrator's
loss                        rewards are learnt from, as in the full form unless noted otherwise
env_files, env_file         env_files
checkpoint_id               checkpoint_id
sampling.max_tokens, .temperature                                    orchestrator.sampling's
sampling.enable_thinking, .reasoning_effort                          orchestrator.sampling.chat_template_kwargs
env                         orchestrator.train.env
env.harness                 args.harness: the adapter gives it to the environment's seat
env.taskset.toolsets, .rewards                                       taskset's: the adapter adds them
env.python, .rollout_s, .limits, .system_prompt, .system_prompt_file  of the environment the same
wandb                       wandb
eval                        defaults of eval.env
eval.env                    orchestrator.eval.env, sampled as in training
val                         orchestrator.val, sampled as in training: one `<name>-val` for each training environment
buffer                      orchestrator.buffer
checkpoints.interval        ckpt.interval; adapters are saved in addition to the weights
checkpoints.keep_cloud      store.keep
adapters                    store.adapters
infrastructure.compute_size num_workers, memory_mb and cpus of every environment
tailscale                   tailscale
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primerl.config.command_line.arguments import Location
from primerl.config.hosted.schema import (
    HostedConfig,
    HostedEvaluations,
    HostedSampling,
    HostedSource,
    HostedValidation,
)

RANK = 16
LEAST_SEQ_LEN = 2048
# Workers of each environment, MiB that each may allocate, cores that each may run on.
COMPUTE_SIZES = {"S": (1, 4096, 1), "M": (2, 8192, 2), "L": (4, 16384, 4)}

# Where a refusal of the full form was written in the short one; of those that fit the first that is written counts.
WRITTEN: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("model", "path"), ("model",)),
    (("model",), ("model",)),
    (("orchestrator", "group_size"), ("rollouts_per_example",)),
    (("orchestrator", "train"), ()),
    (("orchestrator", "eval", "env"), ("eval", "env")),
    (("orchestrator", "val"), ("val",)),
    (("orchestrator",), ()),
    (("trainer", "optim", "lr"), ("learning_rate",)),
    (("trainer", "model", "lora", "alpha"), ("lora_alpha",)),
    (("env_files",), ("env_files",)),
    (("env_files",), ("env_file",)),
    (("ckpt",), ("checkpoints",)),
    (("store", "keep"), ("checkpoints", "keep_cloud")),
    (("store", "adapters", "keep"), ("adapters", "keep_last")),
    (("store",), ()),
]


def compile_hosted(config: HostedConfig) -> dict[str, Any]:
    """The full form, as [`RLConfig`][primerl.config.schema.rl.RLConfig] reads it. Pure."""
    full: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": config.max_steps,
        "seq_len": config.seq_len or sequence_length(config.sampling.max_tokens),
        "seed": config.seed,
        "clean_output_dir": config.clean_output_dir,
        "dry_run": config.dry_run,
        "fork_server": config.fork_server,
        **_given(skip_event=config.skip_event),
        "env_files": config.env_files or config.env_file,
        "model": {"path": config.model},
        "trainer": {
            "model": {"lora": {"rank": RANK, "alpha": config.lora_alpha}},
            "optim": {"lr": config.learning_rate},
        },
        "ckpt": _given(interval=config.checkpoints.interval) | {"weights": {"save_adapter_separately": True}},
        "orchestrator": _orchestrator(config),
        "store": {
            "keep": config.checkpoints.keep_cloud,
            "adapters": {"interval": config.adapters.interval, "keep": config.adapters.keep_last},
        },
    }
    if config.checkpoint_id is not None:
        full["checkpoint_id"] = config.checkpoint_id
    if "tailscale" in config.model_fields_set:
        full["tailscale"] = config.tailscale
    if config.wandb is not None:
        # A key is in no dump.
        full["wandb"] = config.wandb.model_dump(exclude_none=True) | _given(api_key=config.wandb.api_key)
    return full


def sequence_length(max_tokens: int) -> int:
    """Room for a prompt and several turns: the power of two that is at least four answers."""
    return max(LEAST_SEQ_LEN, 1 << (4 * max_tokens - 1).bit_length())


def written_at(location: Location, is_written: Callable[[Location], object] = lambda _: True) -> Location:
    """Where a key of the full form was written in the short one; an empty place where it was nowhere."""
    fitting = [(*short, *location[len(full) :]) for full, short in WRITTEN if location[: len(full)] == full]
    return next(filter(is_written, fitting), fitting[0] if fitting else location)


def _orchestrator(config: HostedConfig) -> dict[str, Any]:
    size = _size(config)
    train = [_source(env) | size | {"max_retries": env.max_retries} for env in config.env]
    evaluation = [] if config.eval is None else _evaluations(config.eval, config.sampling, size)
    kwargs = _given(enable_thinking=config.sampling.enable_thinking, reasoning_effort=config.sampling.reasoning_effort)
    return {
        "batch_size": config.batch_size,
        "group_size": config.rollouts_per_example,
        "max_async_level": config.max_async_level,
        "oversampling_factor": config.oversampling_factor,
        "trajectory_strategy": config.trajectory_strategy,
        "sampling": {
            "max_tokens": config.sampling.max_tokens,
            "temperature": config.sampling.temperature,
            **_given(chat_template_kwargs=kwargs or None),
        },
        "buffer": config.buffer.model_dump(exclude_none=True),
        "train": {"env": train},
        **_given(eval={"env": evaluation} if evaluation else None),
        **_given(val=_validation(config.val, config.sampling) if config.val is not None else None),
    }


def _size(config: HostedConfig) -> dict[str, int]:
    if config.infrastructure is None:
        return {}
    workers, memory_mb, cpus = COMPUTE_SIZES[config.infrastructure.compute_size]
    return {"num_workers": workers, "memory_mb": memory_mb, "cpus": cpus}


def _source(source: HostedSource) -> dict[str, Any]:
    args = source.args | ({"harness": source.harness} if source.harness else {})
    # Unset keys stay unset: a taskset may have a setting of that name, with a default of its own.
    taskset = source.taskset.model_dump(exclude_unset=True, exclude_none=True)
    python = source.python and source.python.model_dump(exclude_none=True)
    limits = source.limits.model_dump(exclude_none=True)
    return _given(
        id=source.id,
        name=source.name,
        args=args or None,
        taskset=taskset or None,
        system_prompt=source.system_prompt,
        system_prompt_file=source.system_prompt_file,
        python=python,
        rollout_s=source.rollout_s,
        limits=limits or None,
    )


def _validation(validation: HostedValidation, sampling: HostedSampling) -> dict[str, Any]:
    measured = _measured(validation.num_examples, validation.rollouts_per_example, validation.interval, sampling)
    # An unset number would be 64 of them.
    return {"num_examples": None} | measured | _given(taskset=validation.taskset or None)


def _evaluations(
    evaluations: HostedEvaluations, sampling: HostedSampling, size: dict[str, int]
) -> list[dict[str, Any]]:
    def chosen(own: int | None, common: int) -> int:
        return common if own is None else own

    return [
        _source(environment)
        | size
        | _measured(
            chosen(environment.num_examples, evaluations.num_examples),
            chosen(environment.rollouts_per_example, evaluations.rollouts_per_example),
            chosen(environment.interval, evaluations.interval),
            sampling,
        )
        | {"base_model": evaluations.eval_base_model}
        for environment in evaluations.env
    ]


def _measured(num_examples: int, rollouts: int, interval: int, sampling: HostedSampling) -> dict[str, Any]:
    return {
        **_given(num_examples=None if num_examples == -1 else num_examples),
        "rollouts_per_example": rollouts,
        "interval": interval,
        "sampling": {"temperature": sampling.temperature},
    }


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
