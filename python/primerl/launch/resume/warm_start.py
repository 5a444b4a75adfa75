"""`checkpoint_id`: a run begins from what another one has stored."""

from __future__ import annotations

import json
from pathlib import Path

from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import files, resolve
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.trainer import TrainerLora
from primerl.runs.registry import known
from primerl.runs.state import StateError
from primerl.stores.choice import open_store
from primerl.stores.entries import Entry, StoreError, begun_with, listed, weights_digest
from primerl.stores.store import Store
from primerl.train.adapters.files import ADAPTER_CONFIG, ADAPTER_FILE, base_digest

KEY = "checkpoint_id"


def applied(config: RLConfig) -> RLConfig:
    """The config with the stored weights or adapter in place, which are fetched into the state folder, and without the
    id: a resumed run must not begin from what is the newest by then. Raises ConfigError where it is not READY, or
    of another model."""
    given = config.checkpoint_id
    if given is None:
        return config
    try:
        store = open_store(config.store.url if config.store else None)
        entry = store.find(_by_id(given))
        if entry.kind == "checkpoint":
            raise ConfigError.at(KEY, _only_goes_on(entry, store))
        return _begun(config, store, entry)
    except (StoreError, StateError) as error:
        raise ConfigError.at(KEY, str(error)) from None


def _begun(config: RLConfig, store: Store, entry: Entry) -> RLConfig:
    model = Path(files.absolute(config.model.path))
    _check_model(entry, model)
    if entry.kind == "weights":
        folder = store.fetch(entry)
        changed = config.model.model_copy(update={"path": str(folder), "name": resolve.model_name(config)})
        begun: RLConfig = config.model_copy(update={"model": changed, KEY: None})
        return begun
    lora = config.trainer.model.lora
    if lora is None or lora.adapter_path is not None:
        raise ConfigError.at(KEY, f"{entry.id} is an adapter, which needs [trainer.model.lora] without an adapter_path")
    folder = store.fetch(entry)
    _check_adapter(entry, folder, lora, model)
    adapted = config.trainer.model.model_copy(update={"lora": lora.model_copy(update={"adapter_path": str(folder)})})
    warm: RLConfig = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"model": adapted}), KEY: None}
    )
    return warm


def _only_goes_on(entry: Entry, store: Store) -> str:
    there = [other for other in store.entries(entry.run) if other.kind != "checkpoint"]
    begin = "its weights were not stored (`ckpt.weights.only_last`, or only newer ones are kept)"
    others = f"there are {listed(there)}" if there else "there are none of other steps either"
    return (
        f"{entry.id} is what its own run resumes from (`primerl run resume {entry.run}`); to begin another one "
        f"takes weights or an adapter, and of step {entry.step} {begin}; {others}"
    )


def _check_model(entry: Entry, model: Path) -> None:
    """Raises ConfigError where the run that stored it began with another model than the one in that folder."""
    config, weights = begun_with(model)
    began = known(entry.run)
    hint = "give the model that its run began with as model.path" + (f" ({began.model})" if began is not None else "")
    if config != entry.model:
        raise ConfigError.at(
            KEY, f"{entry.id} is of another model than the one in {model}: their config.json differ; {hint}"
        )
    # What an adapter was trained on is in its own file.
    if entry.kind == "weights" and entry.base and weights and entry.base != weights:
        raise ConfigError.at(
            KEY,
            f"{entry.id} is of another model than the one in {model}: its run began with other weights of the "
            f"same shape; {hint}",
        )


def _check_adapter(entry: Entry, folder: Path, lora: TrainerLora, model: Path) -> None:
    """What the trainer would refuse, in words of what the user gave. Raises ConfigError."""
    try:
        found = base_digest(folder / ADAPTER_FILE)
        said = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError.at(KEY, f"{entry.id} is no adapter that can be read: {error}") from None
    if found is not None and found != weights_digest(model):
        raise ConfigError.at(
            KEY,
            f"{entry.id} was trained on another base model than the one in {model}: their weights differ; give "
            "the model it was trained on as model.path",
        )
    for name, own in (("r", "rank"), ("lora_alpha", "alpha")):
        value = getattr(lora, own)
        if said.get(name) != value:
            raise ConfigError.at(
                KEY,
                f"{entry.id} has {own} {said.get(name)}, and trainer.model.lora.{own} is {value:g}; set that to "
                f"{said.get(name)}",
            )


def _by_id(given: str) -> str:
    """With the run's id in place of its name, where the list of runs has it."""
    name, slash, rest = given.partition("/")
    run = known(name)
    return given if run is None else run.id + slash + rest
