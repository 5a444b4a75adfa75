"""What can be known to be wrong with the model of a run: by itself, and with what the run wants of it."""

from __future__ import annotations

from pathlib import Path

from primerl.config import resolve
from primerl.config.complaint import Problems
from primerl.config.load import ConfigError
from primerl.config.rl import RLConfig
from primerl.inference.shape import Shape, UnsupportedModelError
from primerl.inference.vllm import installation
from primerl.launch.preflight import model_folder
from primerl.train.adapters.files import check_lora_files, has_experts
from primerl.train.settings import ConfigError as SettingError
from primerl.train.settings import TrainerLoraConfig, read


def check(config: RLConfig, *, weights: bool = True) -> None:
    """Raises ConfigError with every problem, one a line. `weights`: whether they are there yet."""
    folder = Path(resolve.absolute(config.model.path))
    problems = Problems()
    with problems.noted():
        model_folder.check_model(folder, weights=weights)
    whole = weights and not problems.found
    # What is judged by config.json says nothing of a folder that has none.
    if not problems.found or model_folder.has_config(folder):
        with problems.noted():
            model_folder.check_trainable(folder)
        with problems.noted():
            _engine_serves(config, folder, whole=whole)
        with problems.noted():
            if whole:
                _adapts(config, folder)
        with problems.noted():
            _attends(config, folder)
    problems.check()


def _engine_serves(config: RLConfig, folder: Path, *, whole: bool) -> None:
    if config.inference.replicas and resolve.engine_backend(config) == "vllm":
        _vllm(config, folder, whole=whole)
    elif config.inference.replicas:
        try:
            Shape.read(folder)
        except (ValueError, TypeError) as error:
            problem = str(error) if isinstance(error, UnsupportedModelError) else f"model.path: {folder}: {error}"
            raise ConfigError(problem) from None


def _adapts(config: RLConfig, folder: Path) -> None:
    lora = resolve.trained_lora(config)
    if lora is None:
        return
    # As the trainer reads them.
    settings = read(TrainerLoraConfig, lora.model_dump(exclude_none=True), "trainer.model.lora.")
    try:
        check_lora_files(settings, folder, "trainer.model.lora.")
    except SettingError as error:
        raise ConfigError(str(error)) from None


def _attends(config: RLConfig, folder: Path) -> None:
    limit = model_folder.longest_sequence(folder)
    if limit is None:
        return
    problems = []
    longest = config.orchestrator.sampling.max_tokens
    if longest >= limit:
        problems.append(
            f"orchestrator.sampling.max_tokens ({longest}) must be below what the model in {folder} can attend to "
            f"({limit}), which holds the prompt too; lower it"
        )
    bound = config.inference.max_model_len
    name, context = ("seq_len", config.seq_len) if bound is None else ("inference.max_model_len", bound)
    # A default seq_len is too long only for want of a shorter answer.
    if context > limit and (bound is not None or "seq_len" in config.model_fields_set):
        problems.append(f"{name} ({context}) is above what the model in {folder} can attend to ({limit}); lower it")
    if problems:
        raise ConfigError("\n".join(problems))


def _vllm(config: RLConfig, folder: Path, *, whole: bool) -> None:
    try:
        installation.check_model(folder, installation.find(config.inference.python).device)
    except installation.UnusableError as error:
        raise ConfigError(str(error)) from None
    temperature = config.orchestrator.sampling.temperature
    if temperature > installation.HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"orchestrator.sampling.temperature ({temperature:g}) is above {installation.HIGHEST_TEMPERATURE:g}, the "
            'highest that vLLM samples at; lower it, or set inference.backend = "torch"'
        )
    lora = resolve.trained_lora(config)
    if lora is not None and lora.broadcast == "adapter":
        _vllm_adapts(lora.rank, folder, whole=whole)
        _vllm_reads_adapters_again(config)


def _vllm_reads_adapters_again(config: RLConfig) -> None:
    needed, weights = resolve.adapters_to_keep(config), config.trainer.weights
    keeps_all = config.keep_broadcasts or weights.keep_all
    if needed is not None and weights.keep_last < needed and "keep_last" in weights.model_fields_set and not keeps_all:
        raise ConfigError(
            f"trainer.weights.keep_last ({weights.keep_last}) must be at least orchestrator.max_off_policy_steps + "
            f"orchestrator.max_async_level + 2 ({needed}) with adapters on vLLM, which reads those of rollouts in "
            "flight again where it has no room for them; raise it, or leave it out"
        )


def _vllm_adapts(rank: int, folder: Path, *, whole: bool) -> None:
    """As far as it can be seen before vLLM is started, which refuses layers that it cannot adapt."""
    try:
        installation.lora_rank(rank)
    except installation.UnusableError as error:
        raise ConfigError(str(error)) from None
    if whole and has_experts(folder):
        raise ConfigError(
            f"trainer.model.lora: the model in {folder} is a mixture, of which adapters for vLLM are not proved yet; "
            'set trainer.model.lora.broadcast = "merged"'
        )
