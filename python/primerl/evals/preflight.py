"""Everything that can be known to be wrong with an evaluation before a process is started or a file is written."""

from __future__ import annotations

import functools
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from primerl._core import PrimerlError, inspect_run
from primerl.config.errors import orchestrator_refusal
from primerl.config.errors.fail import ConfigError, Problems, renamed
from primerl.config.process_files import evaluation, files, resolve, run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.evals import endpoint, greedy, results
from primerl.inference.backend import UnservableError
from primerl.launch import configs, secrets
from primerl.launch.interpreters import lookup
from primerl.launch.placement import commands
from primerl.launch.placement.protocol import Placement
from primerl.launch.preflight import environments as environments
from primerl.launch.preflight import hub, model_folder, output_folder, policy, thinking, training
from primerl.models.tiny import write_text_model
from primerl.process import extras
from primerl.process.redaction import note

# Keys that may differ in a later start of the same command: they change nothing that is measured.
MAY_CHANGE = (
    *("dry_run", "clean_output_dir", "retry_errors", "output_dir", "restarts", "timeouts", "log", "env_files"),
    *("api_key_env", "concurrency", "deployment", "slurm", "ray"),
    *("inference.host", "inference.port", "inference.replicas", "inference.threads", "inference.log"),
    *("inference.device", "inference.python", "inference.max_num_seqs", "inference.kv_cache_tokens"),
    *("env.num_workers", "env.max_concurrent", "env.memory_mb", "env.cpus", "env.rollout_s"),
    "env.metrics_port",
)
OF_RUNS = {"model.path": "model"}
"""A key of a run's config, which engines and checks of a model know, by its name in an evaluation's."""


def with_model(config: EvalConfig) -> EvalConfig:
    """With the folder in place of a hub's name, and a sequence length that the model can attend to.

    What can be judged without the model's weights is, before they are downloaded. Raises
    [`ConfigError`][primerl.config.errors.fail.ConfigError] with every problem, one a line.
    """
    if config.base_url is not None:
        return config
    problems = Problems()
    fitted = config
    with problems.noted():
        fitted = _fitted(config, weights=False)
    if not problems.found and not hub.is_hub_name(config.model):
        return fitted
    if not problems.found:
        with problems.noted():
            _check_model(fitted)
    with problems.noted():
        _check_free(config)
    with problems.noted():
        secrets.variables_of(config.env, config.env_files)
    with problems.noted():
        environments.check_installed(config.env)
    problems.check()
    return _fitted(config, weights=True)


@renamed(OF_RUNS)
def _fitted(config: EvalConfig, *, weights: bool) -> EvalConfig:
    changes: dict[str, Any] = {}
    is_small = False
    if hub.is_hub_name(config.model):
        changes["model"] = str(hub.folder_of(config.model, weights=weights))
        changes["served_name"] = config.served_name or config.model.rsplit("/", 1)[-1]
        is_small = not weights
    folder = Path(files.absolute(changes.get("model", config.model)))
    _check_folder(folder, weights=not is_small)
    limit = model_folder.longest_sequence(folder)
    if limit is not None and config.seq_len is None and config.sequence_length > limit > config.longest_answer:
        changes["seq_len"] = limit
    found: EvalConfig = config.model_copy(update=changes)
    return found


