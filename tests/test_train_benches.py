"""The benches run, in small, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).resolve().parent.parent


def bench(
    name: str, *arguments: str, python_path: Path, options: tuple[str, ...] = (), codes: tuple[int, ...] = (0,)
) -> str:
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    command = [sys.executable, *options, str(REPOSITORY / "benches" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def with_what_they_need(*names: str) -> set[str]:
    """The packages, and those that they require here."""
    found, left = set[str](), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            required = map(Requirement, metadata.requires(name) or ())
            left += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link_packages(folder: Path, names: set[str]) -> None:
    """All that they have installed, and nothing else."""
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))


def test_trainer_bench_needs_only_the_python_of_the_trainer(tmp_path: Path) -> None:
    """Run on a copy that has nothing else: no other folder of the package, no packages but these."""
    for folder in ("train", "process"):
        source = REPOSITORY / "python" / "primerl" / folder
        shutil.copytree(source, tmp_path / "primerl" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    packages = with_what_they_need("torch", "transformers", "safetensors", "numpy")
    assert not packages & {"msgpack", "xxhash", "peft", "datasets"}
    link_packages(tmp_path, packages)
    output = bench(
        "trainer_gpu.py",
        *("--shape", "tiny", "--tokens", "512", "--steps", "2", "--warmup", "1", "--dtype", "float32"),
        *("--device", "cpu", "--activation-checkpointing", "selective"),
        python_path=tmp_path,
        options=("-S",),  # without the packages of this environment
    )
    for name in ("RL", "SFT"):
        found = re.search(rf"^{name}: (\d+) tokens/s, MFU unknown, peak memory ([\d.]+) GiB", output, re.MULTILINE)
        assert found, output
        assert int(found[1]) > 0


def test_memory_bench_holds_its_goal_in_small() -> None:
    output = bench(
        "logprob_memory.py",
        *("--tokens", "8192", "--vocabulary", "20000", "--device", "cpu", "--chunk-tokens", "32"),
        python_path=REPOSITORY / "python",
    )
    assert "ratio 1/" in output


def test_fine_tuning_bench_says_what_a_step_is_made_of() -> None:
    output = bench(
        "sft_throughput.py",
        *("--models", "tiny", "--alone", "--rounds", "4", "--clock", "cpu"),
        python_path=REPOSITORY / "python",
        codes=(0, 1),  # its goals are those of a quiet machine
    )
    assert re.search(r"by itself: a step takes [\d.]+ ms; beside forward, backward, optimizer: [\d.]+%", output), output
    assert re.search(r"wait for a batch: [\d.]+ ms in the median step", output), output
    for part in ("metrics", "save_ckpt", "wait_for_batch"):
        assert f"time/{part} " in output


@pytest.mark.long
def test_experts_compute_what_those_of_transformers_compute() -> None:
    shown = bench("experts.py", "--rounds", "1", python_path=REPOSITORY / "python")
    assert "answers and gradients are the same" in shown
    assert shown.count("x\n") == 8


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_run_learns_the_same_with_shared_prefixes() -> None:
    """Three steps of a run with the embedded engine, its batches trained both ways."""
    sizes = ("--letters", "100", "--steps", "3", "--taught", "30")
    shown = bench("shared_prefix_run.py", *sizes, python_path=REPOSITORY / "python")
    assert "the same within rounding: met" in shown
