"""Environments of a run, and what is sent to env workers that join."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from primerl.config.schema.base import (
    NAME_LENGTH,
    NAME_PATTERN,
    BadKeysError,
    BatchSize,
    Count,
    CountOrZero,
    LargeCount,
    Name,
    Port,
    ProcessesOrZero,
    RolloutLog,
    Seconds,
    Section,
    Seed,
    Settings,
)
from primerl.config.schema.rollouts import Algorithm, Demonstration, Sampling, TrainingMode
from primerl.config.schema.services import Client, Teacher
from primerl.envs import overrides
from primerl.process.setting_checks import LEAST_MEMORY_MB, MOST_COUNT, MOST_PORTS

MemoryMb = Annotated[int, Field(ge=LEAST_MEMORY_MB, le=MOST_COUNT)]


class Limits(Section):
    """What one rollout may take. At a limit the model answers no more; what was sampled is scored, and trained as
    `truncated_rollouts` says. An example may have lower ones of its own (docs/environments-seats.md)."""

    time_s: Seconds | None = None
    """Seconds since it was leased in which the model answers; below the environment's `rollout_s`, or
    `timeouts.rollout_s`, at which it fails. No limit if unset."""
    turns: Count | None = None
    """Answers of the model, over all conversations of a rollout. No limit if unset."""
    tokens: Count | None = None
    """Tokens sampled, over all conversations of a rollout; `sampling.rollout_max_tokens` counts as well. No limit if
    unset."""


class Environment(Section):
    """An environment, as the orchestrator needs it."""

    id: str = Field(min_length=1)
    """Name of the installed verifiers environment, for example `reverse-text`."""
    name: Name | None = None
    """Name in metrics, logs and files; default: the id's last part, without its version."""

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if len(self.label) > NAME_LENGTH or not re.match(NAME_PATTERN, self.label):
            raise BadKeysError(
                f"id ({self.id!r}) makes {self.label!r}, which cannot name metrics and files; set `name` to letters, "
                "digits, '.', '_' and '-'",
                "id",
            )
        return self

    @property
    def label(self) -> str:
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]


class Interpreter(Section):
    """The Python that an environment's workers run with, where it is not the one that runs primerl: for verifiers of
    another version, or packages that do not go together with others. One of the two keys is given."""

    path: str | None = Field(default=None, min_length=1)
    """A Python interpreter, or the folder of a virtualenv, in which the environment and its verifiers are installed."""
    requirements: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, min_length=1)
    """What is installed into a virtualenv that primerl makes and keeps: requirements such as `verifiers<0.4` and
    `my-env==1.2`, wheels, or folders of packages (`./my-env`)."""

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Self:
        if (self.path is None) == (self.requirements is None):
            raise BadKeysError(
                "python: give one of `path` (what you have installed) and `requirements` (to be installed)", "python"
            )
        for requirement in self.requirements or []:
            if requirement.startswith("-"):
                raise BadKeysError(
                    f"python.requirements: {requirement!r} is an option of an installer; give requirements only, or "
                    "install them yourself and give the virtualenv's `path`",
                    "python.requirements",
                )
        return self


def check_ports(first: int | None, workers: int, name: str) -> None:
    """Raises ValueError where not each worker has one."""
    last = (first or 0) + workers - 1
    if first and last > MOST_PORTS:
        raise BadKeysError(
            f"metrics_port ({first}): the last of {name} ({workers}) would have port {last}; choose a lower one, or 0 "
            "for any free ones",
            "metrics_port",
            name,
        )


