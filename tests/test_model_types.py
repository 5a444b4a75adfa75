"""One answer everywhere: `primerl run models`, the dry run and the trainer say the same of layers with a state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WITH_STATE
from primerl.cli import main
from primerl.launch.preflight import model_folder
from primerl.runs.memory import Machine
from primerl.runs.models import look
from primerl.train.model import families, support
from primerl.train.model.packed_model import load_model
from primerl.train.model.proof import prove
from primerl.train.model.recurrent import slower_kernels
from settings_helpers import run_sft
from sft_helpers import settings, write_rows

LARGE = Machine(10**12, "this machine")
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4}


def dry_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    """Exit code, and what is printed."""
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    arguments = ["--model.path", str(folder), "--data.path", str(tmp_path / "rows.jsonl"), "--data.seq-len", "64"]
    code = main(["sft", *arguments, *flags, "--max-steps", "1", "--output-dir", str(tmp_path / "dry"), "--dry-run"])
    output = capsys.readouterr()
    return code, output.out + output.err


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_what_is_trained_is_trainable_before_the_start(
    family: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prove(load_model(folders(family)))
    assert look(folders(family), LARGE).trainable
    code, said = dry_run(folders(family), tmp_path, capsys)
    assert code == 0, said


@pytest.mark.parametrize(
    ("family", "changes"),
    [("jamba", JAMBA), ("minimax", {"layer_types": ["linear_attention", "full_attention"]})],
)
@pytest.mark.usefixtures("own_logging")
@pytest.mark.filterwarnings("ignore")  # of models that are not trained
def test_what_is_refused_is_refused_with_one_sentence(
    family: str, changes: dict[str, Any], folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders(family, **changes)
    reason = support.training_refusal({"model_type": family})
    assert reason is not None
    told = look(folder, LARGE)
    assert (told.trainable, told.reason) == (False, reason)
    code, said = dry_run(folder, tmp_path, capsys)
    assert code == 2
    assert f": {reason}" in said
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, model={"path": str(folder)}, max_steps=1)) == 2
    output = capsys.readouterr()
    assert reason in output.out + output.err


@pytest.mark.parametrize(("family", "package"), [("qwen3_5_text", "flash-linear-attention"), ("bamba", "mamba-ssm")])
def test_a_package_that_a_gpu_is_slower_without_is_named_before_the_start(
    family: str,
    package: str,
    folders: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model_folder, "has_cuda", lambda: True)
    told = look(folders(family), LARGE)
    assert told.trainable
    assert f"on a GPU, which is slower: {package} is missing" in told.reason
    code, said = dry_run(folders(family), tmp_path, capsys)
    assert code == 0, said
    assert f"pip install {package}" in said
    # Not used there, whatever is installed.
    assert package not in dry_run(folders(family), tmp_path, capsys, "--dtype", "float32")[1]


def test_the_packages_are_those_that_the_trainer_asks_for(folders: Any) -> None:
    for family in sorted(WITH_STATE):
        known = families.GPU_PACKAGES.get(family)
        model, gpu = load_model(folders(family)), torch.device("cuda")
        found = slower_kernels(model, gpu, torch.bfloat16)
        assert [f"slower: {known[0]} is missing" in why for why in found if known] == [True] * bool(known), family
        assert bool(found) is bool(known), family


def test_a_package_is_asked_for_by_layers_that_it_computes(tmp_path: Path) -> None:
    """Also in a model that reads images too; not where every layer is attention."""
    whole = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    attention = {"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]}
    mamba = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}
    found = [support.slower_on_gpu(json.loads(json.dumps(one))) for one in (whole, attention, mamba)]
    assert [told is not None for told in found] == [True, False, True]
