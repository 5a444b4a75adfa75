"""What can be known to be wrong with the model of a run: by itself, and with what the run wants of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files import files, resolve
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.inference import backends
from primerl.inference.backend import EngineBackend, UnservableError
from primerl.launch.preflight import model_folder, thinking
from primerl.launch.resume import going_back
from primerl.process.problems import Problem
from primerl.process.setting_checks import from_mapping
from primerl.train.adapters.files import check_lora_files
from primerl.train.model import support
from primerl.train.settings import ConfigError as SettingError
from primerl.train.settings import TrainerLoraConfig


def check(config: RLConfig, *, weights: bool = True) -> None:
    """Raises ConfigError with every problem, one a line. `weights`: whether they are there yet."""
    folder = Path(files.absolute(config.model.path))
    problems = Problems()
    with problems.noted():
        model_folder.check_model(folder, weights=weights)
    whole = weights and not problems.found
    # What is judged by config.json says nothing of a folder that has none.
    if not problems.found or model_folder.has_config(folder):
        with problems.noted():
            trusted = config.model.trust_remote_code
            ranks, compiles = config.trainer.ranks, config.trainer.compile
            model_folder.check_trainable(folder, ranks=ranks, compiles=compiles, trusted=trusted)
        with problems.noted():
            _engine_serves(config, folder)
        with problems.noted():
            if whole:
                _adapts(config, folder)
        with problems.noted():
            _routes(config, folder)
        with problems.noted():
            _attends(config, folder)
    # A run that has begun keeps its options, of which it is a part that they do nothing.
    keeps = not config.clean_output_dir and going_back.holds_run(Path(files.absolute(config.output_dir)))
    if not problems.found and not keeps:
        for place, sampling in config.orchestrator.samplings():
            with problems.noted():
                thinking.check(folder, sampling.chat_template_kwargs, f"{place}.chat_template_kwargs")
    problems.check()


def say_drawback(config: RLConfig | EvalConfig, say: Callable[[str], None]) -> None:
    """Says what an engine is worse at that `auto` has chosen."""
    backend = resolve.engine_backend(config)
    if config.inference.backend == backends.AUTO and backend.drawback:
        say(f"the model is served by {backend.title}: {backend.drawback}")


def _engine_serves(config: RLConfig, folder: Path) -> None:
    if not config.inference.replicas:
        return
    backend = resolve.engine_backend(config)
    lora = resolve.trained_lora(config)
    try:
        backend.check_model(folder, config.inference.python)
        backend.check_dtype(folder, resolve.engine_dtype(config), config.inference.python)
        for _, sampling in config.orchestrator.samplings():
            backend.check_sampling(sampling.temperature)
        if config.trainer.enable_router_replay:
            backend.check_experts(folder, config.inference.python)
        if lora is not None and lora.broadcast == "adapter":
            backend.check_adapters(lora.rank, folder, lora.target_modules)
            _adapters_stay(config, backend)
    except UnservableError as error:
        raise ConfigError.like(error) from None


def _adapts(config: RLConfig, folder: Path) -> None:
    lora = resolve.trained_lora(config)
    if lora is None:
        return
    settings = from_mapping(TrainerLoraConfig, files.keys_of(lora), "trainer.model.lora.")
    try:
        check_lora_files(settings, folder, "trainer.model.lora.")
    except SettingError as error:
        raise ConfigError.like(error) from None


def _routes(config: RLConfig, folder: Path) -> None:
    if not config.trainer.enable_router_replay:
        return
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not support.experts(content):
        raise ConfigError.at(
            "trainer.enable_router_replay",
            f"the model in {folder} is no mixture (its config.json names no experts), so "
            "there is nothing to replay; omit it",
        )


def _attends(config: RLConfig, folder: Path) -> None:
    limit = model_folder.longest_sequence(folder)
    if limit is None:
        return
    problems = []
    for place, sampling in config.orchestrator.samplings():
        if sampling.max_tokens < limit:
            continue
        key = f"{place}.max_tokens"
        words = (
            f"{key} ({sampling.max_tokens}) must be below what the model in {folder} can attend to ({limit}), which "
            "holds the prompt too; lower it"
        )
        problems.append(Problem(words, key))
    bound = config.inference.max_model_len
    name, context = ("seq_len", config.seq_len) if bound is None else ("inference.max_model_len", bound)
    # A default seq_len is too long only because nothing shorter was found.
    if context > limit and (bound is not None or "seq_len" in config.model_fields_set):
        words = f"{name} ({context}) is above what the model in {folder} can attend to ({limit}); lower it"
        problems.append(Problem(words, name))
    if problems:
        raise ConfigError.of(problems)


def _adapters_stay(config: RLConfig, backend: EngineBackend) -> None:
    needed, weights = resolve.adapters_to_keep(config), config.trainer.weights
    keeps_all = config.keep_broadcasts or weights.keep_all
    if needed is not None and weights.keep_last < needed and "keep_last" in weights.model_fields_set and not keeps_all:
        raise ConfigError(
            f"trainer.weights.keep_last ({weights.keep_last}) must be at least orchestrator.max_off_policy_steps + "
            f"orchestrator.max_async_level + 2 ({needed}) with adapters on {backend.title}, which reads those of "
            "rollouts in flight again where it has no room for them; raise it, or omit it",
            "trainer.weights.keep_last",
            "orchestrator.max_off_policy_steps",
            "orchestrator.max_async_level",
        )
