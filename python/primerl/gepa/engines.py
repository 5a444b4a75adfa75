"""The engines of a search over a checkpoint: started once, they serve all of its evaluations.

Each evaluation has an orchestrator and env workers of its own, which end with it. Loading the model for each of them
would take most of a search's time: an evaluation is often of three examples. So engines stay, and join the next
orchestrator, which has them prove the weights again. An engine that dies is started again by the evaluation that it
serves, as in `primerl eval`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from primerl.config.process_files import evaluation, resolve
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import checkpoint
from primerl.launch.evaluation import Evaluation
from primerl.launch.placement.protocol import Command, Placement, Plan, Process, Role
from primerl.launch.placement.registry import chosen
from primerl.launch.report.console import Console
from primerl.launch.secrets import Variables
from primerl.launch.supervise.failures import RunFailedError
from primerl.net.requests import UnansweredError, tell

KIND = "inference"
FOLDER = "engine"
"""In the search's folder: the engines' logs, and the manifest of the weights."""
JOIN_S = 30.0


def end_tokens(model: Path) -> tuple[str, ...]:
    """Texts that end an answer of the checkpoint. Environments do not see them, and an endpoint omits them."""
    from primerl.render import Renderer

    renderer = Renderer(model)
    return tuple(renderer.decode([token]) for token in renderer.stop_token_ids)


def joined(evaluation_folder: Path) -> dict[str, str]:
    """URLs of engines, by name, as the orchestrator of that evaluation has them."""
    try:
        records = json.loads((evaluation_folder / "run" / "engines.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return {record["name"]: record["url"] for record in records}


class Engines:
    """Use as a context manager: leaving it leaves no engine behind."""

    def __init__(self, folder: Path, placement: Placement, stop_s: float) -> None:
        """`placement`: planned, but not entered. `stop_s`: time that an engine has to end by itself."""
        self.placement = placement
        self._folder = folder / FOLDER
        self._stop_s = stop_s
        self._manifest: Path | None = None
        self._urls: dict[str, str] = {}  # by name: engines that joined an earlier evaluation
        self._ended: list[Process] = []  # not yet reported by `watch`

    def __enter__(self) -> Self:
        self.placement.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.placement.stop(grace_s=self._stop_s)
        finally:
            self.placement.__exit__(kind, error, trace)

    def manifest(self, config: EvalConfig) -> Path:
        """The checkpoint's weights, which are read once for the whole search."""
        if self._manifest is None:
            trained_only = resolve.engine_backend(config).holds_trained_only
            model = evaluation.model_folder(config)
            self._manifest = checkpoint.publish(model, self._folder, trained_only=trained_only)
        return self._manifest

    def start(self, role: Role, command: Command) -> Process:
        """The engine of that name, which may run already."""
        self._ended += self.placement.watch(0.0)
        running = self.placement.by_name.get(role.name)
        if running is not None and not running.ended:
            return running
        self._urls.pop(role.name, None)
        self._ended = [process for process in self._ended if process.name != role.name]
        return self.placement.start(role, replace(command, log=self._folder / "logs" / f"{role.name}.log"))

    def watch(self) -> list[Process]:
        """Those that have ended since the last call."""
        found = [*self._ended, *self.placement.watch(0.0)]
        self._ended = []
        return found

    def join(self, orchestrator: str) -> None:
        """Those that serve already join this one. Raises RunFailedError."""
        for name, url in self._urls.items():
            try:
                status, answer = tell(orchestrator, "/engines/join", {"url": url, "name": name}, within_s=JOIN_S)
            except UnansweredError as error:
                raise RunFailedError(f"{name} at {url} could not join {orchestrator}: {error}") from None
            if status != HTTPStatus.OK:
                raise RunFailedError(f"{name} at {url} was refused by {orchestrator}: {answer}")

    def keep(self, evaluation_folder: Path, before: Mapping[str, str]) -> None:
        """After an evaluation: notes where the engines are that have joined it. One that has not, because it was still
        loading, is stopped: it knows that evaluation's orchestrator only.

        Args:
            before: Engines that joined the evaluation at an earlier start of the search, and ended with it.
        """
        running = [name for name, process in self.placement.by_name.items() if not process.ended]
        at = joined(evaluation_folder)
        if len(running) > 1:  # a single one has served
            at = {name: url for name, url in at.items() if name in self._urls or url != before.get(name)}
        self._urls = {name: at[name] for name in running if name in at}
        late = [name for name in running if name not in at]
        if late:
            self.placement.stop(grace_s=self._stop_s, names=late)


class Shared:
    """The placement of one evaluation, whose engines are those of the search."""

    def __init__(self, own: Placement, engines: Engines) -> None:
        """`own`: for all other processes."""
        self._own = own
        self._engines = engines

    @property
    def by_name(self) -> Mapping[str, Process]:
        return {**self._own.by_name, **self._engines.placement.by_name}

    @property
    def lost(self) -> str | None:
        return self._own.lost or self._engines.placement.lost

    def plan(self, roles: Sequence[Role]) -> Plan:
        """Engines are planned with the search."""
        return self._own.plan([role for role in roles if role.kind != KIND])

    def start(self, role: Role, command: Command) -> Process:
        return (self._engines if role.kind == KIND else self._own).start(role, command)

    def watch(self, timeout_s: float) -> list[Process]:
        ended = self._engines.watch()
        return [*ended, *self._own.watch(0.0 if ended else timeout_s)]

    def signal(self, name: str, number: int) -> None:
        self._of(name).signal(name, number)

    def logs(self, name: str) -> Path:
        return self._of(name).logs(name)

    def stop(self, *, grace_s: float, names: Sequence[str] = ()) -> None:
        """Engines only where they are named."""
        for placement in (self._own, self._engines.placement):
            asked = [name for name in names if self._of(name) is placement]
            if asked or (not names and placement is self._own):
                placement.stop(grace_s=grace_s, names=asked)

    def _of(self, name: str) -> Placement:
        return self._engines.placement if name in self._engines.placement.by_name else self._own

    def __enter__(self) -> Self:
        self._own.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own.__exit__(kind, error, trace)


class Measured(Evaluation):
    """An evaluation of the search; of a checkpoint, by the engines of the search."""

    def __init__(
        self, config: EvalConfig, folder: Path, console: Console, variables: Variables, engines: Engines | None
    ) -> None:
        """`engines`: None where an endpoint is measured."""
        own = chosen(config.deployment)
        super().__init__(config, folder, console, variables, own if engines is None else Shared(own, engines))
        self._engines = engines
        self.reason = "the evaluation ended early"

    def run(self) -> int:
        before = joined(self.folder)
        try:
            return super().run()
        finally:
            if self._engines is not None:
                self._engines.keep(self.folder, before)

    def _say(self, text: str) -> None:
        """The last of these says why it failed, if it has."""
        self.reason = text
        super()._say(text)

    def _publish(self) -> Path | None:
        return super()._publish() if self._engines is None else self._engines.manifest(self.config)

    def _start(self, manifest: Path | None) -> bool:
        begins = super()._start(manifest)
        if begins and self._engines is not None:
            self._engines.join(self.orchestrator.url)
        return begins
