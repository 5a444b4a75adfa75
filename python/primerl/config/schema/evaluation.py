"""`primerl eval`: environments against an endpoint or a checkpoint, and nothing is trained."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PrivateAttr, model_validator

from primerl.config.schema.base import (
    AnswerTokens,
    BadKeysError,
    BatchSize,
    ControlTokens,
    Count,
    CountOrZero,
    Name,
    RolloutLog,
    Seconds,
    Section,
    Seed,
    Settings,
    check_dry_run,
)
from primerl.config.schema.deployment import Deployment, Ray, Slurm, check_places
from primerl.config.schema.environment import Environment, Workers
from primerl.config.schema.environment_checks import check_distinct, check_rollout_times, numbered
from primerl.config.schema.orchestrator import Parsers
from primerl.config.schema.rl import RunInference
from primerl.config.schema.services import Client

# Room for a prompt and several turns, where nothing says more.
LEAST_SEQ_LEN = 2048


class MeasuredEnvironment(Environment, Workers):
    """An environment that is measured; unset keys default to the evaluation's."""

    num_examples: Count | None = None
    """Examples taken from the front of the list."""
    example_places: list[CountOrZero] | None = Field(default=None, min_length=1)
    """Places in the list, from 0, of the examples that are measured, in place of those at the front."""
    rollouts_per_example: Count | None = None
    """Rollouts of each example."""
    max_tokens: AnswerTokens | None = None
    """Longest answer of one turn, in tokens."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """Sampling temperature; 0 is greedy."""
    pass_threshold: float | None = Field(default=None, allow_inf_nan=False)
    """A rollout with at least this reward has passed (pass@k)."""
    rollout_max_tokens: Count | None = None
    """Tokens sampled in a whole rollout, over all its turns."""
    rollout_s: Seconds | None = None
    """A rollout of it that has not ended after this long is cancelled; at most, and by default,
    `timeouts.rollout_s`."""


class EvalTimeouts(Section):
    """How long to wait, in seconds, before reporting what is missing."""

    check_s: Seconds = 300.0
    """Until the environments are imported, and the orchestrator has checked its config, before anything is started."""
    install_s: Seconds = 1800.0
    """Until the requirements of an environment (`python.requirements`) are installed, before that."""
    start_s: Seconds = 300.0
    """Until the engine is ready and env workers have registered."""
    rollout_s: Seconds = 600.0
    """A rollout that has not ended after this long is given up, tried once more, and then counts as failed."""
    evaluation_s: Seconds | None = None
    """Time limit of the whole evaluation: rollouts that have not ended by then are not in the results, which are
    reported as incomplete; no limit if unset."""
    answer_s: Seconds = 600.0
    """Longest time one answer may take."""
    outage_s: Seconds = 120.0
    """An endpoint that has answered no request for this long, or refuses access (status 401 to 404), or an engine that
    could not be reached, ends the evaluation; the same command resumes it. An endpoint of which no request fails has a
    tenth of a second for each token of `max_tokens`, where that is longer."""
    no_progress_s: Seconds = 900.0
    """Longest time in which no rollout ends and no token is sampled."""
    stop_s: Seconds = 10.0
    """Time a process has to end by itself before it is killed."""


class EvalConfig(Section):
    """Evaluation of any OpenAI-compatible endpoint, or of a checkpoint, on environments."""

    output_dir: str = Field(default="outputs/eval", min_length=1)
    """Folder of the results; the same command on it resumes the evaluation. If unset, a new one in outputs/eval, named
    by time and environment."""
    _chosen: bool = PrivateAttr(default=False)  # output_dir was not given, but chosen here
    _host: str | None = PrivateAttr(default=None)  # where the orchestrator listens, if other machines are to reach it
    model: str = Field(min_length=1)
    """With `base_url` the model's name there; without, a checkpoint: a model folder (such as `weights/step_100` of a
    run), or a name of the hub."""
    base_url: str | None = None
    """Endpoint to measure, as OpenAI's SDK takes it, such as `http://127.0.0.1:8000/v1`; if unset the checkpoint is
    served here."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """Environment variable that holds the endpoint's key, which is in no file and no log; no key is sent if unset."""
    env: list[MeasuredEnvironment] = Field(min_length=1)
    """Environments, at least one."""
    num_examples: Count | None = None
    """Examples of each environment, from the front of its list; all of them if unset."""
    rollouts_per_example: Count = 1
    """Rollouts of each example, the k of avg@k and pass@k."""
    max_tokens: AnswerTokens = 512
    """Longest answer of one turn, in tokens."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Sampling temperature; 0 is greedy."""
    pass_threshold: float = Field(default=1.0, allow_inf_nan=False)
    """A rollout with at least this reward has passed (pass@k)."""
    rollout_max_tokens: Count | None = None
    """Tokens sampled in a whole rollout, over all its turns; no limit if unset."""
    concurrency: BatchSize = 32
    """Rollouts at the same time."""
    chat_template_kwargs: Settings = {}
    """Variables of the chat template, such as `{ enable_thinking = false }`."""
    seq_len: Count | None = None
    """Longest prompt and answer together, in tokens, of a checkpoint; if unset, four answers and at least 2048, if the
    model can attend to so many."""
    seed: Seed = 0
    """Seed of sampling and of the order of examples."""
    clean_output_dir: bool = False
    """Delete what an earlier evaluation left in output_dir."""
    retry_errors: bool = False
    """Measure again what has failed in the evaluation in output_dir, or was not measured in time."""
    dry_run: bool = False
    """Check everything and write the resolved configs, but start nothing and delete nothing; where output_dir holds an
    evaluation, its configs stay."""
    fork_server: bool = True
    """Fork env workers and engine of this machine from servers that import their libraries once for all of them
    (Linux); without, each process imports them itself."""
    restarts: CountOrZero = 5
    """How often a process that was killed is started again within ten minutes, or an env worker that exited by itself
    once it had begun to work."""
    env_files: list[str] = []
    """Files of variables (`NAME=value` lines, .env), such as keys of judges, that env workers get in their environment:
    no other process does, and no config and no log has them."""
    served_name: Name | None = None
    """Name under which environments see a checkpoint; default: the folder's."""
    deployment: Deployment = Deployment()
    slurm: Slurm | None = None
    ray: Ray | None = None
    inference: RunInference = RunInference()
    parsers: Parsers = Parsers()
    control_tokens: ControlTokens = "keep"
    """What becomes of the model's control tokens (`<|im_end|>`) in the text of messages. `keep`: they end turns, as in
    `transformers`, and are counted. `neutralize`: they are encoded as plain text (docs/templates.md). An endpoint
    (`base_url`) renders messages itself."""
    log: RolloutLog = RolloutLog()
    timeouts: EvalTimeouts = EvalTimeouts()

    @model_validator(mode="after")
    def _has_its_nodes(self) -> Self:
        check_places(self.deployment, self.slurm, self.ray)
        return self

    @model_validator(mode="after")
    def _is_dry_or_cleans(self) -> Self:
        check_dry_run(dry_run=self.dry_run, clean_output_dir=self.clean_output_dir)
        if self.retry_errors and self.clean_output_dir:
            raise BadKeysError(
                "clean_output_dir deletes the evaluation that retry_errors continues; omit one of the two",
                "clean_output_dir",
            )
        return self

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        check_distinct(numbered("env", self.env))
        idle = next((entry for entry in self.env if entry.num_workers == 0), None)
        if idle is not None:
            raise BadKeysError(
                f"num_workers of env {idle.label!r} is 0: no worker would run its rollouts; set it to at least 1",
                "num_workers",
            )
        return self

    @model_validator(mode="after")
    def _endpoint_is_one(self) -> Self:
        if self.base_url is not None:
            # The class in the orchestrator's config reports what is wrong with the URL.
            self.client()
            for name in ("inference", "parsers", "control_tokens", "seq_len", "served_name"):
                if name in self.model_fields_set:
                    raise BadKeysError(
                        f"{name} is of a checkpoint that is served here, but base_url names an endpoint; omit one of "
                        "the two",
                        name,
                    )
        elif self.api_key_env is not None:
            raise BadKeysError(
                "api_key_env is the key of an endpoint, but there is none; give base_url, or omit it",
                "api_key_env",
            )
        elif self.inference.replicas == 0:
            raise BadKeysError(
                "inference.replicas is 0, and base_url names no endpoint; set one of them", "inference.replicas"
            )
        elif self.inference.replicas > 1 and self.inference.port:
            raise BadKeysError(
                f"inference.port ({self.inference.port}) cannot be shared by {self.inference.replicas} replicas; set "
                "it to 0",
                "inference.port",
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_rollout_times(self.timeouts.rollout_s, numbered("env", self.env))
        for entry in self.env:
            longest = entry.max_tokens or self.max_tokens
            if self.seq_len is not None and longest >= self.seq_len:
                raise BadKeysError(
                    f"max_tokens ({longest}) must be below seq_len ({self.seq_len}), which holds the prompt too; lower "
                    "one or raise the other",
                    "max_tokens",
                    "seq_len",
                )
        return self

    def client(self) -> Client | None:
        """The endpoint; None where a checkpoint is served."""
        if self.base_url is None:
            return None
        found: Client = Client(
            base_url=self.base_url,
            model=self.model,
            api_key_env=self.api_key_env,
            client_type="openai_chat_completions",
            timeout_s=self.timeouts.answer_s,
        )
        return found

    @property
    def longest_answer(self) -> int:
        return max(entry.max_tokens or self.max_tokens for entry in self.env)

    @property
    def sequence_length(self) -> int:
        """`seq_len`, or what follows from the answers' length."""
        return self.seq_len or max(LEAST_SEQ_LEN, 1 << (4 * self.longest_answer - 1).bit_length())