def check(config: EvalConfig, say: Callable[[str], None], placement: Placement) -> secrets.Variables:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] with what is wrong. `say` gets warnings,
    which are no reason to stop. Returns what env workers are to get in their environment."""
    folder = Path(files.absolute(config.output_dir))
    key = os.environ.get(config.api_key_env or "")
    if key:
        note([key])  # environments may have quoted it, and all is written again
    problems = Problems()
    goes_on, odd = False, None
    variables: secrets.Variables = {}
    with problems.noted():
        goes_on = _check_output_dir(config)
    with problems.noted():
        variables = secrets.variables_of(config.env, config.env_files)
    if not problems.found and goes_on and is_over(folder) and not measures_again(config, folder):
        return variables
    client = config.client()
    with problems.noted():
        odd = endpoint.check(client) if client is not None else None
    with problems.noted():
        if client is None:
            _check_model(config)
    with problems.noted():
        where = configs.NOWHERE
        engines, workers = evaluation.inference(config, where), evaluation.env_workers(config, where)
        commands.plan(placement, [evaluation.orchestrator(config), *engines, *workers])
    with problems.noted():
        environments.check_installed(config.env)
    problems.check()
    repeated = greedy.repeated(
        (
            entry.label,
            entry.rollouts_per_example or config.rollouts_per_example,
            config.temperature if entry.temperature is None else entry.temperature,
        )
        for entry in config.env
    )
    if repeated is not None:
        say(repeated)
    if client is None:
        policy.say_drawback(config, say)
    if odd is not None:
        say(f"warning: {odd}")
    lookup.provided(config.env, config.timeouts.install_s, say)
    rollouts = [entry.rollouts_per_example or config.rollouts_per_example for entry in config.env]
    wanted = [
        environments.one(entry, "eval", many, variables) for entry, many in zip(config.env, rollouts, strict=True)
    ]
    words = functools.partial(orchestrator_refusal.in_words_of, config)
    with _checkable(config) as checked:
        # What an evaluation continues with was compared above.
        problems.found += training.check_beside(checked, wanted, config.timeouts.check_s, say, begins=True, words=words)
    problems.check()
    return variables


def is_over(folder: Path) -> bool:
    """Whether the evaluation has finished."""
    try:
        return inspect_run(folder)["finished"] is not None
    except PrimerlError:
        return False


def measures_again(config: EvalConfig, folder: Path) -> bool:
    """Whether failed rollouts are measured again: if that is asked for, or nothing else was measured."""
    if config.clean_output_dir or not output_folder.holds_run(folder):
        return False
    found = results.counts(folder)
    if not is_over(folder) or not found:
        return config.retry_errors
    lost = sum(count.failed + count.unmeasured for count in found)
    return lost > 0 and (config.retry_errors or not any(count.measured for count in found))


def same_evaluation(config: EvalConfig) -> None:
    """Raises ConfigError where the folder holds an evaluation of something else; the message names the field."""
    file = run_file.path(config)
    try:
        before = EvalConfig.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError.at(
            "output_dir", f"{file.parents[1]} holds a run, and no evaluation; choose another --output-dir"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError.at("output_dir", f"{file} cannot be read: {error}; choose another --output-dir") from None
    was, now = _values(before), _values(config)
    for name in [*was, *(name for name in now if name not in was)]:
        if was.get(name) != now.get(name):
            raise ConfigError(
                f"{name} is {_shown(now.get(name))}, but the evaluation in {file.parents[1]} was begun with "
                f"{_shown(was.get(name))}; set it to that to continue, choose another --output-dir, or measure again "
                "with --clean-output-dir",
                name,
            )


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)


def _values(config: EvalConfig) -> dict[str, Any]:
    """By dotted name: what must stay as it is. Paths are those that processes in other folders understand."""
    content = config.model_dump(mode="json")
    if config.base_url is None:
        content["model"] = files.absolute(config.model)
    found: dict[str, Any] = {}

    def walk(value: Any, name: str, plain: str) -> None:
        if plain in MAY_CHANGE:
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else key, f"{plain}.{key}" if plain else key)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, inner in enumerate(value):
                walk(inner, f"{name}[{index}]", plain)
        else:
            found[name] = value

    walk(content, "", "")
    return found


def _check_free(config: EvalConfig) -> None:
    clean = config.clean_output_dir
    output_folder.check_output_dir(config.output_dir, clean=clean, goes_on=output_folder.holds_run, kind="eval")


def _check_output_dir(config: EvalConfig) -> bool:
    """Whether an evaluation of the same is there, to be continued."""
    _check_free(config)
    folder = Path(files.absolute(config.output_dir))
    goes_on = not config.clean_output_dir and output_folder.holds_run(folder)
    if goes_on:
        same_evaluation(config)
    return goes_on


def _check_folder(folder: Path, *, weights: bool) -> None:
    try:
        model_folder.check_model(folder, weights=weights)
    except ConfigError as error:
        (problem,) = error.problems
        raise ConfigError(problem.worded(f"{problem} (or base_url, for an endpoint)")) from None


@renamed(OF_RUNS)
def _check_model(config: EvalConfig) -> None:
    folder = evaluation.model_folder(config)
    backend = resolve.engine_backend(config)
    extras.require("`primerl eval` of a checkpoint", *backend.modules)
    try:
        backend.check_model(folder, config.inference.python)
        dtype = config.inference.dtype or backend.default_dtype(config.inference.python)
        backend.check_dtype(folder, dtype, config.inference.python)
    except UnservableError as error:
        raise ConfigError.like(error) from None
    if config.clean_output_dir or not output_folder.holds_run(Path(files.absolute(config.output_dir))):
        thinking.check(folder, config.chat_template_kwargs, "chat_template_kwargs")
    limit = model_folder.longest_sequence(folder)
    context = config.inference.max_model_len or config.sequence_length
    if limit is None or context <= limit:
        return
    if config.inference.max_model_len is None and config.seq_len is None:
        raise ConfigError(
            f"max_tokens ({config.longest_answer}) asks for {context} tokens with its prompt, and the model in "
            f"{folder} can attend to {limit}; lower it, or set seq_len to at most {limit}",
            "max_tokens",
        )
    name = "inference.max_model_len" if config.inference.max_model_len else "seq_len"
    raise ConfigError(f"{name} ({context}) is above what the model in {folder} can attend to ({limit}); lower it", name)


@contextmanager
def _checkable(config: EvalConfig) -> Iterator[files.ProcessConfig]:
    """The orchestrator's config, with a tokenizer that is there."""
    if config.base_url is None:
        yield evaluation.orchestrator(config)
        return
    with tempfile.TemporaryDirectory(prefix="primerl-check-") as temporary:
        elsewhere = config.model_copy(update={"output_dir": temporary})
        write_text_model(evaluation.model_folder(elsewhere))
        yield evaluation.orchestrator(elsewhere)