class Workers(Section):
    """What env workers of this machine run."""

    python: Interpreter | None = None
    taskset: Settings = {}
    """The taskset's own settings, passed to the environment unchanged."""
    harness: Settings = {}
    """The harness that plays the environment's seat: `id` of an installed one, and its own settings; default:
    verifiers' chat within the worker. An environment of several seats takes it by seat, as `args.<seat>.harness`."""
    args: Settings = {}
    """The environment's other settings, passed to it unchanged."""
    system_prompt: str | None = None
    """System prompt in place of the examples' own, such as `primerl gepa` finds one."""
    system_prompt_file: str | None = Field(default=None, min_length=1)
    """A UTF-8 file with the `system_prompt`; its text is what the run keeps, so a later change of the file is none of
    the run."""
    num_workers: ProcessesOrZero = 1
    """Worker processes started on this machine; 0 if all of them join from other machines (`primerl env-worker
    --join`), for which the run waits (`timeouts.join_s`)."""
    max_concurrent: Count = 128
    """Rollouts one worker runs at the same time."""
    memory_mb: MemoryMb | None = None
    """Memory, in MiB, that a worker may allocate, and each process that its environment starts; above it they get
    `MemoryError`. No limit if unset."""
    cpus: Count | None = None
    """Cores that a worker may run on, and each process that its environment starts (CPU affinity, Linux); a machine's
    workers are spread over its cores. Where it has no more, all of them; no limit if unset."""
    metrics_port: Port | None = None
    """Serve Prometheus's `/metrics` on this port of the worker's machine, the next worker on the next one; 0: any free
    ports, which the workers' logs show. Off if unset."""

    @model_validator(mode="after")
    def _every_worker_has_a_port(self) -> Self:
        check_ports(self.metrics_port, self.num_workers, "num_workers")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What the environment is built from: `args`, with those of taskset and harness by their names."""
        named = {"taskset": self.taskset, "harness": self.harness}
        own = {**self.args, **{name: settings for name, settings in named.items() if settings}}
        return {**own, **overrides.reserved(self.system_prompt, getattr(self, "example_places", None))}

    @model_validator(mode="after")
    def _reads_the_prompt(self) -> Self:
        if self.system_prompt_file is None:
            return self
        if self.system_prompt is not None:
            raise BadKeysError(
                "system_prompt and system_prompt_file are both given; omit one of them", "system_prompt_file"
            )
        try:
            text = Path(self.system_prompt_file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise BadKeysError(
                f"system_prompt_file ({self.system_prompt_file}) cannot be read: {reason}; give a text file",
                "system_prompt_file",
            ) from None
        # Written and compared as text from here on.
        self.__dict__.update(system_prompt=text, system_prompt_file=None)
        self.__pydantic_fields_set__.discard("system_prompt_file")
        self.__pydantic_fields_set__.add("system_prompt")
        return self

    @model_validator(mode="after")
    def _is_given_once(self) -> Self:
        for name in ("taskset", "harness"):
            if getattr(self, name) and name in self.args:
                raise BadKeysError(f"{name} and args.{name} are both given; omit one of them", name)
        if overrides.RESERVED in self.args:
            raise BadKeysError(
                f"args.{overrides.RESERVED} is a name that primerl keeps for itself; environments cannot get it", "args"
            )
        return self


class TrainSource(Environment):
    """An environment whose rollouts are trained on."""

    ratio: float | None = Field(default=None, gt=0)
    """Relative share of the groups that come from this environment; default: 1."""
    max_retries: CountOrZero = 2
    """How often a failed rollout is tried again before its group is dropped."""
    algorithm: Algorithm | None = None
    """How its rewards become advantages; default: the run's algorithm."""
    group_size: BatchSize | None = None
    """Rollouts of one example; default: the run's `group_size`."""
    training_mode: TrainingMode | None = None
    """What the policy learns from here; default: the run's `training_mode`. One batch may hold several
    (docs/distillation.md)."""
    teacher: Teacher | None = None
    """The teacher of `opd` and `sft` here; default: the run's `teacher`."""
    demonstration: Demonstration | None = None
    """What the policy is shown in `opsd` here; default: the run's `demonstration`."""
    sampling: Sampling | None = None
    """How its rollouts are sampled; keys that are not given are those of the run's `sampling`."""
    rollout_s: Seconds | None = None
    """A rollout of it that has not ended after this long is cancelled and counts as failed; at most, and by default,
    `timeouts.rollout_s`."""
    limits: Limits = Limits()


class EvaluationSampling(Section):
    """How evaluation rollouts are sampled."""

    temperature: float = Field(default=0.0, ge=0, le=10)
    """Sampling temperature; 0 is greedy."""
    max_tokens: Count | None = None
    """Longest completion of one turn, in tokens; default: as in training."""
    rollout_max_tokens: Count | None = None
    """Tokens sampled in a whole rollout; default: as in training."""


class EvaluationSource(Environment):
    """An environment that measures the policy and is never trained on."""

    validates: Name | None = None
    """Name of the training environment whose held out examples these are: results are reported as `val/<name>` instead
    of `eval/<name>`."""
    num_examples: Count | None = None
    """Examples taken from the front of the list; all of them if unset."""
    rollouts_per_example: Count = 1
    """Rollouts of each example."""
    interval: LargeCount | None = None
    """Evaluate after every so many steps; default: only at the end (and the start)."""
    base_model: bool = True
    """Also evaluate the weights training starts from."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """A rollout with at least this reward has passed (pass@k)."""
    sampling: EvaluationSampling = EvaluationSampling()
    rollout_s: Seconds | None = None
    """A rollout of it that has not ended after this long is cancelled and counts as failed; at most, and by default,
    `timeouts.rollout_s`."""
    limits: Limits = Limits()
    client: Client | None = None
    """Who answers in place of the policy, as a baseline to compare with; default: the run's engines."""

    @model_validator(mode="after")
    def _client_answers(self) -> Self:
        if self.client is not None:
            self.client.check_type("client", "openai_chat_completions")
        return self


