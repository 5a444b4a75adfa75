"""Which GPUs the trainer and the engines of a Tinker server get, on described machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.serve import ServeConfig
from primerl.launch.placement import gpus
from primerl.launch.placement.gpus import Gpu
from primerl.launch.placement.local import LocalPlacement
from primerl.tinker import places
from primerl.tinker.checks import Checked

BACKEND = "torch"
CHECKED = Checked(Path("/models/base"), BACKEND, 128)


def config_of(**inference: Any) -> ServeConfig:
    given = {"inference": {"device": "auto", **inference}, "model": {"path": "/models/base"}}
    return ServeConfig.model_validate(given)


def engines(config: ServeConfig) -> list[ProcessConfig]:
    return places.engines(config, CHECKED)


def gpus_of(config: ServeConfig, machine: list[Gpu]) -> dict[str, tuple[str, ...]]:
    plan = places.plan(LocalPlacement(find_gpus=lambda: machine), config, engines(config))
    return {place.role.name: place.gpus for place in plan.places}


def test_trainer_and_engines_have_gpus_of_their_own() -> None:
    machine = [Gpu(str(number)) for number in range(4)]
    assert gpus_of(config_of(), machine) == {"trainer": ("0",), "engine_0": ("1",), "engine_1": ("2",)}
    assert gpus_of(config_of(device="cpu"), machine) == {"trainer": ("0",), "engine_0": (), "engine_1": ()}
    assert gpus_of(config_of(), []) == {"trainer": (), "engine_0": (), "engine_1": ()}
    with pytest.raises(ConfigError, match=r"3 GPUs are asked for, and this machine has 2, so that engine_1 would"):
        gpus_of(config_of(), machine[:2])


def test_a_machines_only_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = [Gpu("0")]
    monkeypatch.setattr(gpus, "visible", lambda *_: machine)
    config, said = places.with_share(config_of(), BACKEND)
    assert said is not None
    assert "deployment.engine_share" in said
    assert places.engine_share(config, BACKEND) == pytest.approx(0.2)
    assert places.trainer_share(config) == 0.6
    assert gpus_of(config, machine) == dict.fromkeys(("trainer", "engine_0", "engine_1"), ("0",))
    # What the user has said, and machines on which nothing is shared.
    assert places.with_share(config_of(device="cpu"), BACKEND)[1] is None
    assert places.with_share(config, BACKEND) == (config, None)
    machine.append(Gpu("1"))
    assert places.with_share(config_of(), BACKEND)[1] is None


def test_the_trainer_counts_gpus_as_the_placement_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (gpus.VARIABLE, gpus.ORDER):
        # So that what is set is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    config, placement = config_of(), LocalPlacement(find_gpus=lambda: [Gpu(name) for name in "012"])
    places.take(placement, places.plan(placement, config, engines(config)))
    assert os.environ[gpus.ORDER] == gpus.BY_BUS
    # An engine that is given its GPU by number counts all of them.
    assert gpus.VARIABLE not in os.environ
