"""`primerl rl @ FILE --plan`: who would be where, in how much memory, and what to change where that does not fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import recorded_gpus
from primerl.cli import main
from primerl.launch.placement import sharing
from run_helpers import CONFIG, config_of
from slurm_helpers import free_ports

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
LONG = ["--seq-len", "16384", "--inference.max-model-len", "4096"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    (tmp_path / "rl.toml").write_text(CONFIG)
    return tmp_path / "rl.toml"


def plan(file: Path, *flags: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["rl", "@", str(file), "--plan", *flags]) == code, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.err if code == 2 else printed.out


def told(file: Path, *flags: str, code: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(file, "--json", *flags, code=code, capsys=capsys))
    return found


def test_the_plan_is_a_table_and_writes_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use("8xH100", monkeypatch)
    flags = ["--trainer.ranks", "4", "--inference.replicas", "2", "--inference.device", "cuda", "--orchestrator.port"]
    (port,) = free_ports(1)
    lines = plan(file, *flags, str(port), code=0, capsys=capsys).splitlines()
    assert lines[0].split("  ")[1:2] == ["process"]
    cells = [[cell.strip() for cell in re.split(r"\s{2,}", line.strip())] for line in lines[1:]]
    assert [row[:5] for row in cells] == [
        ["trainer", "this machine", "GPU 0, 1, 2, 3", "4", "-"],
        ["orchestrator", "this machine", "-", "1", f"127.0.0.1:{port}"],
        ["inference_0", "this machine", "GPU 4", "1", "127.0.0.1:any"],
        ["inference_1", "this machine", "GPU 5", "1", "127.0.0.1:any"],
        ["env_reverse-text_0", "this machine", "-", "1", "-"],
    ]
    assert re.match(r"\d+\.\d GB: weights 4\.02 GB, gradients 4\.02 GB, optimizer 8\.04 GB, activations", cells[0][5])
    assert not (file.parent / "outputs").exists()


@pytest.mark.parametrize(
    ("machine", "flags"),
    [
        ("8xH100", [*LONG]),
        ("8xH100", ["--trainer.ranks", "2", "--seq-len", "32768"]),
        ("1xH100", [*LONG, "--inference.device", "cuda"]),
    ],
)
def test_each_change_that_is_named_makes_it_fit(
    machine: str, flags: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use(machine, monkeypatch)
    found = told(file, *flags, code=1, capsys=capsys)
    of_trainer = [one for one in found["problems"] if one["processes"] == ["trainer"]]
    changes = [change for one in of_trainer for change in one["changes"]]
    assert changes
    assert not found["fits"]
    for change in changes:
        more: list[str] = []
        for key, value in re.findall(r"([a-z_.]+) = (\S+)", change.replace(" (", " ")):
            more += [f"--{key.replace('_', '-')}", *shlex.split(value.strip(","))]
        more += ["--trainer.model.lora"] if "[trainer.model.lora]" in change else []
        assert more, change
        if machine == "1xH100" and "trainer.ranks" in change:
            continue
        again = told(file, *flags, *more, code=main_code(file, flags, more, capsys), capsys=capsys)
        assert not [one for one in again["problems"] if one["processes"] == ["trainer"]], change


def main_code(file: Path, flags: list[str], more: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    code = main(["rl", "@", str(file), "--plan", "--json", *flags, *more])
    capsys.readouterr()
    return code


def test_engines_and_trainer_share_gpus_when_they_are_asked_to(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use("8xH100", monkeypatch)
    flags = ["--trainer.ranks", "2", "--inference.replicas", "4", "--inference.device", "cuda"]
    found = told(file, *flags, "--deployment.engine-share", "0.5", code=0, capsys=capsys)
    where = {row["process"]: (row["devices"], row["share"]) for row in found["processes"] if row["parts"]}
    assert where == {
        "trainer": (["0", "1"], 0.5),
        "inference_0": (["0"], 0.25),
        "inference_1": (["1"], 0.25),
        "inference_2": (["0"], 0.25),
        "inference_3": (["1"], 0.25),
    }
    assert "GPU 0, 1, 50% of it" in plan(file, *flags, "--deployment.engine-share=0.5", code=0, capsys=capsys)


def test_a_single_gpu_is_shared_and_that_is_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use("1xH100", monkeypatch)
    said = plan(file, "--inference.device", "cuda", "--trainer.model.lora", code=0, capsys=capsys).splitlines()
    assert said[0].startswith("this machine has one GPU, so the trainer and the engines share it: engines get 40%")
    assert "GPU 0, 60% of it" in said[2]
    # An engine on the CPU, as by default, leaves the GPU to the trainer.
    assert sharing.applied(config_of()) == (config_of(), None)
    recorded_gpus.use("8xH100", monkeypatch)
    given = config_of(inference={"device": "cuda"})
    assert sharing.applied(given) == (given, None)


def test_a_plan_that_is_impossible_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use("MIG", monkeypatch)
    said = plan(file, "--trainer.ranks", "2", code=2, capsys=capsys)
    assert "this machine has divided ones (MIG)" in said
    assert "trainer.ranks = 1" in said
    recorded_gpus.use("1xH100", monkeypatch)
    assert "1, so that trainer would have none" in plan(file, "--trainer.ranks", "2", code=2, capsys=capsys)


def test_main_memory_counts_where_there_is_no_gpu(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_gpus.use("no driver", monkeypatch)
    monkeypatch.setattr("primerl.runs.memory.main_memory", lambda: 30 * 10**9)
    found = told(file, code=1, capsys=capsys)
    assert [one["device"] for one in found["problems"]] == ["memory"]
    assert found["problems"][0]["changes"][0].startswith("[trainer.model.lora], which trains an adapter")
    monkeypatch.setattr("primerl.runs.memory.main_memory", lambda: 10**12)
    assert told(file, code=0, capsys=capsys)["fits"]
    (file.parent / "tiny" / "config.json").write_text('{"model_type": "qwen3"}')
    assert "memory is not known: the model's config.json lacks" in plan(file, code=0, capsys=capsys)
