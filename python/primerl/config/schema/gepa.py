"""`primerl gepa`: a system prompt is optimised, and nothing is trained."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from primerl.config.schema.base import AnswerTokens, BadKeysError, BatchSize, Count, Name, Section, Seed, Settings
from primerl.config.schema.evaluation import EvalConfig, EvalTimeouts, MeasuredEnvironment
from primerl.config.schema.rl import RunInference
from primerl.config.schema.services import Client

KEY_PATTERN = r"^[A-Z_][A-Z0-9_]*$"


class Optimiser(Section):
    """The search."""

    max_calls: Count = 500
    """Budget, in evaluated examples; it is looked at between rounds, so the last round may exceed it."""
    minibatch_size: Count = 3
    """Training examples that the reflection model is shown in a round."""
    perfect_score: float | None = Field(default=None, allow_inf_nan=False)
    """A minibatch of which every example has at least this reward needs no better
    prompt; if unset, all are reflected on."""
    state_columns: list[str] = []
    """What else the reflection model gets of each rollout: metrics, fields of the example, or columns of a line of
    an evaluation's results.jsonl."""
    num_train: Count = 100
    """Examples, from the front of the list, that minibatches are drawn from."""
    num_val: Count = 50
    """Examples after those, by which prompts are compared."""
    max_concurrent: BatchSize = 32
    """Rollouts at the same time."""
    seed: Seed = 0
    """Seed of the examples' order, of the search and of sampling."""


class GepaConfig(Section):
    """Optimisation of an environment's system prompt by reflection (GEPA)."""

    output_dir: str = Field(default="outputs/gepa", min_length=1)
    """Folder of the results; the same command on it resumes the search."""
    model: str = Field(min_length=1)
    """With `base_url` the model's name there; without, a checkpoint, which is served here."""
    base_url: str | None = None
    """Endpoint that the prompt is for."""
    api_key_env: str | None = Field(default=None, pattern=KEY_PATTERN)
    """Environment variable that holds its key."""
    reflection_model: str | None = Field(default=None, min_length=1)
    """Model that writes new prompts; default: `model`."""
    reflection_base_url: str | None = None
    """Its endpoint; default: `base_url`."""
    reflection_api_key_env: str | None = Field(default=None, pattern=KEY_PATTERN)
    """Environment variable that holds the key of `reflection_base_url`; default where that is unset: `api_key_env`."""
    initial_prompt: str | None = None
    """Where the search starts; default: the environment's `system_prompt`, else that of its first example."""
    env: list[MeasuredEnvironment] = Field(min_length=1, max_length=1)
    """The environment, with the keys of one of `primerl eval`."""
    gepa: Optimiser = Optimiser()
    max_tokens: AnswerTokens = 512
    """Longest answer of one turn, in tokens."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Sampling temperature of rollouts; 0 is greedy."""
    chat_template_kwargs: Settings = {}
    """Variables of the chat template."""
    seq_len: Count | None = None
    """Longest prompt and answer together, of a checkpoint; as in `primerl eval`."""
    served_name: Name | None = None
    """Name under which environments see a checkpoint; default: the folder's."""
    env_files: list[str] = []
    """Files of variables for env workers."""
    clean_output_dir: bool = False
    """Delete what an earlier search left in output_dir."""
    dry_run: bool = False
    """Check everything, but start and write nothing."""
    fork_server: bool = True
    """Fork processes from servers that import their libraries once (Linux)."""
    inference: RunInference = RunInference()
    timeouts: EvalTimeouts = EvalTimeouts()

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if self.base_url is None and self.reflection_base_url is None:
            raise BadKeysError(
                "reflection_base_url is unset, and a checkpoint that is served here writes no prompts; give the "
                "endpoint of the reflection_model",
                "reflection_base_url",
            )
        if self.reflection_base_url is not None and self.reflection_model is None:
            raise BadKeysError(
                "reflection_base_url needs a reflection_model, the model's name there; give it", "reflection_model"
            )
        self.teacher()
        return self

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        if self.env[0].example_places is not None or self.env[0].num_examples is not None:
            raise BadKeysError(
                "example_places and num_examples of an env are chosen by gepa.num_train and gepa.num_val; omit them",
                "env",
            )
        self.evaluation(self.output_dir)
        return self

    def teacher(self) -> Client:
        """The endpoint of the reflection model."""
        found: Client = Client(
            **{name: getattr(self, key) for name, key in self.teachers_keys().items()},
            client_type="openai_chat_completions",
            timeout_s=self.timeouts.answer_s,
        )
        return found

    def teachers_keys(self) -> dict[str, str]:
        """What keys of its endpoint are called here."""
        own = self.reflection_base_url is not None
        key = "reflection_api_key_env" if own or self.reflection_api_key_env is not None else "api_key_env"
        return {
            "base_url": "reflection_base_url" if own else "base_url",
            "model": "model" if self.reflection_model is None else "reflection_model",
            "api_key_env": key,
        }

    def evaluation(
        self, output_dir: str, system_prompt: str | None = None, examples: list[int] | None = None
    ) -> EvalConfig:
        """The evaluation of one prompt on some examples."""
        same = ("model", "base_url", "api_key_env", "max_tokens", "temperature", "chat_template_kwargs", "env_files")
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        if self.base_url is None:
            given |= {name: getattr(self, name) for name in ("seq_len", "served_name", "inference")}
        chosen = {} if system_prompt is None else {"system_prompt": system_prompt}
        chosen |= {} if examples is None else {"example_places": examples}  # type: ignore[dict-item]
        found: EvalConfig = EvalConfig.model_validate(
            {
                **given,
                "output_dir": output_dir,
                "env": [{**self.env[0].model_dump(exclude_unset=True), **chosen}],
                "concurrency": self.gepa.max_concurrent,
                "seed": self.gepa.seed,
                "fork_server": self.fork_server,
                "timeouts": self.timeouts,
            }
        )
        return found
