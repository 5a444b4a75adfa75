"""`primerl inference` of several engines, or on the nodes of a cluster: starts them, and says where they answer.

Exit codes: 0 never (they serve until they are stopped), 1 an engine failed, 2 bad input (nothing started), 130 stopped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files import files
from primerl.config.process_files.files import ProcessConfig, absolute, process, shared
from primerl.config.schema.inference import EngineModel, InferenceConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.inference import announcement, backends
from primerl.inference.backend import UnservableError
from primerl.launch import placing, reaching
from primerl.launch.placement import commands
from primerl.launch.placement.protocol import Placement, Process
from primerl.launch.preflight import kinds, model_folder
from primerl.launch.preflight.output_folder import check_output_dir, claimed
from primerl.launch.registration import registered
from primerl.launch.role_watch import RoleWatch
from primerl.launch.slurm import submission, within
from primerl.process import extras

KIND = "inference"
ADDRESSES = "engines.json"
"""In the output folder: `[{"name": .., "url": .., "model": ..}, ..]` of the engines that serve."""
STOP_S = 10.0
WITHOUT_HOST = re.compile(r"^http://(0\.0\.0\.0|\[::\]):")


def run(config: InferenceRunConfig, say: Callable[[str], None]) -> int:
    """Serves until it is stopped. Raises ConfigError before anything starts."""
    begun = placing.begun(config, say, saves=False)
    config, placement = begun.config, begun.placement
    check_output_dir(config.output_dir, clean=config.clean_output_dir, goes_on=kinds.holds(KIND), kind=KIND)
    described = engines(config)
    plan = commands.plan(placement, described)
    check(config)
    if config.dry_run and config.join is not None:
        say(reaching.check(config.join, config.host, config.port))
    if begun.submits:
        return submission.submit(config, say, command="inference", goes_on=lambda _: True)
    with claimed(config.output_dir, clean=config.clean_output_dir, kind=KIND) as folder:
        have_served = (folder / "logs").is_dir()
        if config.dry_run:
            say(f"where the engines would run:\n{plan.table()}")
            if have_served:
                say(f"everything checked; configs of the engines before, in {folder / 'configs'}, are left as they are")
                return 0
            _write_configs(described)
            say(f"everything checked; configs are in {folder / 'configs'}")
            return 0
        with registered(config, folder, say, goes_on=have_served) as session:
            _write_configs(described)
            also = None if begun.limit is None else begun.limit.check
            watch = EngineWatch(placement, folder, say, restarts=config.restarts, also=also)
            (folder / ADDRESSES).unlink(missing_ok=True)
            try:
                wanted = [(commands.role_of(one), commands.command_of(one)) for one in described]
                session.exit_code = watch.run(wanted, grace_s=STOP_S)
            finally:
                (folder / ADDRESSES).unlink(missing_ok=True)
    return within.ended(config, session.exit_code, begun.limit, say)


def _write_configs(described: list[ProcessConfig]) -> None:
    for one in described:
        files.write(one)


def engines(config: InferenceRunConfig) -> list[ProcessConfig]:
    """A process for each. Raises ConfigError for a backend that there is not."""
    folder = Path(absolute(config.model.path))
    try:
        backend = backends.chosen(config.backend, config.python, folder)
    except (ValueError, UnservableError) as error:
        raise ConfigError.like(error) from None
    found = []
    for index in range(config.replicas):
        name = "inference" if config.replicas == 1 else f"inference_{index}"
        resolved = InferenceConfig.model_validate(
            {
                **shared(config, InferenceConfig),
                "backend": backend,
                "model": EngineModel(path=os.fspath(folder), name=config.model.name),
                "seed": config.seed + (0 if backends.named(backend).seeds_each_request else index),
                "join_as": _joins_as(config, index),
            }
        )
        found.append(process(config, "inference", name, resolved, threads=config.threads))
    return found


def _joins_as(config: InferenceRunConfig, index: int) -> str | None:
    return config.join_as if config.join_as is None or config.replicas == 1 else f"{config.join_as}_{index}"


def check(config: InferenceRunConfig) -> None:
    """Raises ConfigError with every problem, one a line."""
    folder = Path(absolute(config.model.path))
    problems = Problems()
    with problems.noted():
        model_folder.check_model(folder)
    if not problems.found:
        backend = backends.named(backends.chosen(config.backend, config.python, folder))
        with problems.noted():
            extras.require("`primerl inference`", *backend.modules)
            try:
                backend.check_model(folder, config.python)
                backend.check_dtype(folder, config.dtype or backend.default_dtype(config.python), config.python)
            except UnservableError as error:
                raise ConfigError.like(error) from None
    problems.check()


class EngineWatch(RoleWatch):
    """Says where each engine answers, as soon as it does, and keeps the list of those that do."""

    def __init__(
        self,
        placement: Placement,
        folder: Path,
        say: Callable[[str], None],
        *,
        restarts: int,
        also: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(placement, folder, say, restarts=restarts, also=also)
        self._starting: dict[str, Process] = {}
        """Engines that do not serve yet."""
        self._serving: dict[str, dict[str, str]] = {}

    def started(self, process: Process) -> None:
        if self._serving.pop(process.name, None) is not None:
            self._write()
        self._starting[process.name] = process

    def look(self) -> None:
        for name, starting in list(self._starting.items()):
            found = _served(starting)
            if found is not None:
                del self._starting[name]
                model, url = found
                self._serving[name] = {"name": name, "model": model, "url": url}
                self._write()
                self.say(f"{name} serves {model} at {url}")
                if not self._starting:
                    self.say(f"all engines serve; {self.folder / ADDRESSES} lists them")

    def _write(self) -> None:
        files.write_text(self.folder / ADDRESSES, json.dumps(list(self._serving.values()), indent=2) + "\n")


def _served(process: Process) -> tuple[str, str] | None:
    """Name of the model and URL, once the engine has printed them."""
    try:
        with process.log.open("rb") as log:
            log.seek(process.log_from)
            found = announcement.found(log.read())
    except OSError:
        return None
    if found is None:
        return None
    model, url = found
    node = process.node
    if node is not None:
        url = WITHOUT_HOST.sub(f"http://{f'[{node}]' if ':' in node else node}:", url)
    return model, url
