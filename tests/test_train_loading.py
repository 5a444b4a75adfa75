"""A model that is divided among ranks is loaded by the leading one, and is the same on all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.distributed.ranks import ALONE
from primerl.train.model.loading import load, make_ready, more_precise
from primerl.train.model.packed_model import load_model, model_shape
from primerl.train.optim import START, Optimizer
from primerl.train.settings import ComputationConfig, LoraConfig, OptimConfig
from rank_helpers import Case, Meeting, start_ranks
from settings_helpers import filled
from sft_helpers import settings, write_rows

pytestmark = pytest.mark.processes

RANKS = 2
DIVIDED = [family for family in FAMILIES if family != "ctrl"]
"""That one has no list of layers, and is refused on several ranks."""
STREAMED = ["bamba", "gemma3_text", "llama", "qwen3", "qwen3_next"]
"""Of those that are read tensor by tensor where they are large."""

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from primerl.config.process_files.files import resolved
from primerl.config.schema import trainer as schema
from primerl.process.setting_checks import from_mapping
from primerl.train.settings import ComputationConfig, LoraConfig
from primerl.train.distributed.ranks import Ranks
from primerl.train.model import streaming
from primerl.train.model.loading import load, make_ready, together
from primerl.train.model.packed_model import load_model
from primerl.train.distributed.fsdp import local, whole
(case,) = json.load(sys.stdin)
os.environ |= {"WORLD_SIZE": str(case["ranks"])} | case["places"]
torch.set_num_threads(1)
ranks = Ranks.join(case["ranks"], 1, 120.0)
if case["values"]["streams"]:
    streaming.LARGE = 0
for folder in case["values"]["folders"]:
    lora = from_mapping(LoraConfig, resolved(schema.Lora, {"rank": 2})) if case["values"]["lora"] else None
    model = load(Path(folder), "float32", ranks)
    held = [tensor for tensor in model.parameters() if not tensor.is_meta]
    is_streamed = ranks.agree(hasattr(model, streaming.SOURCE))
    assert bool(held) == (ranks.leads and not is_streamed), "one whole model is in memory, unless it is streamed"
    computation = from_mapping(ComputationConfig, resolved(schema.Computation, {"ranks": case["ranks"]}))
    make_ready(model, computation, lora, Path(folder), 0, ranks)
    parameters = list(model.parameters())
    assert sum(local(one).numel() for one in parameters) < sum(one.numel() for one in parameters)
    found = {name: whole(tensor.detach()) for name, tensor in model.state_dict().items()}
    if lora is None:
        expected = load_model(folder).state_dict()
        assert found.keys() == expected.keys(), folder
        wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
        assert not wrong, (folder, wrong)
    buffers = {name: tensor for name, tensor in model.named_buffers()}
    mine = {name: tensor.double().sum().item() for name, tensor in {**found, **buffers}.items()}
    assert ranks.agree(mine) == mine, "the same on all ranks, buffers and adapters too"
    print(folder, "is the same, streamed" if is_streamed else "is the same")
ranks.leave()
"""


def on_ranks(folders: list[str], *, lora: bool = False, streams: bool = False) -> str:
    values = {"folders": folders, "lora": lora, "streams": streams, "output_dir": ""}
    case = Case("loading", RANKS, values, meeting=Meeting())
    processes = start_ranks([case], PROGRAM)
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(said)
    return said[0]


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which GPT-BigCode uses
def test_every_family_is_the_same_on_all_ranks(folders: Any) -> None:
    assert on_ranks([str(folders(family)) for family in DIVIDED]).count("is the same") == len(DIVIDED)


