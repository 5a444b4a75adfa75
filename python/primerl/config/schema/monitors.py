"""Monitors: services that show a run's progress. `docs/monitors.md` describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PrivateAttr, SecretStr, field_validator, model_validator

from primerl.config.schema.base import (
    BadKeysError,
    Fraction,
    LargeCount,
    Name,
    Seconds,
    SecondsOrZero,
    Section,
    Settings,
)

WANDB, PRIME = "wandb", "prime"
MONITOR_PATTERN = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z][\w-]*)$"


class Distributions(Section):
    """Which histograms are logged in addition to the metrics of each step."""

    distributions: bool = True
    """Log them."""
    interval: LargeCount = 10
    """Steps between two that are logged."""


class LogExtras(Section):
    """What is logged every few steps in addition to the metrics of each step."""

    samples: bool = True
    """Log a table of samples: prompt, completion, reward, advantage, environment."""
    distributions: bool = True
    """Log histograms of rewards, advantages, lengths, staleness."""
    interval: LargeCount = 10
    """Steps between two that are logged."""
    sample_ratio: Fraction = 0.1
    """Share of a step's samples that the table shows, of each environment at least one (none where it is 0)."""


def without_samples(given: LogExtras | None) -> LogExtras:
    """None as values that a TOML file can hold; an omitted key would get its default back."""
    return LogExtras(samples=False, distributions=False) if given is None else given


def without_distributions(given: Distributions | None) -> Distributions:
    """The same."""
    return Distributions(distributions=False) if given is None else given


class TrainerWandb(Section):
    """What W&B gets of the trainer in addition to its metrics; `wandb` sets the project and the run's name."""

    log_extras: Annotated[Distributions | None, AfterValidator(without_distributions)] = Distributions()
    """Histograms of entropy and of the log-ratio of trainer and engine, token by token; none with
    `--no-trainer.wandb.log-extras`."""


class OrchestratorWandb(Section):
    """What W&B gets of the orchestrator in addition to its metrics; `wandb` sets the project and the run's name."""

    log_extras: Annotated[LogExtras | None, AfterValidator(without_samples)] = LogExtras()
    """Samples, and histograms of what is in a batch; none with `--no-orchestrator.wandb.log-extras`."""


class Wandb(Section):
    """Weights & Biases: metrics of the trainer and the orchestrator in one run there. `--wandb` alone turns it on."""

    project: str = Field(default="primerl", min_length=1)
    """The project."""
    name: str | None = None
    """The run's name there; default: the name of output_dir."""
    entity: str | None = None
    """User or team; default: the key's own default."""
    group: str | None = None
    """Group of runs."""
    tags: list[str] = []
    """Tags of the run."""
    offline: bool = False
    """Write it to <output_dir>/wandb only, for `wandb sync` to send later; no key is needed. WANDB_MODE=offline in the
    environment does the same."""
    api_key: SecretStr | None = Field(default=None, exclude=True)
    """The key, where it is neither in WANDB_API_KEY of the environment, of env_files or of `primerl secret` (which is
    better: others see command lines) nor in the netrc file that `wandb login` writes. It is in no config file that is
    written, and in no log."""

    @field_validator("api_key", mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if given is not None and not isinstance(given, str | SecretStr):
            raise ValueError("a key is text; put it into quotes")
        return given


class RunWandb(Wandb):
    """Weights & Biases: metrics of the trainer and the orchestrator in one run there. `--wandb` alone turns it on."""

    log_extras: Annotated[LogExtras | None, AfterValidator(without_samples)] = LogExtras()
    """Samples and distributions, where `orchestrator.wandb.log_extras` and `trainer.wandb.log_extras` do not set the
    same key; none with `--no-wandb.log-extras`."""


class PrimeMonitor(Section):
    """The Prime platform. The key is PRIME_API_KEY in the environment, or that of `prime login`."""

    run_name: str | None = None
    """The run's name there; default: that of `wandb.name` or of output_dir."""
    base_url: str | None = None
    """Where its API is; default: PRIME_API_BASE in the environment, else https://api.primeintellect.ai/api/v1/rft."""
    team_id: str | None = None
    """Team the run belongs to; default: PRIME_TEAM_ID or that of `prime login`."""
    log_extras: Annotated[LogExtras | None, AfterValidator(without_samples)] = LogExtras()
    """Samples and distributions."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, given: str | None) -> str | None:
        if given is not None:
            check_url(given, "base_url")
        return given


class CustomMonitor(Section):
    """A monitor of your own: a class with the methods of `primerl.monitors.Monitor`."""

    path: str = Field(pattern=MONITOR_PATTERN)
    """`module:Class` (run from its folder, install it, or set PYTHONPATH), or the name of a package's entry point in
    `primerl.monitors`."""
    name: Name | None = None
    """Name in the log; default: the class's."""
    args: Settings = {}
    """Its keyword arguments, which are written to configs/monitor.toml: keys belong into the environment."""
    log_extras: Annotated[LogExtras | None, AfterValidator(without_samples)] = LogExtras()
    """Samples and distributions."""

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]


