"""`primerl doctor`: what it says of machines that lack something."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterable
from pathlib import Path

import pytest
from primerl.cli import main
from primerl.doctor import folders, machine, network, packages
from primerl.doctor.finding import Finding
from primerl.launch.placement import gpus


def by_name(found: Iterable[Finding]) -> dict[str, Finding]:
    return {one.about: one for one in found}


def test_this_machine_can_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", str(tmp_path / "outputs")]) == 0
    shown = capsys.readouterr().out
    assert "output folder" in shown
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    found = {one["about"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["packages"]["level"] == "ok"
    assert "torch" in found["extra train"]["found"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("version", "bounds", "does"),
    [
        ("2.13.0+cu130", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.4.0", ">=0.4,<0.5", True),
        ("0.5.0.dev1", ">=0.4,<0.5", False),
        ("16", ">=16", True),
        ("5.19", ">=5.19.0,<6", True),
        ("1.0", "", True),
    ],
)
def test_versions_by_bounds(version: str, bounds: str, does: bool) -> None:
    assert packages.fits(version, bounds) == does


def test_packages_that_are_missing_or_of_another_version() -> None:
    requires = [
        "rich>=99",
        "torch>=2.11 ; extra == 'train'",
        "nowhere-to-be-found>=1 ; extra == 'train'",
        "nowhere-to-be-found>=1 ; extra == 'envs'",
        "nowhere-to-be-found>=1 ; sys_platform == 'linux' and extra == 'vllm'",
    ]
    found = by_name(packages.findings(requires))
    assert found["packages"].level == "problem"
    assert "(>=99 is needed)" in found["packages"].found
    assert (found["extra train"].level, found["extra train"].found) == ("problem", "nowhere-to-be-found not installed")
    assert found["extra envs"].level == "problem"
    assert found["extra vllm"].level == "ok"
    assert "pip install" in found["extra vllm"].advice


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    found = by_name(machine.findings())["open files"]
    assert (found.level, found.found) == ("note", "256 of a process, at most 1024")


def test_gpus_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: [gpus.Gpu("0"), gpus.Gpu("1")])
    monkeypatch.delenv(gpus.VARIABLE, raising=False)
    monkeypatch.setattr(machine, "torch_cuda", lambda: None)
    found = by_name(machine.findings())
    assert found["GPUs"].found == "2 (0, 1)"
    assert found["torch for GPUs"].level == "problem"
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    assert by_name(machine.findings())["torch for GPUs"].level == "ok"


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VARIABLE, "")
    found = by_name(machine.findings())["GPUs"]
    assert (found.level, found.found) == ("note", "none: CUDA_VISIBLE_DEVICES is ''")


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = by_name(folders.findings(tmp_path / "file" / "outputs"))["output folder"]
    assert found.level == "problem"
    assert "Not a directory" in found.found


def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIMERL_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    found = by_name(folders.findings(tmp_path))["state folder"]
    assert found.level == "note"
    assert "HOME is not set" in found.advice


def test_proxies_and_hubs_are_named_without_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("RANK", "3")
    found = by_name(network.findings(online=False))
    assert "HTTPS_PROXY set" in found["proxies"].found
    assert "with a token; not asked" in found["hub"].found
    assert "with a key; not asked" in found["W&B"].found
    assert "RANK set" in found["variables of ranks"].found
    assert not any("secret" in one.found + one.advice for one in found.values())


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(
    "address", ["http://me:secret@127.0.0.1:1/hub", "http://me:se@cret@127.0.0.1:1", "me:secret@h"]
)
def test_passwords_of_addresses_are_not_shown(address: str, online: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*network.PROXIES, *map(str.lower, network.PROXIES), *network.OFFLINE, "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_ENDPOINT", "WANDB_BASE_URL"):
        monkeypatch.setenv(name, address)
    found = by_name(network.findings(online=online))
    for about in ("hub", "W&B"):
        said = f"{found[about].found} {found[about].advice}"
        assert address.rpartition("@")[2] in said
        assert "cret" not in said


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*network.PROXIES, *map(str.lower, network.PROXIES), *network.OFFLINE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    found = by_name(network.findings(online=True))
    assert found["hub"].level == "note"
    assert "127.0.0.1:1 does not answer" in found["hub"].found
    assert found["W&B"].level == "ok"
