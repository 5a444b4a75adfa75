"""Runs of several trainer processes on this machine's CPU, as `torchrun` would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import settings_helpers
from primerl.train.settings import TrainerConfig
from primerl.train.sft_settings import SFTConfig
from safetensors.torch import load_file
from torch.distributed import TCPStore

MAIN = """
import json, os, shutil, sys
from importlib import import_module
from primerl.train.settings import TrainerConfig
from primerl.train.sft_settings import SFTConfig
from primerl.process.setting_checks import from_mapping
KINDS = {"rl": TrainerConfig, "sft": SFTConfig}
rank = int(os.environ["RANK"])
for case in json.load(sys.stdin):
    if rank >= case["ranks"]:
        continue
    os.environ |= {"WORLD_SIZE": str(case["ranks"])} | case["places"]
    if case["copied_from"] and rank == 0:
        # The others wait for this one to begin.
        shutil.copytree(case["copied_from"], case["values"]["output_dir"])
    config = from_mapping(KINDS[case["kind"]], case["values"])
    code = import_module("primerl.train.loop." + case["kind"]).main(config)
    if code != case["code"]:
        sys.exit(f"rank {rank} of {case['values']}: {code}")
"""


class Meeting:
    """Where the ranks of one run find each other: a store of this process, as `torchrun` has one. That port is taken
    from the start; one that is chosen for rank 0 to listen on may be another's by then."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@dataclass(frozen=True)
class Case:
    """One run. `kind`: sft or rl; another for a program of the test's own, which gets its values as they are."""

    kind: str
    ranks: int
    values: dict[str, Any]
    copied_from: str = ""
    """A folder that becomes its `output_dir` first."""
    code: int = 0
    """Exit code that all ranks end with."""
    meeting: Meeting = field(default_factory=lambda: Meeting())

    def __post_init__(self) -> None:
        self.values["ranks"] = self.ranks

    @property
    def output(self) -> Path:
        return Path(self.values["output_dir"])

    def told(self) -> dict[str, Any]:
        kind = {"rl": TrainerConfig, "sft": SFTConfig}.get(self.kind)
        values = self.values if kind is None else settings_helpers.values(kind, self.values)
        given = {"kind": self.kind, "ranks": self.ranks, "values": values, "places": self.meeting.environment}
        return given | {"copied_from": self.copied_from, "code": self.code}


def start_ranks(cases: list[Case], program: str = MAIN) -> list[subprocess.Popen[str]]:
    """As many processes as the largest case has ranks; each imports torch once."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    processes = []
    for rank in range(max(case.ranks for case in cases)):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps([case.told() for case in cases]))
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    return processes


def run_cases(cases: list[Case], program: str = MAIN) -> str:
    """One after the other, to their ends; returns what was said."""
    processes = start_ranks(cases, program)
    said = []
    try:
        for process in processes:
            if process.wait(timeout=240):
                break
    finally:
        for process in processes:
            process.kill()
            said.append(process.communicate()[0])
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return "\n".join(said)


def load_shards(folder: Path) -> dict[str, Any]:
    """All tensors of a folder's safetensors files; each is in one of them."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def saved_tensors(checkpoint: Path) -> set[str]:
    """Names of the tensors in a checkpoint, without the states of random numbers."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(checkpoint / "trainer").read_metadata().state_dict_metadata
    tensors = {name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return {name for name in tensors if not name.startswith("random.")}