class TrainEnvironment(TrainSource, Workers):
    """An environment that is trained on, with its workers."""

    held_out: CountOrZero = 0
    """Examples at the front of its list, in the run's seeded order, that are never trained; `val` sets it. An
    evaluation with the same id, settings and so many `num_examples` measures just these."""


class EvaluationEnvironment(EvaluationSource, Workers):
    """An environment that is measured, with its workers."""


class Validation(Section):
    """Validation: each training environment is also measured on examples that are never trained, as `val/<name>`."""

    num_examples: Count | None = 64
    """Examples of each environment: held out of its training examples, or, where `taskset` or `args` name another
    split, that split's first ones."""
    rollouts_per_example: Count = 1
    """Rollouts of each example."""
    interval: LargeCount = 5
    """Validate after every so many steps, and at the end."""
    base_model: bool = True
    """Also validate the weights training starts from."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """A rollout with at least this reward has passed (pass@k)."""
    taskset: Settings = {}
    """How tasksets call their validation split, such as `{ split = "eval" }`, over the settings of each training
    environment. v1 has no standard setting for a split, each taskset has its own. Nothing is held out then."""
    args: Settings = {}
    """The same of the environments' other settings."""
    sampling: EvaluationSampling = EvaluationSampling()

    @model_validator(mode="after")
    def _holds_some_out(self) -> Self:
        if self.num_examples is None and not self.has_split:
            raise BadKeysError(
                "num_examples is all of them, but all would then be held out, and none is left to train on; give how "
                'many, or name the validation split in taskset, such as { split = "eval" }',
                "num_examples",
            )
        return self

    @property
    def has_split(self) -> bool:
        """The tasksets have a split for it."""
        return bool(self.taskset or self.args)

    def of(self, trained: TrainEnvironment) -> EvaluationEnvironment:
        """The evaluation that validates one training environment."""
        found: EvaluationEnvironment = EvaluationEnvironment.model_validate(
            {
                **{name: getattr(trained, name) for name in Workers.model_fields if name != "metrics_port"},
                **self.model_dump(
                    include={"rollouts_per_example", "interval", "base_model", "pass_threshold", "sampling"}
                ),
                "id": trained.id,
                "name": validation_label(trained.label),
                "validates": trained.label,
                "rollout_s": trained.rollout_s,
                "limits": trained.limits,
                "num_examples": self.num_examples,
                "taskset": trained.taskset | self.taskset,
                "args": trained.args | self.args,
            }
        )
        return found


def validation_label(label: str) -> str:
    """Name of the evaluation that validates a training environment."""
    return f"{label}-val"


def evaluation_label(label: str) -> str:
    """Name of an evaluation environment whose own name a training environment has."""
    return f"{label}-eval"


class TrainEnvironments(Section):
    """What is trained on."""

    env: list[TrainEnvironment] = Field(min_length=1)
    """Training environments, at least one."""


class EvaluationEnvironments(Section):
    """What is measured."""

    env: list[EvaluationEnvironment] = []
    """Evaluation environments."""


class JoinedSettings(Section):
    """Settings sent to env workers that join (`primerl env-worker --join`)."""

    args: Settings = {}
    """Settings of the environment, its taskset's under `taskset`, its harness's under `harness`."""
    seed: Seed = 0
    """Seed of the order of examples."""
    max_concurrent: Count = 128
    """Rollouts one worker runs at the same time."""
    memory_mb: MemoryMb | None = None
    """Memory, in MiB, that a worker may allocate, and each process that its environment starts."""
    cpus: Count | None = None
    """Cores that a worker may run on, and each process that its environment starts."""
    held_out: CountOrZero = 0
    """Number of examples skipped at the front of the list."""
    log: RolloutLog = RolloutLog()
    variables: list[str] = []
    """Names of the variables that the run's own workers get; their values are not sent."""
    local_workers: CountOrZero = 0
    """Workers that the run has of its own: others are compared with them."""


class ServedTrainSource(TrainSource):
    """An environment whose rollouts are trained on."""

    worker: JoinedSettings = JoinedSettings()
    """Settings sent to env workers that join, written by the launcher; the orchestrator only passes them on."""


class ServedEvaluationSource(EvaluationSource):
    """An environment that measures the policy and is never trained on."""

    name: Name | None = None
    """Name in metrics, logs and files; default: the id's last part, without its version, and `-eval`."""
    worker: JoinedSettings = JoinedSettings()
    """Settings sent to env workers that join, written by the launcher; the orchestrator only passes them on."""

    @property
    def label(self) -> str:
        return self.name or evaluation_label(super().label)


class TrainSources(Section):
    """What is trained on."""

    env: list[ServedTrainSource] = []
    """Training environments: at least one, unless max_steps is 0."""


class EvaluationSources(Section):
    """What is measured."""

    env: list[ServedEvaluationSource] = []
    """Evaluation environments."""
