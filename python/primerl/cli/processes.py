"""The processes of a run, one subcommand each. The launcher starts them with a resolved file and nothing else.

Such a file was checked and filled when it was written, and is read without the config library, which would cost each
process half a second of start-up, and which a machine that only trains, or an environment's own interpreter, need not
have. What anyone else gives is read by the config's class, which names file, line and the nearest key, and fills in
defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
import threading
import tomllib
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from primerl.cli.arguments import keep_state
from primerl.config.command_line.arguments import asks_for_help, with_long_names
from primerl.launch.supervise.trees import MARK
from primerl.process import signals
from primerl.process.imports import importing
from primerl.process.rank_variables import is_rank
from primerl.process.setting_checks import from_mapping

if TYPE_CHECKING:
    from pydantic import BaseModel

    from primerl.inference.settings import InferenceConfig as EngineSettings

BAD_INPUT = 2
PUBLISHED_INFERENCE = {"--server.port": "--port", "--server.host": "--host"}
"""Flags of prime-rl's `inference` that are spelt otherwise here."""
Settings = TypeVar("Settings")


SERVING = "primerl.config.schema.inference_run:InferenceRunConfig"


class BadInputError(Exception):
    """The message names what is wrong with the file or the command line."""


def trainer(arguments: list[str]) -> int:
    from primerl.train.settings import TrainerConfig

    try:
        config = settings_of(TrainerConfig, arguments, "primerl.config.schema.trainer:TrainerConfig", "trainer")
    except BadInputError as error:
        return refuse(error)
    from primerl.train.distributed import torchrun

    if torchrun.are_wanted(config.ranks):
        return torchrun.run(config.ranks, ["trainer", *arguments])
    torchrun.die_with_parent()
    with importing():
        from primerl.train.loop.rl import main

    return int(main(config))


def inference(arguments: list[str]) -> int:
    from primerl.inference.settings import InferenceConfig

    arguments = with_long_names(arguments, PUBLISHED_INFERENCE)
    if not any(argument.startswith(("@", "--model.path")) for argument in arguments):
        arguments = with_long_names(arguments, {"--model.name": "--model.path"})  # prime-rl's name is a path
    try:
        if is_resolved_file(arguments) and is_checked():
            config = settings_of(InferenceConfig, arguments, SERVING, "inference")
        else:
            given = served(arguments)
            if isinstance(given, int):
                return given
            config = given
    except BadInputError as error:
        return refuse(error)
    with importing():
        from primerl.inference.server import serve

    return int(serve(config))


def served(arguments: list[str]) -> EngineSettings | int:
    """Settings of an engine that is this process, or the exit code of engines that this process has started."""
    from primerl.config.command_line.load import load
    from primerl.config.errors.error_locations import placed
    from primerl.config.errors.fail import ConfigError
    from primerl.config.process_files import run_file
    from primerl.config.process_files.files import keys_of
    from primerl.config.schema.inference_run import InferenceRunConfig
    from primerl.inference.settings import InferenceConfig

    try:
        config = load(InferenceRunConfig, arguments, program="primerl inference")
        if config.is_this_process:
            return from_mapping(InferenceConfig, own_keys(InferenceConfig, keys_of(config)))
        with placed(config, arguments):
            config = run_file.located(config)
        keep_state(config.output_dir)
        from primerl.launch import inference_run

        with placed(config, arguments):
            return inference_run.run(config, partial(print, flush=True))
    except ConfigError as error:
        raise BadInputError(str(error)) from None


def env_worker(arguments: list[str]) -> int:
    if any(argument == "--join" or argument.startswith("--join=") for argument in arguments):
        return join_as_env_worker(arguments)
    from primerl.envs.settings import WorkerConfig

    try:
        config = settings_of(WorkerConfig, arguments, "primerl.config.schema.env_worker:EnvWorkerConfig", "env-worker")
    except BadInputError as error:
        return refuse(error)
    from primerl.envs.worker import run_worker

    return int(run_worker(config))


def join_as_env_worker(arguments: list[str]) -> int:
    """`--join URL --env NAME`: workers for a run on another machine."""
    from primerl.config.command_line.load import load
    from primerl.config.errors.fail import ConfigError
    from primerl.config.schema.env_worker import JoinConfig
    from primerl.forking import servers
    from primerl.launch import remote_workers
    from primerl.launch.preflight import checker

    try:
        with checker.environments_ahead(arguments, checks=False):
            config = load(JoinConfig, arguments, program="primerl env-worker")
            keep_state(config.log_dir)
            # An interpreter of its own has libraries of its own.
            servers.begin(config.fork_server and config.python is None)
            return remote_workers.run(config)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:  # or SIGTERM, SIGHUP: as later, when it waits for the run or works
        signals.has_been_heard()
        print("stopped", file=sys.stderr)
        return 0


