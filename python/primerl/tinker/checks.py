"""What can be wrong with a server of the Tinker API before anything starts: its key, its model, its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from primerl.config.errors.fail import ConfigError, Problems
from primerl.config.process_files.files import absolute
from primerl.config.schema.serve import ServeConfig
from primerl.inference import backends
from primerl.inference.backend import UnservableError
from primerl.launch.preflight import hub, model_folder
from primerl.net import addresses
from primerl.process.problems import Problem
from primerl.tinker.untied import engines_folder
from primerl.train.model.packed_model import ModelError

KEY = "TINKER_API_KEY"
KEY_BEGINS = "tml-"
WITH_KEY = "with_key"
"""In output_dir/run: a server that was started there had a key."""


def key_of(config: ServeConfig, *, submits: bool = False) -> str | None:
    """The key that clients have to send; None: any. Raises ConfigError where other machines could call without one, the
    SDK would refuse it, or a job would not have it. `submits`: for a server that a job is to be, whose address is not
    known yet."""
    key = os.environ.get(KEY)
    if key is not None and not key.startswith(KEY_BEGINS):
        raise ConfigError(
            f"{KEY} has to begin with {KEY_BEGINS}: the SDK refuses any other; for example {KEY_BEGINS}local"
        )
    is_elsewhere = submits and "host" not in config.model_fields_set
    if key is None and is_elsewhere:
        raise ConfigError.at(
            "host",
            f"the job's server can be reached from other machines, and {KEY} is not set; set it where the job is "
            f'submitted and for clients (it begins with {KEY_BEGINS}), or host = "127.0.0.1" for clients on its node',
        )
    if key is None and addresses.is_reached_from_elsewhere(config.host):
        raise exposed(config.host)
    if key is not None and config.slurm is not None and not {"ALL", KEY} & set(config.slurm.export.split(",")):
        words = f"slurm.export ({config.slurm.export}) does not hand on {KEY}; name it there as well"
        raise ConfigError(words, "slurm.export")
    return key


def note_key(key: str | None, folder: Path, say: Callable[[str], None]) -> None:
    """Writes into the folder that the server has a key. Warns where it had one before and has none now: the shell in
    which it is resumed may lack it."""
    if key is not None:
        (folder / WITH_KEY).touch()
    elif (folder / WITH_KEY).exists():
        say(f"warning: this server had a key before, and {KEY} is not set now: any program of this machine may call it")


def exposed(host: str) -> ConfigError:
    return ConfigError.at(
        "host",
        f"{host} can be reached from other machines, and {KEY} is not set; set it here and for clients (it "
        f"begins with {KEY_BEGINS}), or listen on 127.0.0.1",
    )


@dataclass(frozen=True)
class Checked:
    folder: Path
    """The model's."""
    backend: str
    """Name of the engines' backend."""
    context: int
    """Tokens of a prompt and its sample."""


def checked(config: ServeConfig) -> Checked:
    """Raises ConfigError."""
    name = config.model.path
    folder = hub.folder_of(name) if hub.is_hub_name(name) else Path(absolute(name))
    problems = Problems()
    with problems.noted():
        model_folder.check_model(folder)
    problems.check()
    with problems.noted():
        model_folder.check_trainable(folder, trusted=config.model.trust_remote_code)
    source, backend = config.inference, ""
    with problems.noted():
        try:
            backend = backends.chosen(source.backend, source.python, folder)
            found = backends.named(backend)
            found.check_model(folder, source.python)
            found.check_dtype(folder, source.dtype or found.default_dtype(source.python), source.python)
        except (UnservableError, ValueError) as error:
            raise ConfigError.like(error) from None
    limit = model_folder.longest_sequence(folder)
    if limit is not None and source.max_model_len is not None and source.max_model_len > limit:
        words = f"inference.max_model_len is {source.max_model_len}; the model attends to {limit}"
        problems.found.append(Problem(words, "inference.max_model_len"))
    problems.check()
    output_dir = Path(absolute(config.output_dir))
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError.at("output_dir", f"{output_dir} is not a folder; choose another output_dir")
    longest = source.max_model_len or config.trainer.max_tokens
    return Checked(folder, backend, min(longest, limit or longest))


def for_engines(config: ServeConfig, checked: Checked, target: Path) -> Path:
    """The folder that engines load: `target`, where the model's own does not do. Raises ConfigError."""
    try:
        return engines_folder(checked.folder, target, trusted=config.model.trust_remote_code)
    except ModelError as error:
        raise ConfigError.at("model.path", str(error)) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError.at("output_dir", f"{target} cannot be written: {error}") from None
