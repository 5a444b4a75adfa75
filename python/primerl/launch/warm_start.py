"""`checkpoint_id`: a run begins from what another one has stored."""

from __future__ import annotations

from pathlib import Path

from primerl.config import resolve
from primerl.config.load import ConfigError
from primerl.config.rl import RLConfig
from primerl.runs.registry import known
from primerl.runs.state import StateError
from primerl.runs.store import Store, StoreError, model_digest


def applied(config: RLConfig) -> RLConfig:
    """The config with the stored weights or adapter in place, which are fetched into the state folder, and without the
    id: a run that goes on is not to begin from what is the newest by then. Raises ConfigError where it is not READY, or
    of another model."""
    given = config.checkpoint_id
    if given is None:
        return config
    try:
        store = Store(config.store.url if config.store else None)
        entry = store.find(_by_id(given))
        model = Path(resolve.absolute(config.model.path))
        if entry.kind == "checkpoint":
            raise ConfigError(
                f"checkpoint_id: {entry.id} is what its own run goes on from (`primerl run resume {entry.run}`); to "
                "begin another one, give weights or an adapter (`primerl run checkpoints` lists them)"
            )
        if model_digest(model) != entry.model:
            raise ConfigError(
                f"checkpoint_id: {entry.id} is of another model than the one in {model}: their config.json differ; "
                "give the model that its run began with as model.path"
            )
        folder = store.fetch(entry)
    except (StoreError, StateError) as error:
        raise ConfigError(f"checkpoint_id: {error}") from None
    if entry.kind == "weights":
        changed = config.model.model_copy(update={"path": str(folder), "name": resolve.model_name(config)})
        begun: RLConfig = config.model_copy(update={"model": changed, "checkpoint_id": None})
        return begun
    lora = config.trainer.model.lora
    if lora is None or lora.adapter_path is not None:
        raise ConfigError(
            f"checkpoint_id: {entry.id} is an adapter, which needs [trainer.model.lora] without an adapter_path"
        )
    adapted = config.trainer.model.model_copy(update={"lora": lora.model_copy(update={"adapter_path": str(folder)})})
    warm: RLConfig = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"model": adapted}), "checkpoint_id": None}
    )
    return warm


def _by_id(given: str) -> str:
    """With the run's id in place of its name, where the list of runs has it."""
    name, slash, rest = given.partition("/")
    run = known(name)
    return given if run is None else run.id + slash + rest
