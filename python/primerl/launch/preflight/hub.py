"""A model by its name on the hub: its folder in this machine's cache."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch.preflight.model_folder import INDEX, longest_sequence

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]
"""All but the weights: enough to judge a model by."""
# What a model is made of: other formats of the same weights are left where they are.
FILES = [*SMALL, "*.safetensors"]


def with_model(config: RLConfig, *, weights: bool = True) -> RLConfig:
    """The config with the model's folder in place of a name of the hub, and with a `seq_len` that the model can attend
    to where none was given. Without `weights`, only small files are downloaded.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] where there is neither folder nor model.
    """
    return _fitted(_found(config, weights=weights))


def _fitted(config: RLConfig) -> RLConfig:
    if "seq_len" in config.model_fields_set:
        return config
    limit = None
    with contextlib.suppress(ConfigError):  # reported with the folder's other problems
        limit = longest_sequence(Path(files.absolute(config.model.path)))
    # Without room for an answer it is the answer that has to be shorter.
    longest = max(sampling.max_tokens for _, sampling in config.orchestrator.samplings())
    if limit is None or not config.seq_len > limit > longest:
        return config
    fitted: RLConfig = config.model_copy(update={"seq_len": limit})
    return fitted


def _found(config: RLConfig, *, weights: bool) -> RLConfig:
    name = config.model.path
    if not is_hub_name(name):
        return config
    label = config.model.name or name.rsplit("/", 1)[-1]
    folder = folder_of(name, weights=weights)
    model = config.model.model_copy(update={"path": os.fspath(folder), "name": label})
    found: RLConfig = config.model_copy(update={"model": model})
    return found


def with_start(config: SFTConfig, *, weights: bool = True) -> SFTConfig:
    """The same of the model that supervised fine-tuning starts from."""
    name = config.model.path
    if name is None or not is_hub_name(name):
        return config
    model = config.model.model_copy(update={"path": os.fspath(folder_of(name, weights=weights))})
    found: SFTConfig = config.model_copy(update={"model": model})
    return found


def is_hub_name(path: str) -> bool:
    """A folder that is there is meant before a name of the hub."""
    return NAME.fullmatch(path) is not None and not Path(files.absolute(path)).exists()


def folder_of(name: str, *, weights: bool = True) -> Path:
    """Where the model is in the cache; it is downloaded where it is not there, without `weights` all that is small.

    Raises [`ConfigError`][primerl.config.errors.fail.ConfigError].
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        cached = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
        if _is_whole(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    hint = (
        "give the path of a model folder, or make it available: `hf download` puts models into the cache on a machine "
        "that reaches the hub (HF_TOKEN for those that need a login)"
    )
    try:
        return Path(snapshot_download(name, allow_patterns=FILES if weights else SMALL))
    except (OSError, ValueError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError.at(
            "model.path",
            f"there is no folder {files.absolute(name)}, nor a model {name!r} in the hub's cache of this "
            f"machine ({HF_HUB_CACHE}), and it cannot be downloaded ({type(error).__name__}: {reason}); {hint}",
        ) from None


def _is_whole(folder: Path) -> bool:
    """Whether nothing is left to download: a start that was interrupted has left a part."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        return False
    names: set[str] = set()
    # A damaged index is reported with the folder's other problems.
    with contextlib.suppress(OSError, ValueError, AttributeError, LookupError, TypeError):
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in names)
