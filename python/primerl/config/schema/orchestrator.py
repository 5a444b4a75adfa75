"""The orchestrator's part. The same keys are read by the native binary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from primerl import parsers
from primerl.config.schema import learning
from primerl.config.schema.base import (
    MOST_ROLLOUTS,
    BadKeysError,
    BatchSize,
    ControlTokens,
    Count,
    LargeCount,
    LargeCountOrZero,
    Log,
    Name,
    Oversampling,
    Port,
    Processes,
    RolloutLog,
    Section,
    Seed,
    Wait,
)
from primerl.config.schema.environment import (
    EvaluationEnvironments,
    EvaluationSources,
    TrainEnvironments,
    TrainSources,
    Validation,
)
from primerl.config.schema.environment_checks import check_environments, check_held_out, check_ratios, evaluation_labels
from primerl.config.schema.monitors import check_url
from primerl.config.schema.parser_names import ReasoningParserName, ToolParserName
from primerl.config.schema.rollouts import Admission, Algorithm, Buffer, Demonstration, Sampling, TrainingMode
from primerl.config.schema.services import ClientType, Teacher
from primerl.process.setting_checks import LONGEST_S

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class OrchestratorTimeouts(Section):
    """How long the orchestrator waits, in seconds."""

    rollout_s: Wait = 600.0
    """A rollout that has not ended after this long is cancelled and counts as failed."""
    worker_s: float = Field(default=15.0, ge=1, le=LONGEST_S)
    """A worker without a heartbeat for this long loses its leases."""
    long_poll_s: Wait = 10.0
    """Longest time a request for leases or a batch waits before it is answered with a reason."""
    evaluation_s: Wait | None = None
    """An evaluation that has not ended by then is closed with the results so far and reported as incomplete; no limit
    if unset."""
    evaluation_progress_s: Wait | None = None
    """The same for an evaluation of which no rollout was measured for this long, since weight updates wait for it;
    default: three times `rollout_s`."""
    engine_request_s: Wait = 300.0
    """Longest time one generation may take."""
    engine_update_s: Wait = 120.0
    """Longest time an engine may take to load new weights."""
    weights_s: Wait = 600.0
    """A trainer that holds a batch and has not published its weights for this long is warned about."""
    trainer_s: float = Field(default=25.0, ge=1, le=LONGEST_S)
    """The run fails when a trainer that sends heartbeats has been silent for this long."""
    no_engine_s: Wait = 60.0
    """The run fails when no engine was reachable for this long."""


class Retention(Section):
    """How much of the past is kept on disk."""

    spool_steps: LargeCount = 256
    """Batches kept for a trainer that has saved no checkpoint; with checkpoints, those after the last one are kept."""
    keep_spool: bool = False
    """Keep every batch, also those that a checkpoint covers: `primerl verify` needs them."""
    journal_mb: LargeCount = 1024
    """Larger than this, in MiB, the journal loses its oldest events. The last 128 MiB or so are always kept."""


def _resolve_parser(given: Any, check_name: ValidatorFunctionWrapHandler) -> Any:
    """Keeps names of ours, and replaces those of other parsers by their description."""
    if isinstance(given, dict):
        return parsers.checked(given, "the description", str(given.get("name", "described")))
    try:
        return check_name(given)
    except ValidationError as error:
        if not isinstance(given, str):
            raise
        if given.endswith(parsers.FILES) or given in parsers.registered():
            return parsers.describe(given)
        known = ", ".join([error.errors()[0]["ctx"]["expected"], *map(repr, parsers.registered())])
        raise ValueError(
            f"there is no parser {given!r}; there are {known}; for one of your own give the path of its description "
            f"({' or '.join(parsers.FILES)}, docs/render.md)"
        ) from None


class _OrDescription:
    """In a JSON schema, a table in place of a name."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        names, *others = handler(core_schema)["anyOf"]
        return {"anyOf": [names, {"type": "object", "additionalProperties": True}, *others]}


# For help and flags a name; a process is given the description of one that is not ours.
_PARSER = (WrapValidator(_resolve_parser), PlainSerializer(lambda value: value), _OrDescription())


class Parsers(Section):
    """How answers are parsed. Unset keys follow from the model's chat template and `config.json`."""

    tool: Annotated[ToolParserName | None, *_PARSER] = None
    """Syntax of tool calls. A parser of your own (docs/render.md): the name that its package registers, the path of its
    file, or its description as a table."""
    reasoning: Annotated[ReasoningParserName | None, *_PARSER] = None
    """Marks around reasoning. A parser of your own: as for `tool`."""


