"""The keys of the short form. Names, defaults and bounds are Hosted Training's, except where marked as ours."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, model_validator

from primerl.config.errors.foreign_keys import HOSTED, Names
from primerl.config.schema.base import (
    MOST_ROLLOUTS,
    NAME_LENGTH,
    NAME_PATTERN,
    AnswerTokens,
    BadKeysError,
    BatchSize,
    Bound,
    Count,
    CountOrZero,
    LargeCount,
    LargeCountOrZero,
    Name,
    Oversampling,
    Seconds,
    Section,
    Seed,
    Settings,
    check_dry_run,
    check_whole_groups,
)
from primerl.config.schema.environment import Interpreter, Limits, validation_label
from primerl.config.schema.environment_checks import evaluation_labels
from primerl.config.schema.rollouts import Buffer
from primerl.config.schema.services import Tailscale
from primerl.process.setting_checks import MOST_COUNT

REFERENCE = re.compile(r"[\w./-]+:\w+|[\w.]+\.\w+")
Reference = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.001, 10.0
# The message for a value below the lowest says why it is refused.
Temperature = Annotated[
    float, Field(ge=0, le=HIGHEST_TEMPERATURE), Bound(f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}")
]
# 0 is refused by words of its own.
ALL_OR_SOME = (Field(ge=-1, le=MOST_COUNT), Bound("-1 or at least 1"))
Examples = Annotated[int, *ALL_OR_SOME]


def all_or_some(value: int) -> int:
    if value == 0:
        raise ValueError("0 would keep none; give how many, or -1 for all of them")
    return value


Kept = Annotated[int, *ALL_OR_SOME, AfterValidator(all_or_some)]


def check_examples(num_examples: int | None) -> None:
    """Raises ValueError for 0: -1 is how all of them are asked for."""
    if num_examples == 0:
        raise BadKeysError("num_examples is 0; give how many, or -1 for all of them", "num_examples")


class HostedSampling(Section):
    """How rollouts are sampled, in training and in evaluations."""

    max_tokens: AnswerTokens
    """Longest answer of one turn, in tokens."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0 would be greedy, which cannot be trained on."""
    enable_thinking: bool | None = None
    """The chat template's switch for reasoning (Qwen3 and others); default: the template's."""
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    """The chat template's level of reasoning (gpt-oss and others); default: the template's."""

    @model_validator(mode="after")
    def _one_way_to_think(self) -> Self:
        if self.enable_thinking is not None and self.reasoning_effort is not None:
            raise BadKeysError(
                "enable_thinking and reasoning_effort are both set, and a model has one of the two; omit one",
                "enable_thinking",
            )
        if self.temperature < LOWEST_TEMPERATURE:
            raise BadKeysError(
                f"temperature ({self.temperature:g}) makes all rollouts of an example the same, with nothing to "
                f"compare; set it to {LOWEST_TEMPERATURE} or more",
                "temperature",
            )
        return self


class HostedReward(Section):
    """A reward function in addition to those of the taskset."""

    fn: str
    """The function: `module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """What its value is multiplied by."""
    priority: int | None = None
    """Higher runs first."""

    @model_validator(mode="after")
    def _is_a_reference(self) -> Self:
        if not REFERENCE.fullmatch(self.fn):
            raise BadKeysError(
                f"fn ({self.fn!r}) is no function like `module:function` or `path/to/file.py:function`", "fn"
            )
        return self


class HostedToolset(Section):
    """Functions that the model may call as tools, served by one process of each env worker."""

    tools: list[Reference] = Field(min_length=1)
    """The functions, `module:function`; name, arguments and docstring are the tool's."""
    objects: dict[str, Reference] = {}
    """What the tools share: name, and the function that makes it, `module:function`, called once."""
    bindings: Settings = {}
    """Arguments that the model is not asked for: `"tool.argument"`, and `"objects.name"` or a value."""


class HostedTaskset(Section):
    """Settings of a v1 environment's taskset; keys that are not listed here are passed to it unchanged."""

    model_config = ConfigDict(extra="allow")

    toolsets: dict[str, HostedToolset] = {}
    """Tools in addition to those of the taskset, by name."""
    rewards: list[HostedReward] = []
    """Rewards in addition to those of the taskset."""


