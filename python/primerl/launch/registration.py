"""What a run tells the registry of its own start and end, and who waits for the start of a detached one.

The registry is a convenience: if it cannot be written, a warning is printed and the run continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from primerl.config.process_files import files, run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.launched import Launched
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.launch.preflight import hub
from primerl.launch.supervise import detached
from primerl.launch.supervise.failures import BAD_INPUT, INTERRUPTED
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


@contextlib.contextmanager
def registered(
    config: Launched,
    folder: Path,
    say: Callable[[str], None],
    *,
    goes_on: bool,
    form: str = "full",
) -> Iterator[Session]:
    """`folder` is locked by the caller for as long as the block lasts. A start that is refused (exit code 2) leaves the
    run as it was noted before."""
    former = _former(folder) if goes_on else None
    session = Session(begin(config, folder, say, goes_on=goes_on, form=form))
    detached.has_started(folder, session.run_id)
    try:
        yield session
    except KeyboardInterrupt:
        session.exit_code = INTERRUPTED
        raise
    finally:
        if session.run_id is not None:
            is_former = former is not None and former[0].id == session.run_id
            if former is not None and is_former and session.exit_code == BAD_INPUT:
                _noting(say, lambda registry: registry.restore(*former))
            elif former is not None and is_former and session.did_nothing:
                run, stored = former
                # A launcher may have been killed at the end, before that was noted.
                over = replace(run, ended=run.ended or time.time(), exit_code=session.exit_code)
                _noting(say, lambda registry: registry.restore(over, stored))
            else:
                end(session.run_id, session.exit_code, say)


def end(run_id: str, exit_code: int, say: Callable[[str], None]) -> None:
    """Notes the end of a session that this process has begun; one that another process has begun is not changed."""
    _noting(say, lambda registry: registry.end(run_id, exit_code))


def _noting(say: Callable[[str], None], change: Callable[[Registry], None]) -> None:
    try:
        with Registry() as registry:
            change(registry)
    except StateError as error:
        say(f"the list of runs does not know of this end: {error}")


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