class Orchestration(Section):
    """Rollouts, batches and their order."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs PRIMERL_API_KEY in the environment."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    batch_size: BatchSize = 128
    """Rollouts per step, a multiple of `group_size`. Where environments have groups of different sizes, a step is full
    with the group that reaches it."""
    token_batch_size: LargeCount | None = None
    """Tokens per step, in place of `batch_size`: those of all samples, prompts and results of tools included. A step is
    full with the group that reaches it. How many rollouts may be under way follows from how long the last ones were;
    `oversampling_factor` has no part in that."""
    group_size: BatchSize = 8
    """Rollouts of one example, compared with each other."""
    min_group_size: int | None = Field(default=None, ge=2, le=MOST_ROLLOUTS)
    """Rollouts with which a group is trained when the others are lost; all of them if unset, and in a smaller group."""
    group_on_cancel: Literal["refill", "drop"] = "refill"
    """What becomes of a group that loses a rollout as stale: `refill` starts another in its place, `drop` does not."""
    max_async_level: int = Field(default=2, ge=0, le=1_000_000)
    """How many steps generation may run ahead of the trainer; 0 is synchronous."""
    max_off_policy_steps: int = Field(default=8, ge=0, le=1_000_000)
    """Oldest policy that may be trained on, in steps; older samples are dropped and counted."""
    oversampling_factor: Oversampling = 1.0
    """Rollouts in flight, as a multiple of `batch_size`."""
    admission: Admission = Admission()
    trajectory_strategy: Literal["interleaved", "branching"] = "interleaved"
    """`interleaved`: turns that extend each other are one sample. `branching`: each turn is a sample, with all before
    it as context."""
    truncated_rollouts: Literal["train", "mask", "drop"] = "train"
    """Rollouts that the environment cut short: trained as all others, counted in their group's baseline only, or tried
    again as failed."""
    long_samples: Literal["drop", "truncate"] = "drop"
    """Samples longer than `seq_len`: dropped, or truncated to it at their ends."""
    training_mode: TrainingMode = "rl"
    """What the policy learns from. `rl`: the rewards of its rollouts. `opd`, on-policy distillation: a teacher's
    log-probabilities of what it samples. `sft`: a teacher's answers in place of its own. `opsd`, self-distillation: its
    own log-probabilities of what it samples, having seen what an expert answered (docs/distillation.md)."""
    teacher: Teacher | None = None
    """The teacher of `opd` and `sft`; the other modes have none."""
    demonstration: Demonstration = Demonstration()
    client_type: ClientType = "renderer"
    """Who turns messages into tokens. `renderer`: the orchestrator; engines take token ids.
    `openai_chat_completions_token`: the engines, with their own template; they say which ids they were given and
    sampled. `openai_chat_completions` gives text only, which cannot be trained on."""
    engines: list[str] = []
    """URLs of inference engines that already run (http or https), in addition to those that are started
    (`inference.replicas`; 0 for none)."""
    probe_tolerance: float = Field(default=0.5, gt=0)
    """How far an engine's log-probabilities may be from the trainer's, right after it has loaded weights, on the tokens
    that the trainer publishes with them: mean of the differences, in nats. `primerl rl` lowers it to 0.001 where it
    knows that both compute in fp32: the engine by `inference.dtype` or its default, the trainer by `trainer.dtype`."""
    sampling: Sampling = Sampling()
    parsers: Parsers = Parsers()
    control_tokens: ControlTokens = "keep"
    """What becomes of the model's control tokens (`<|im_end|>`) in the text of messages. `keep`: they end turns, as in
    `transformers`, and are counted. `neutralize`: they are encoded as plain text (docs/templates.md)."""
    algorithm: Algorithm = Algorithm()
    buffer: Buffer = Buffer()
    timeouts: OrchestratorTimeouts = OrchestratorTimeouts()
    retention: Retention = Retention()
    log: Log = Log()

    @model_validator(mode="after")
    def _trainable_answers(self) -> Self:
        if self.client_type == "openai_chat_completions":
            raise BadKeysError(
                "client_type (openai_chat_completions) gives text: without the ids and log-probabilities of what was "
                "sampled nothing can be trained; use renderer or openai_chat_completions_token (an evaluation "
                "environment may have a `client` of that type)",
                "client_type",
            )
        return self

    @model_validator(mode="after")
    def _neutralizes_what_it_renders(self) -> Self:
        if self.control_tokens != "keep" and self.client_type != "renderer":
            raise BadKeysError(
                f"control_tokens ({self.control_tokens}) is for messages that are rendered here, and with client_type "
                f"({self.client_type}) engines render them; omit one of the two",
                "control_tokens",
                "client_type",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, given: Any) -> Any:
        """An environment's `sampling` is completed from the run's. Before it is checked: its keys go together."""
        return learning.with_own_sampling(given)

    @model_validator(mode="after")
    def _engines_are_urls(self) -> Self:
        for index, url in enumerate(self.engines):
            check_url(url, f"engines[{index}]", "http://host:port")
        return self

    @model_validator(mode="after")
    def _trains_what_is_generated(self) -> Self:
        if self.max_off_policy_steps < self.max_async_level:
            raise BadKeysError(
                f"max_off_policy_steps ({self.max_off_policy_steps}) must be at least max_async_level "
                f"({self.max_async_level}): rollouts would be generated only to be too old to train on; raise the "
                "first, or lower the second",
                "max_off_policy_steps",
                "max_async_level",
            )
        return self


class OrchestratorSettings(Orchestration):
    """Rollouts, batches and their order."""

    train: TrainEnvironments
    eval: EvaluationEnvironments = EvaluationEnvironments()
    val: Validation | None = None
    log: RolloutLog = RolloutLog()

    def samplings(self) -> list[tuple[str, Sampling]]:
        """The ways in which training rollouts are sampled, each with the key that says so."""
        return learning.samplings(self, self.train.env)

    @model_validator(mode="after")
    def _is_validated(self) -> Self:
        """`val` becomes evaluations, and training environments that leave their examples out."""
        if self.val is None:
            return self
        held_out = 0 if self.val.has_split else self.val.num_examples or 0
        own = [self.val.of(environment) for environment in self.train.env]
        names = {environment.label: environment for environment in own}
        others = [environment for environment in self.eval.env if environment != names.get(environment.label)]
        twice = next((entry for entry in others if entry.validates is not None), None)
        if twice is not None:
            raise BadKeysError(
                f"val validates {twice.validates!r}, and so does eval.env {twice.label!r}; omit one of the two",
                "val",
            )
        trained = next((entry for entry in self.train.env if entry.held_out not in (0, held_out)), None)
        if trained is not None:
            raise BadKeysError(
                f"val holds {held_out} examples of {trained.label!r} out, and its held_out is {trained.held_out}; "
                "omit one of the two",
                "val",
            )
        kept = [environment.model_copy(update={"held_out": held_out}) for environment in self.train.env]
        self.train = self.train.model_copy(update={"env": kept})
        self.eval = self.eval.model_copy(update={"env": [*own, *others]})
        return self

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        made = 0 if self.val is None else len(self.train.env)
        given = self.eval.env[made:]
        labels = evaluation_labels([one.label for one in self.train.env], [one.label for one in given])
        if labels != [one.label for one in given]:
            named = [one.model_copy(update={"name": label}) for one, label in zip(given, labels, strict=True)]
            self.eval = self.eval.model_copy(update={"env": [*self.eval.env[:made], *named]})
        check_environments(self, self.train.env, self.eval.env, made=made)
        check_held_out(self.train.env, self.eval.env)
        return self

    @model_validator(mode="after")
    def _ratios(self) -> Self:
        check_ratios(self.buffer.env_ratios, self.train.env)
        return self


class ServedModel(Section):
    """The model, as the orchestrator needs it."""

    path: str
    """Folder with the tokenizer, the chat template and config.json."""
    name: Name | None = None
    """Name under which environments see the model; default: the folder's name."""