class HostedSource(Section):
    """An environment."""

    id: str = Field(min_length=1)
    """The installed environment, as `owner/name`, with or without `@version`; or its name."""
    name: Name | None = None
    """Name in metrics, logs and files; default: the environment's."""
    args: Settings = {}
    """Settings, passed to the environment unchanged."""
    taskset: HostedTaskset = HostedTaskset()
    harness: Settings = {}
    """Settings of the harness of the environment's only seat; `max_turns` and other limits are the seat's."""
    system_prompt: str | None = None
    """Ours: system prompt in place of the examples' own, such as `primerl gepa` finds one."""
    system_prompt_file: str | None = Field(default=None, min_length=1)
    """Ours: a UTF-8 file with the `system_prompt`."""
    python: Interpreter | None = None
    """Ours: the Python that the environment runs with, where it is not the one that runs primerl."""
    rollout_s: Seconds | None = None
    """Ours: a rollout of it that has not ended after this long is cancelled and counts as failed; at most, and by
    default, 600."""
    limits: Limits = Limits()

    @property
    def label(self) -> str:
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    @model_validator(mode="after")
    def _can_be_named(self) -> Self:
        if len(self.label) > NAME_LENGTH or not re.match(NAME_PATTERN, self.label):
            raise BadKeysError(
                f"id ({self.id!r}) makes {self.label!r}, which cannot name metrics and files; set `name` to letters, "
                "digits, '.', '_' and '-'",
                "id",
            )
        if self.label == "all" or self.label.startswith("staleness_"):
            key = "id" if self.name is None else "name"
            raise BadKeysError(f"{key} makes {self.label!r}, which is a name of metrics; set another `name`", key)
        for key, table in [("taskset", self.taskset.model_fields_set), ("harness", self.harness)]:
            if table and key in self.args:
                raise BadKeysError(
                    f"args.{key} and {key} are the same settings, and both are given; omit one of them",
                    f"args.{key}",
                )
        return self


class HostedEnvironment(HostedSource):
    """An environment that is trained on."""

    max_retries: CountOrZero = 2
    """How often a failed rollout is tried again before its group is dropped."""


class HostedEvaluationEnvironment(HostedSource):
    """An environment that is measured."""

    num_examples: Examples | None = None
    """As in `eval`; default: the value there."""
    rollouts_per_example: Count | None = None
    """As in `eval`; default: the value there."""
    interval: LargeCount | None = None
    """As in `eval`; default: the value there."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        check_examples(self.num_examples)
        return self


class HostedEvaluations(Section):
    """Evaluations while the policy is trained, and one at the end."""

    interval: LargeCount = 100
    """Steps between evaluations."""
    num_examples: Examples = -1
    """Examples of each environment; -1 for all of them."""
    rollouts_per_example: Count = 1
    """Rollouts of each example."""
    eval_base_model: bool = True
    """Also evaluate the model before the first step."""
    env: list[HostedEvaluationEnvironment] = []
    """Environments; without any nothing is evaluated."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        check_examples(self.num_examples)
        return self


class HostedValidation(Section):
    """Evaluations on the training environments."""

    num_examples: Examples = 64
    """Examples of each environment; -1 for all of them."""
    rollouts_per_example: Count = 1
    """Rollouts of each example."""
    interval: LargeCount = 5
    """Steps between validations."""
    taskset: Settings = {}
    """Ours: how the tasksets call their validation split, such as `{ split = "eval" }`, over the settings of each
    environment; if unset, examples of the training environments are held out and never trained."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        check_examples(self.num_examples)
        if self.num_examples == -1 and not self.taskset:
            raise BadKeysError(
                "num_examples is -1, but all examples would then be held out, and none is left to train on; give how "
                'many, or name the validation split in taskset, such as { split = "eval" }',
                "num_examples",
            )
        return self


class HostedWandb(Section):
    """Weights & Biases."""

    project: str | None = Field(default=None, min_length=1)
    """Project."""
    name: str | None = None
    """Name of the run."""
    entity: str | None = None
    """User or team."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """Ours: the key, as `wandb.api_key` of the full form; `--wandb-api-key` on the command line."""


class HostedCheckpoints(Section):
    """Checkpoints."""

    interval: LargeCount | None = None
    """Steps between checkpoints, and one at the end; default: at the end only."""
    keep_cloud: Kept = 5
    """Newest checkpoints that the store keeps; -1 keeps all."""


class HostedAdapters(Section):
    """Adapters."""

    interval: LargeCountOrZero = 0
    """Steps between adapters that the store gets; 0 for the one of the run's end only."""
    keep_last: Kept = 3
    """Newest adapters that the store keeps, in addition to those that are deployed; -1 keeps all."""


class HostedInfrastructure(Section):
    """What environments run on."""

    compute_size: Literal["S", "M", "L"]
    """Env workers of each environment, and what each may take: S 1 of 4 GiB and 1 core, M 2 of 8 GiB and 2 cores, L 4
    of 16 GiB and 4 cores."""