def monitor(arguments: list[str]) -> int:
    try:
        settings = settings_from(arguments, "primerl.config.schema.monitors:MonitorConfig", "monitor")
    except BadInputError as error:
        return refuse(error)
    from primerl.monitors.process import main

    return int(main(settings))


def store_worker(arguments: list[str]) -> int:
    try:
        settings = settings_from(arguments, "primerl.config.schema.services:StoreWorkerConfig", "store-worker")
    except BadInputError as error:
        return refuse(error)
    from primerl.stores.worker import main

    return main(settings)


def orchestrator(arguments: list[str]) -> int:
    """`@ file` and overrides, or the native binary's own flags."""
    # Flags of the binary, not of the config: they hold for one start of a run.
    once = arguments[2:] if arguments[2:3] in (["--resume-step"], ["--measure-again"], ["--skip-event"]) else []
    checked = arguments[: len(arguments) - len(once)]
    is_file = is_resolved_file(checked)
    if is_file and is_checked():
        return leave(native_orchestrator(["--config", arguments[1], *once]))
    if not any(word.startswith("@") for word in arguments) and not asks_for_help(arguments):
        return leave(native_orchestrator(arguments))
    try:
        settings = settings_from(checked, "primerl.config.schema.orchestrator:OrchestratorConfig", "orchestrator")
    except BadInputError as error:
        return refuse(error)
    if is_file:  # which messages name
        return leave(native_orchestrator(["--config", arguments[1], *once]))
    from primerl.config.process_files.files import dump_toml

    with tempfile.TemporaryDirectory(prefix="primerl-") as folder:
        file = Path(folder) / "orchestrator.toml"
        file.write_text(dump_toml(settings), encoding="utf-8")
        code = native_orchestrator(["--config", os.fspath(file)])
    return leave(code)


def native_orchestrator(arguments: list[str]) -> int:
    from primerl import _core

    return int(_core.orchestrate(arguments))


def leave(code: int) -> int:
    """Returns the exit code, unless a custom advantages function that is no longer waited for still runs.

    Its thread was not made by Python, which would abort (SIGABRT) when it finds it while it finalizes, and the run's
    own exit code would be lost.
    """
    if sys._current_frames().keys() - {threading.get_ident()}:
        logging.shutdown()
        with contextlib.suppress(OSError, ValueError):  # a closed pipe: no one reads it
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def is_resolved_file(arguments: list[str]) -> bool:
    """`@ file`, and no overrides."""
    return len(arguments) == 2 and arguments[0] == "@"


def is_checked() -> bool:
    """Whether who started this process has checked its file: the launcher, or the first of several ranks. Else, whether
    there is nothing to check it by."""
    return MARK in os.environ or is_rank(os.environ) or not has_config_library()


def has_config_library() -> bool:
    return importlib.util.find_spec("pydantic_config") is not None


def settings_from(arguments: list[str], schema: str, command: str) -> dict[str, Any]:
    """The keys of a resolved file, or of files and overrides checked by the config library."""
    if is_resolved_file(arguments) and is_checked():
        return read_toml(Path(arguments[1]))
    return checked(arguments, schema, command)


def settings_of(cls: type[Settings], arguments: list[str], schema: str, command: str) -> Settings:
    """The settings of a process, from the same. Raises BadInputError."""
    if is_resolved_file(arguments) and is_checked():
        try:
            return from_mapping(cls, read_toml(Path(arguments[1])))
        except ValueError as error:
            if not has_config_library():
                raise BadInputError(
                    f"{arguments[1]}: {error}; give a file with every key, as `primerl rl --dry-run` and `primerl sft "
                    "--dry-run` write it, or install primerl's config library, which fills in defaults"
                ) from None
        # Written by hand, for ranks that `torchrun` started, say.
    return from_mapping(cls, own_keys(cls, checked(arguments, schema, command)))


def own_keys(cls: type[Settings], values: dict[str, Any]) -> dict[str, Any]:
    """Those that a process has a part in."""
    own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if name in own}


def checked(arguments: list[str], schema: str, command: str) -> dict[str, Any]:
    """Every key, by the config library."""
    from importlib import import_module

    from primerl.config.command_line.load import load
    from primerl.config.errors.fail import ConfigError
    from primerl.config.process_files.files import keys_of

    module, name = schema.split(":")
    cls: type[BaseModel] = getattr(import_module(module), name)
    try:
        config = load(cls, arguments, program=f"primerl {command}")
    except ConfigError as error:
        raise BadInputError(str(error)) from None
    return keys_of(config)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise BadInputError(f"there is no file {path}; give the path of a TOML file after `@`") from None
    except RecursionError:
        raise BadInputError(f"{path} cannot be read: a value is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read: {error}") from None


def refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return BAD_INPUT
