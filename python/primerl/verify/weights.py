"""The model that sampled: in `transformers`, with the weights of each version."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from primerl.inference.transformers.kernels import choose_by_device
from primerl.train.adapters.files import BASE_DIGEST
from primerl.train.weights.publish import manifest
from primerl.verify.reference import adapted_model
from primerl.verify.report import VerifyError


class Weights:
    """The run's model in `transformers`, fp32, with the weights of one version at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._broadcasts = folder / "broadcasts"
        self._config = AutoConfig.from_pretrained(_model_folder(folder), local_files_only=True)
        self._base = _trained_from(folder) or _model_folder(folder)
        # What is published is not quantised, whatever the model's own folder is.
        vars(self._config).pop("quantization_config", None)
        made = _shape(self._config)
        # The text model's, where a model reads images too and that alone is trained.
        self._kind, self._config = type(made), made.config
        self.stacks = _remembers_pairs_only(self._config)
        """Whether sequences' caches can be stacked: they hold keys and values of all tokens, and nothing else."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def load(self, version: int) -> Any:
        """The model of `version`, its weights checked against their manifest."""
        folder = self._broadcasts / f"step_{version}"
        try:
            recorded = json.loads((folder / "manifest.json").read_bytes())
            tensors: dict[str, Tensor] = {}
            for file in recorded["files"]:
                tensors |= load_file(folder / file["name"])
        except (OSError, ValueError, KeyError) as error:
            raise VerifyError(f"{folder}: {type(error).__name__}: {error}") from error
        found = manifest(version, tensors, "", 0)["digest"]
        if found != recorded["digest"] or recorded["policy_version"] != version:
            raise VerifyError(f"{folder}: the weights have digest {found}, manifest.json says {recorded['digest']}")
        if BASE_DIGEST in tensors:
            try:
                return self._placed(adapted_model(self._base, folder, tensors))
            except ValueError as error:
                raise VerifyError(f"{folder}: {error}") from None
        model, loaded = self._kind.from_pretrained(
            None,
            config=self._config,
            state_dict=tensors,
            dtype=torch.float32,
            # The plainest of each architecture: others omit caps of scores, or sinks.
            attn_implementation="sdpa" if self.stacks else "eager",
            output_loading_info=True,
        )
        problems = {kind: sorted(names) for kind, names in loaded.items() if names}
        if problems:
            raise VerifyError(f"{folder}: the weights do not fit the model: {problems}")
        return self._placed(model)

    def _placed(self, model: Any) -> Any:
        choose_by_device(model)
        return model.to(self.device).eval()

    @property
    def vocabulary(self) -> int:
        return int(self._config.get_text_config().vocab_size)


def _shape(config: Any) -> Any:
    """A model with this config, of text, or of text and images, without memory. Raises VerifyError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for kind in kinds:
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config)
    raise VerifyError(f"transformers has no model of type {config.model_type!r} that continues a text")


def _remembers_pairs_only(config: Any) -> bool:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    try:
        return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    except (KeyError, AttributeError):  # no cache of transformers is for its layers
        return False


def _model_folder(folder: Path) -> Path:
    """A folder with the run's `config.json`: its checkpoint, or the model it started from."""
    candidates = sorted((folder / "weights").glob("step_*"), key=lambda path: path.stat().st_mtime, reverse=True)
    trained_from = _trained_from(folder)
    candidates += [] if trained_from is None else [trained_from]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise VerifyError(f"no model config: neither {folder}/weights/step_N nor the model folder in {folder}/configs")


def tokenizer_folder(folder: Path) -> Path:
    """The folder whose tokenizer engines and trainer had, by which structured outputs are replayed."""
    checkpoints = sorted((folder / "weights").glob("step_*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    return _trained_from(folder) or (checkpoints[-1].parent if checkpoints else folder)


def _trained_from(folder: Path) -> Path | None:
    """The model folder that the run's trainer began with."""
    settings = folder / "configs" / "trainer.toml"
    if not settings.is_file():
        return None
    return Path(tomllib.loads(settings.read_text(encoding="utf-8"))["model"]["path"])
