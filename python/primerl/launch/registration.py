"""What a run tells the registry of its own start and end, and who waits for the start of a detached one.

A start that is refused, or finds nothing to do, leaves what is noted and stored of the run as it was, and its configs.

The registry is a convenience: if it cannot be written, a warning is printed and the run continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files, run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import Launched
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.launch.kept_configs import AFTER_THE_END, KeptConfigs
from primerl.launch.preflight import hub
from primerl.launch.supervise import detached
from primerl.launch.supervise.failures import BAD_INPUT, INTERRUPTED, RefusedError
from primerl.runs import served
from primerl.runs.registry import Registry, Run
from primerl.runs.state import StateError


class Session:
    """This launcher at the run; `exit_code` is noted at the end, 1 where nothing sets it."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.exit_code = 1
        self.did_nothing = False
        """The run was over: its config stays the one that it was trained with."""
        self.has_begun = False
        """The run works by the config of this start, which a later refusal (of a process that is started again) does
        not change."""

    @property
    def was_refused(self) -> bool:
        return self.exit_code == BAD_INPUT and not self.has_begun


@contextlib.contextmanager
def registered(
    config: Launched,
    folder: Path,
    say: Callable[[str], None],
    *,
    goes_on: bool,
    form: str = "full",
) -> Iterator[Session]:
    """`folder` is locked by the caller for as long as the block lasts, and written to within it alone. A start that is
    refused (exit code 2, or a ConfigError) leaves the run and its configs as they were before."""
    former = Former(folder, say) if goes_on else None
    session = Session(begin(config, folder, say, goes_on=goes_on, form=form))
    detached.has_started(folder, session.run_id)
    try:
        yield session
    except KeyboardInterrupt:
        session.exit_code = INTERRUPTED
        raise
    except (ConfigError, RefusedError):
        session.exit_code = BAD_INPUT
        raise
    finally:
        if former is not None and session.was_refused:
            is_noted = former.put_back(session.run_id)
        elif former is not None and session.did_nothing:
            is_noted = former.is_over(session.run_id, session.exit_code)
        else:
            is_noted = False
        if session.run_id is not None and not is_noted:
            end(session.run_id, session.exit_code, say)


class Former:
    """The run in a folder before a start that resumes it."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`folder`: locked."""
        self._say = say
        self._noted = _former(folder)
        self._configs = KeptConfigs(folder)

    def put_back(self, run_id: str | None) -> bool:
        """Undoes a start that was refused. Returns whether the run, by the id of that start, was noted before."""
        self._put_configs_back()
        if self._noted is None or self._noted[0].id != run_id:
            return False
        noted = self._noted
        _noting(self._say, lambda registry: registry.restore(*noted))
        return True

    def is_over(self, run_id: str | None, exit_code: int) -> bool:
        """The same of one that found nothing to do."""
        self._put_configs_back(but=AFTER_THE_END)
        if self._noted is None or self._noted[0].id != run_id:
            return False
        run, stored = self._noted
        # A launcher may have been killed at the end, before that was noted.
        over = replace(run, ended=run.ended or time.time(), exit_code=exit_code)
        _noting(self._say, lambda registry: registry.restore(over, stored))
        return True

    def _put_configs_back(self, *, but: Collection[str] = ()) -> None:
        try:
            self._configs.put_back(but=but)
        except OSError as error:  # why the start has ended is reported
            self._say(f"the configs of the run are now those of this start: {error}")


def end(run_id: str, exit_code: int, say: Callable[[str], None]) -> None:
    """Notes the end of a session that this process has begun; one that another process has begun is not changed."""
    _noting(say, lambda registry: registry.end(run_id, exit_code))


def _noting(say: Callable[[str], None], change: Callable[[Registry], None]) -> None:
    try:
        with Registry() as registry:
            change(registry)
    except StateError as error:
        say(f"the list of runs could not be updated at the end: {error}")


def _former(folder: Path) -> tuple[Run, str] | None:
    """What is noted of the run in the folder, with the stored copy of its config."""
    with contextlib.suppress(StateError, OSError), Registry() as registry:
        run = next((run for run in registry.all() if run.output_dir == folder), None)
        return None if run is None else (run, run.config.read_text(encoding="utf-8"))
    return None


def begin(
    config: Launched,
    folder: Path,
    say: Callable[[str], None],
    *,
    goes_on: bool,
    form: str = "full",
) -> str | None:
    """Notes a start by this process; returns the run's id, where the list can be written."""
    kind, environments, model = _described(config)
    try:
        with Registry() as registry:
            return registry.begin(
                folder,
                stored_copy(config),
                goes_on=goes_on,
                form=form,
                name=folder.name,
                model=model,
                environments=environments,
                kind=kind,
            )
    except (StateError, OSError) as error:
        say(f"this run is not in the list of runs (`primerl run list`): {error}")
        return None


def _described(config: Launched) -> tuple[str, list[str], str]:
    """Kind, environments, and the model: its folder, or its name at an endpoint."""
    if isinstance(config, EvalConfig):
        model = config.model if config.base_url is not None else files.absolute(config.model)
        return "eval", [entry.label for entry in config.env], model
    if isinstance(config, ServeConfig):
        is_of_hub = hub.is_hub_name(config.model.path)
        return served.KIND, [], config.model.path if is_of_hub else files.absolute(config.model.path)
    if isinstance(config, InferenceRunConfig):
        return "inference", [], files.absolute(config.model.path)
    path = "tiny" if config.model.path is None else files.absolute(config.model.path)
    if isinstance(config, RLConfig):
        return "rl", [entry.label for entry in config.orchestrator.train.env], path
    return "sft", [], path


def stored_copy(config: Launched) -> str:
    """TOML to resume with: what was given, without what was asked of this start only."""
    settings = run_file.settings(config)
    for section in (settings, settings.get("trainer", {})):
        section.get("ckpt", {}).pop("resume_step", None)
    return f"# Config of the run in {os.getcwd()}; relative paths begin there.\n{files.dump_toml(settings)}"