class HostedConfig(Section):
    """The short form of `primerl rl`: LoRA training of a model on environments."""

    foreign_keys: ClassVar[Names] = HOSTED

    model: str = Field(min_length=1)
    """The model to train: a name of the hub (`owner/name`), or a folder."""
    loss: Literal["rl"] = "rl"
    """What is learnt from: rewards. Distillation is in the full form (docs/distillation.md)."""
    max_steps: LargeCount
    """Steps to train."""
    batch_size: BatchSize
    """Rollouts per step, a multiple of `rollouts_per_example`."""
    rollouts_per_example: int = Field(ge=2, le=MOST_ROLLOUTS)
    """Rollouts of one example, compared with each other."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of the adapter."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """The adapter's product is scaled by lora_alpha / rank; the rank is 16."""
    oversampling_factor: Oversampling = 2.0
    """Rollouts in flight, as a multiple of `batch_size`."""
    max_async_level: int = Field(default=2, ge=0, le=1_000_000)
    """How many steps generation may run ahead of the trainer; 0 is synchronous."""
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """`interleaved`: turns that extend each other are one sample. `branching`: each turn is a sample, with all before
    it as context."""
    env_files: list[str] = []
    """Files of variables (.env) that environments get, and no other process does (but the monitors', WANDB_API_KEY);
    relative paths are looked up in the folder of the file that names them, then in the working directory."""
    env_file: list[str] = []
    """The former name of `env_files`."""
    checkpoint_id: str | None = Field(default=None, min_length=1)
    """Checkpoint of the store to begin with."""
    sampling: HostedSampling
    env: list[HostedEnvironment] = Field(min_length=1)
    """Environments that are trained on, at least one."""
    wandb: HostedWandb | None = None
    eval: HostedEvaluations | None = None
    val: HostedValidation | None = None
    buffer: Buffer = Buffer()
    checkpoints: HostedCheckpoints = HostedCheckpoints()
    adapters: HostedAdapters = HostedAdapters()
    infrastructure: HostedInfrastructure | None = None
    tailscale: Tailscale = Tailscale()
    output_dir: str = Field(default="outputs/rl", min_length=1)
    """Ours: folder of the run: logs, metrics, weights. If unset, a new one in outputs/rl, named by time and
    environment."""
    seq_len: Count | None = None
    """Ours: longest sequence, in tokens, prompt and answers together; if unset, the power of two that is at least four
    times sampling.max_tokens, from 2048 and up to what the model can attend to."""
    seed: Seed = 0
    """Ours: seed of every random choice."""
    clean_output_dir: bool = False
    """Ours: delete what an earlier run left in output_dir."""
    fork_server: bool = True
    """Ours: fork the processes of this machine from servers that import their libraries once for all of them."""
    skip_event: LargeCount | None = None
    """Ours: skip this event in the journal of the run in output_dir, from this start on; the message of a run that
    cannot be resumed because of it names it."""
    dry_run: bool = False
    """Ours: check everything and write the full form to `configs/rl.toml` of output_dir, but start nothing."""

    @model_validator(mode="after")
    def _is_dry_or_cleans(self) -> Self:
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        return self

    @model_validator(mode="after")
    def _one_name_for_files(self) -> Self:
        if self.env_files and self.env_file:
            raise BadKeysError(
                "env_files and env_file are the same setting, and both are given; put all into env_files, today's name",
                "env_files",
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        check_whole_groups("batch_size", self.batch_size, "rollouts_per_example", self.rollouts_per_example)
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.seq_len is not None and self.sampling.max_tokens >= self.seq_len:
            raise BadKeysError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) must be below seq_len ({self.seq_len}), which holds "
                "the prompt too; lower one or raise the other",
                "sampling.max_tokens",
                "seq_len",
            )
        return self

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        labels = [(f"env[{index}]", environment.label) for index, environment in enumerate(self.env)]
        if self.val is not None:
            labels += [("val", validation_label(label)) for _, label in labels]
        if self.eval is not None:
            given = [environment.label for environment in self.eval.env]
            own = evaluation_labels([environment.label for environment in self.env], given)
            labels += [(f"eval.env[{index}]", label) for index, label in enumerate(own)]
        seen: set[str] = set()
        for place, label in labels:
            if label in seen:
                raise BadKeysError(
                    f"{place}: two environments are called {label!r}; give one of them another `name` (it names "
                    "metrics, logs and files)",
                    place,
                )
            seen.add(label)
        ratios = self.buffer.env_ratios
        if ratios is not None and len(ratios) != len(self.env):
            raise BadKeysError(
                f"buffer.env_ratios has {len(ratios)} numbers, and there are {len(self.env)} [[env]]; give one for "
                "each, in order",
                "buffer.env_ratios",
            )
        return self
