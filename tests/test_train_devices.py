"""Which device a rank takes, and what has to hold on a GPU that one can see without having one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.models.tiny import write_model
from primerl.train.adapters.lora import add_adapter
from primerl.train.distributed.ranks import Ranks, own_device
from primerl.train.model import loading
from primerl.train.model.packed_model import load_model
from primerl.train.settings import ConfigError, LoraConfig
from settings_helpers import filled
from torch import Tensor

GPU = torch.device("cuda", 0)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, **environment: str) -> list[torch.device]:
    """Those that become torch's current one."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return current


def test_a_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = with_gpus(monkeypatch, 2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert own_device() == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    with_gpus(monkeypatch, 1)
    assert own_device() == GPU
    with_gpus(monkeypatch, 0, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert own_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"LOCAL_RANK": "2"}, 3),
        # The first rank has a GPU, and does not wait for the one that has none.
        (
            {
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "4",
                "CUDA_VISIBLE_DEVICES": "0,1",
                "TORCHELASTIC_RUN_ID": "run",
            },
            4,
        ),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: int
) -> None:
    current = with_gpus(monkeypatch, 2, **environment, WORLD_SIZE=str(ranks), RANK=environment["LOCAL_RANK"])
    with pytest.raises(
        ConfigError, match=rf"^ranks: {ranks} ranks .* torch sees 2.*; set ranks to at most 2, "
    ) as found:
        Ranks.join(ranks, 1, 1.0)
    assert ("'0,1'" in str(found.value)) == ("CUDA_VISIBLE_DEVICES" in environment)
    assert not current


def test_ranks_that_each_see_a_gpu_of_their_own_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm or a wrapper gives them."""
    of_slurm = {"TORCHELASTIC_RUN_ID": "run", "SLURM_GPUS_PER_TASK": "1"}
    for more in ({}, of_slurm):
        current = with_gpus(monkeypatch, 1, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", **more)
        assert own_device() == torch.device("cuda", 0)
        assert current == [torch.device("cuda", 0)]


def test_ranks_wait_for_each_other_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum on a GPU is only queued there: the process would not wait."""
    summed: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", summed.append)
    Ranks(0, 2, GPU).wait()
    assert [tensor.device.type for tensor in summed] == ["cpu"]


def test_the_whole_model_stays_where_it_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fully_shard` moves each parameter to the GPU in place; what is kept of the leading rank's model, to be scattered
    tensor by tensor, may not go with it."""
    write_model(tmp_path, seed=0)
    model = load_model(tmp_path)
    loaded = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}

    def moving(model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)

    kept: dict[str, Tensor] = {}
    monkeypatch.setattr(loading, "shard", moving)
    monkeypatch.setattr(loading, "fill", lambda model, whole, *_: kept.update(whole))
    monkeypatch.setattr(loading, "check_same", lambda *_: None)
    model.reshard = lambda: None
    loading._divide(model, Ranks(0, 1, torch.device("cpu")), torch.float32)
    assert kept.keys() >= loaded.keys()
    assert {name: kept[name].data_ptr() for name in loaded} == loaded


def test_an_adapter_leaves_the_generators_of_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, seed=0)
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    before = torch.get_rng_state()
    first = [
        add_adapter(load_model(tmp_path), filled(LoraConfig, rank=2, alpha=4.0), tmp_path, seed).tensors()
        for seed in (1, 1, 2)
    ]
    assert not reseeded
    assert torch.equal(torch.get_rng_state(), before)
    name = next(name for name in first[0] if ".lora_A." in name)
    assert torch.equal(first[0][name], first[1][name])
    assert not torch.equal(first[0][name], first[2][name])