@pytest.mark.timeout(240)
def test_large_models_are_the_same_without_being_whole_anywhere(folders: Any) -> None:
    said = on_ranks([str(folders(family)) for family in [*STREAMED, "gemma4_text", "mixtral"]], streams=True)
    assert said.count("is the same, streamed") == len(STREAMED), said
    # The first layers of one are of other shapes than in the whole; experts of the other are in files of their own.
    assert said.count("is the same") == len(STREAMED) + 2, said


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_every_large_family_is_the_same(folders: Any) -> None:
    said = on_ranks([str(folders(family)) for family in DIVIDED], streams=True)
    assert said.count("is the same") == len(DIVIDED), said
    print([Path(line.split(" is the same")[0]).name for line in said.splitlines() if line.endswith("is the same")])


def test_adapters_begin_the_same_on_all_ranks(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", TinyConfig(), seed=1)
    assert "is the same" in on_ranks([str(tmp_path / "tiny")], lora=True)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_what_is_updated_starts_from_the_files_values(kind: str, tmp_path: Path) -> None:
    """As on several ranks, which load them in fp32, also where the model computes in less."""
    folder = tmp_path / "tiny"
    write_model(folder, TinyConfig(), seed=1)
    load_model(folder).to(getattr(torch, kind)).save_pretrained(folder)
    values = {name: one.detach().clone() for name, one in load_model(folder).named_parameters()}
    is_rounded = any(not torch.equal(value.bfloat16().float(), value) for value in values.values())
    assert is_rounded == (kind != "bfloat16")
    assert more_precise(folder, {torch.bfloat16}) == is_rounded

    model = load(folder, "bfloat16", ALONE)
    make_ready(model, filled(ComputationConfig, dtype="bfloat16"), None, folder, 0, ALONE)
    optimizer = Optimizer(model.named_parameters(), filled(OptimConfig), 9)
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(optimizer.master(weight), values[name]), name
        assert torch.equal(weight, values[name].bfloat16()), name
        assert not hasattr(weight, START), "memory that nobody needs any more"


def test_a_frozen_model_keeps_no_values_to_start_from(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_model(folder, TinyConfig(), seed=1)
    model = load(folder, "bfloat16", ALONE)
    make_ready(model, filled(ComputationConfig, dtype="bfloat16"), filled(LoraConfig, rank=2), folder, 0, ALONE)
    assert not [name for name, weight in model.named_parameters() if hasattr(weight, START)]
    # As a base model of adapters that are added later.
    model = load(folder, "bfloat16", ALONE)
    make_ready(model, filled(ComputationConfig, dtype="bfloat16"), None, folder, 0, ALONE, frozen=True)
    assert not [name for name, weight in model.named_parameters() if hasattr(weight, START)]


def test_the_shape_of_a_model_is_its_own(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", TinyConfig(), seed=1)
    shape, model = model_shape(tmp_path / "tiny"), load_model(tmp_path / "tiny")
    assert all(tensor.is_meta for tensor in shape.parameters())
    assert [(name, tensor.shape) for name, tensor in shape.named_parameters()] == [
        (name, tensor.shape) for name, tensor in model.named_parameters()
    ]


def refused(values: dict[str, Any]) -> list[str]:
    """By all ranks, with exit code 2; what each of them said."""
    case = Case("sft", RANKS, values, code=2)
    processes = start_ranks([case])
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(said)
    return said


@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts ranks")
@pytest.mark.parametrize("what", ["weights", "adapter"])
def test_what_the_leading_rank_finds_ends_all_of_them(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_model(folder, TinyConfig(), seed=1)
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    model: dict[str, Any] = {"path": str(folder)}
    if what == "weights":
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**described, "num_hidden_layers": 4, "layer_types": None}))
        message = "lacks tensors that its config.json asks for"
    else:
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        told = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}
        (adapter / "adapter_config.json").write_text(json.dumps(told))
        (adapter / "adapter_model.safetensors").write_bytes(b"no tensors")
        model["lora"] = {"adapter_path": str(adapter), "target_modules": ["q_proj"]}
        message = "adapter_model.safetensors"
    values = settings(tmp_path, output_dir=str(tmp_path / "run"), model=model, dist_timeout_s=60.0)
    for said in refused(values):
        assert message in said, said