class OrchestratorConfig(Orchestration):
    """One orchestrator process (`primerl orchestrator @ file`)."""

    output_dir: str
    """Folder of the run."""
    seed: Seed = 0
    """Seed of every random choice."""
    max_steps: LargeCountOrZero
    """The run ends after so many steps. 0: there is no training environment, and what eval.env names is measured once,
    of the weights that are published first or of other servers (`client`), as `primerl eval` does."""
    seq_len: Count = 2048
    """Longest micro-batch, in tokens; a longer sample is dropped or cut, and counted."""
    data_ranks: Processes = 1
    """Trainer processes among which a batch is divided."""
    shared_prefixes: bool = False
    """Pack samples that begin alike as a tree, whose shared tokens the trainer computes once."""
    router_replay: bool = False
    """Engines report which experts of a mixture they chose, for a trainer that uses the same
    (`trainer.enable_router_replay`)."""
    model: ServedModel
    train: TrainSources = TrainSources()
    eval: EvaluationSources = EvaluationSources()

    @model_validator(mode="after")
    def _environments_fit(self) -> Self:
        check_environments(self, self.train.env, self.eval.env)
        return self

    @model_validator(mode="after")
    def _has_something_to_do(self) -> Self:
        if self.max_steps and not self.train.env:
            raise BadKeysError(
                "train.env is empty: there is no training environment; add at least one, or set max_steps to 0 to "
                "evaluate only",
                "train.env",
            )
        if not self.max_steps and self.train.env:
            raise BadKeysError(
                "max_steps (0) is for a run that only evaluates, but train.env has environments; set it to at least 1, "
                "or remove them",
                "max_steps",
            )
        if not self.max_steps and not self.eval.env:
            raise BadKeysError(
                "max_steps (0) is for a run that only evaluates, but eval.env is empty; add an environment", "max_steps"
            )
        return self

    @model_validator(mode="after")
    def _ratios(self) -> Self:
        check_ratios(self.buffer.env_ratios, self.train.env)
        return self
