"""From a run's config to that of its monitors."""

from __future__ import annotations

import math
import os
from typing import Any

from primerl.config.schema.monitors import (
    PRIME,
    WANDB,
    Distributions,
    LogExtras,
    MonitorEntry,
    Wandb,
)
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig

NOT_SHOWN = {"dry_run", "clean_output_dir", "skip_event", "monitor"}


def wandb_mode(wandb: Wandb | None) -> str:
    """`online`, `offline` or `disabled`: W&B's own variable has the last word, as in its library."""
    if wandb is None:
        return "disabled"
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "dryrun"):
        return "offline"
    return "disabled" if mode == "disabled" else ("offline" if wandb.offline else "online")


def entries(config: RLConfig | SFTConfig) -> list[MonitorEntry]:
    """The monitors that are wanted."""
    is_rl = isinstance(config, RLConfig)
    found = []
    if config.wandb is not None and wandb_mode(config.wandb) != "disabled":
        extras = _of_both(config, config.orchestrator.wandb.log_extras) if isinstance(config, RLConfig) else None
        args = config.wandb.model_dump(mode="json", exclude_none=True, exclude={"api_key", "log_extras"})
        args["offline"] = wandb_mode(config.wandb) == "offline"
        found.append(_entry(WANDB, WANDB, args, extras, _of_trainer(config)))
    if isinstance(config, RLConfig) and config.orchestrator.prime_monitor is not None:
        prime = config.orchestrator.prime_monitor
        args = prime.model_dump(mode="json", exclude_none=True, exclude={"log_extras"})
        if config.wandb is not None and config.wandb.name is not None:
            args.setdefault("run_name", config.wandb.name)
        # Tokens have histograms only, which the platform does not take.
        found.append(_entry(PRIME, PRIME, args, prime.log_extras, None))
    for custom in config.monitors:
        extras = custom.log_extras if is_rl else None
        own = extras.interval if extras is not None and extras.distributions else None
        found.append(_entry(custom.label, custom.path, custom.args, extras, own))
    return found


def trainer_interval(config: RLConfig) -> int | None:
    """How often the trainer measures distributions: at every step that one of the monitors wants; None: never."""
    every = [entry.trainer_interval for entry in entries(config) if entry.trainer_interval]
    return math.gcd(*every) if every else None


def shown(config: RLConfig | SFTConfig) -> dict[str, Any]:
    """The run's config for services that show it; keys are in none of its dumps."""
    found: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude=NOT_SHOWN)
    return found


def _of_trainer(config: RLConfig | SFTConfig) -> int | None:
    extras = _of_both(config, config.trainer.wandb.log_extras) if isinstance(config, RLConfig) else None
    return extras.interval if extras is not None and extras.distributions else None


def _of_both(config: RLConfig, own: LogExtras | Distributions | None) -> LogExtras:
    """What W&B gets of the orchestrator or of the trainer: its own keys, and those set for both."""
    shared = None if config.wandb is None else config.wandb.log_extras
    given = [extras.model_dump(exclude_unset=True) for extras in (shared, own) if extras is not None]
    found: LogExtras = LogExtras.model_validate({key: value for keys in given for key, value in keys.items()})
    return found


def _entry(
    name: str, path: str, args: dict[str, Any], extras: LogExtras | None, trainer_interval: int | None
) -> MonitorEntry:
    has_samples = extras is not None and extras.samples and extras.sample_ratio > 0
    return MonitorEntry(
        name=name,
        path=path,
        args=args,
        samples_interval=extras.interval if extras is not None and has_samples else None,
        sample_ratio=extras.sample_ratio if extras is not None and has_samples else 0.0,
        distributions_interval=extras.interval if extras is not None and extras.distributions else None,
        trainer_interval=trainer_interval,
    )
