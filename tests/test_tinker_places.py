"""Which GPUs the trainer and the engines of a Tinker server get, on described machines."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.serve import ServeConfig, ServedBase
from primerl.launch.placement import gpus
from primerl.launch.placement.gpus import Gpu
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.slurm import allocation
from primerl.launch.placement.slurm.allocation import Allocation
from primerl.launch.placement.slurm.placement import SlurmPlacement
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


@pytest.mark.parametrize(("wanted", "chosen"), [("auto", "vllm"), ("vllm", "vllm"), ("auto", "torch")])
def test_options_of_vllm_are_for_the_backend_that_was_chosen(
    wanted: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(backend=wanted, vllm={"gpu-memory-utilization": 0.5}).model_copy(
        update={"model": ServedBase(path="/models/base", trust_remote_code=True)}
    )
    found = places.engines(config, replace(CHECKED, backend=chosen))
    expected = {"gpu-memory-utilization": 0.5, "trust-remote-code": True} if chosen == "vllm" else {}
    assert [one.config.vllm for one in found] == [expected] * 2
    # A share that only vLLM would be given is none of another engine.
    monkeypatch.setattr(gpus, "visible", lambda *_: [Gpu("0")])
    assert (places.with_share(config, chosen)[1] is None) == (chosen == "vllm")


def test_a_server_that_engines_elsewhere_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = SlurmPlacement(num_infer_nodes=1, gpus_per_node=1, ahead=True)
    config = config_of(device="cpu")
    plan = places.plan(placement, config, engines(config))
    with pytest.raises(ConfigError, match=r"^host: localhost is reached from the trainer's node alone, and engine_0"):
        places.check_reached("localhost", placement, plan)
    places.check_reached("0.0.0.0", placement, plan)
    # In the job, whose nodes have addresses: those of a cluster for trials are this machine's.
    monkeypatch.setattr(allocation, "current", lambda: Allocation("7", ("a1", "a2")))
    inside = SlurmPlacement(num_infer_nodes=1, gpus_per_node=1)
    plan = places.plan(inside, config, engines(config))
    for address, is_refused in (("127.0.0.1", False), ("10.0.0.1", True)):
        monkeypatch.setattr(inside, "address", lambda node, address=address: address)
        with pytest.raises(ConfigError, match=r"^host") if is_refused else contextlib.nullcontext():
            places.check_reached("127.0.0.1", inside, plan)
    here = LocalPlacement(find_gpus=list)
    places.check_reached("127.0.0.1", here, places.plan(here, config, engines(config)))


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
