"""A training script in place of the run's own trainer (`trainer.external`), as its launcher sees it by the
orchestrator's status. It may be killed, or end, and be started again: the run waits for it, for `timeouts.join_s`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from primerl.config.schema.rl import RLConfig
from primerl.launch.placement import gpus
from primerl.launch.report import status as orchestrator_status
from primerl.launch.supervise.failures import RunFailedError
from primerl.train.loop.client import FINISHED

# Heartbeats come every 2 s. Before half of the orchestrator's timeouts.trainer_s, after which it ends the run.
SILENT_S = 10.0
# The orchestrator's own limit is only for a launcher that is gone.
MARGIN_S = 60.0
NOT_COME = "has not come"


class ExternalTrainer:
    """Times are those of `time.monotonic`."""

    def __init__(self, config: RLConfig, folder: Path, devices: Sequence[str], say: Callable[[str], None]) -> None:
        """`devices`: the GPUs that no process of the run uses."""
        self._config = config
        self._folder = folder
        self._devices = devices
        self._say = say
        self._away_since: float | None = time.monotonic()
        self._why = NOT_COME
        self._process: str | None = None
        """The last one that sent heartbeats."""
        self._unheard_since: float | None = None
        """Since when an orchestrator that was started again has heard nothing of it."""

    def announcement(self) -> str:
        variable = f"{gpus.VARIABLE}={','.join(self._devices)} " if self._devices else ""
        ranks = self._config.trainer.ranks
        program = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
        return (
            f"waiting for your training script, for at most timeouts.join_s = {self._config.timeouts.join_s:g} s: "
            f"{variable}{program} SCRIPT, with primerl.connect({str(self._folder)!r})"
        )

    def waits(self, status: dict[str, Any], url: str, now: float) -> bool:
        """Whether the run waits for the script, so that nothing else is overdue.

        Raises RunFailedError once it has waited for too long.
        """
        if is_trained(status):
            return False
        process = _process(status["trainer"])
        self._process = process or self._process
        why = self._absence(status["trainer"], now)
        if why is None:
            if self._away_since is not None:
                self._away_since = None
                self._say(f"the training script trains: {process or 'it sends no heartbeats'}")
            return False
        if self._away_since is None:
            self._away_since, self._why = now, why
            limit = self._config.timeouts.join_s
            # Otherwise its silence would end the run.
            orchestrator_status.trainer_starts(url, limit + MARGIN_S, why)
            who = "the training script" if self._process is None else f"the training script ({self._process})"
            self._say(
                f"warning: {who} {why}; start it again: the run waits for it, for at most timeouts.join_s = {limit:g} s"
            )
        self._check(now - self._away_since)
        return True

    def _absence(self, trainer: dict[str, Any], now: float) -> str | None:
        """Why it is not there; None where it is, or where that is unknown: a script that speaks HTTP by itself need
        not send heartbeats."""
        if trainer.get("last_seen_s") is not None:
            self._unheard_since = None
        silent = trainer.get("silent_s")
        if silent is not None:
            limit = min(SILENT_S, self._config.orchestrator.timeouts.trainer_s / 2)
            return f"has been silent for {silent:.0f} s" if silent > limit else None
        if self._away_since is not None:
            # One without heartbeats is back when it asks for a batch.
            return None if trainer.get("waiting") else self._why
        if trainer.get("last_seen_s") is None:
            self._unheard_since = self._unheard_since or now
            away = now - self._unheard_since > SILENT_S
            return "has not come back since the orchestrator was started again" if away else None
        return (
            "has left before the run was over, or has ended with an error (see its output)"
            if trainer.get("doing") == FINISHED
            else None
        )

    def _check(self, away_s: float) -> None:
        limit = self._config.timeouts.join_s
        if away_s > limit:
            raise RunFailedError(
                f"the training script {self._why}, and the run has waited for it for timeouts.join_s = {limit:g} s; "
                "start it with the same command, and the script too (primerl.connect), or raise timeouts.join_s where "
                "that takes longer"
            )


def is_trained(status: dict[str, Any]) -> bool:
    """Whether the weights of the last step are published."""
    run = status.get("run", {})
    return int(run.get("published_version") or 0) >= int(run.get("max_steps") or 1)


def _process(trainer: dict[str, Any]) -> str | None:
    process = trainer.get("process")
    return None if process is None else f"process {process['pid']} on {process['host']}"