class MonitorSettings(Section):
    """The process that sends to the monitors."""

    finish_s: SecondsOrZero = 30.0
    """Seconds it has to send what is left when the run has ended. What is not sent by then is not lost: `primerl
    monitor @ <output_dir>/configs/monitor.toml` sends it."""


class Monitored(Section):
    """Keys of a run that is reported to monitors."""

    wandb: Wandb | None = None
    monitors: list[CustomMonitor] = []
    """Monitors of your own."""
    monitor: MonitorSettings = MonitorSettings()
    _chosen: bool = PrivateAttr(default=False)  # output_dir was not given, but chosen here

    @classmethod
    def listed_last(cls) -> frozenset[str]:
        return frozenset(Monitored.model_fields)

    @model_validator(mode="after")
    def _monitors_have_names_of_their_own(self) -> Self:
        names = [WANDB, PRIME, *(monitor.label for monitor in self.monitors)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadKeysError(
                f"monitors: two are called {twice!r} (wandb and prime are taken); give one another `name`", "monitors"
            )
        return self


class MonitorEntry(Section):
    """One monitor, in the config of the process that runs it."""

    name: Name
    """Name in the log, and of its cursor."""
    path: str = Field(pattern=MONITOR_PATTERN)
    """`module:Class`, or a name."""
    args: Settings = {}
    """Its keyword arguments."""
    samples_interval: LargeCount | None = None
    """Steps between tables of samples; none if unset."""
    sample_ratio: Fraction = 0.0
    """Share of samples in a table."""
    distributions_interval: LargeCount | None = None
    """Steps between distributions of what is in a batch; none if unset."""
    trainer_interval: LargeCount | None = None
    """Steps between distributions that the trainer measures; none if unset."""


class MonitorConfig(Section):
    """The process that sends what a run has written to its monitors (`primerl monitor @ file`)."""

    output_dir: str
    """Folder of the run."""
    kind: Literal["rl", "sft"]
    """What the run trains by."""
    model: str
    """Name of the model."""
    model_path: str | None = None
    """Folder with the tokenizer by which samples become text."""
    max_steps: LargeCount | None = None
    """Steps to train."""
    finish_s: SecondsOrZero = 30.0
    """Seconds in which what is left is sent when the run has ended."""
    retry_s: Seconds = 60.0
    """Longest time between two attempts to reach a service."""
    monitors: list[MonitorEntry]
    """The monitors it is sent to."""
    run: dict[str, Any] = {}
    """The run's config, for services that show it."""


def check_url(url: str, name: str, like: str = "https://host/path") -> None:
    """Raises ValueError."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise BadKeysError(f"{name} ({url}) is no URL like {like}; give one", name)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise BadKeysError(f"{name} has a user, a query or a fragment; remove them (keys are sent as headers)", name)
