"""The benches run, in small, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def bench(name: str, *arguments: str, python_path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    command = [sys.executable, str(REPOSITORY / "benches" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trainer_bench_needs_only_the_python_of_the_trainer(tmp_path: Path) -> None:
    """Run on a copy that has nothing else: no extension, no orchestrator, no config library."""
    package = tmp_path / "primerl"
    source = REPOSITORY / "python" / "primerl"
    shutil.copytree(source / "train", package / "train", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(source / "models", package / "models", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "by_path.py", "startup.py", "run_key.py", "exposition.py"):
        shutil.copy(source / file, package / file)
    output = bench(
        "trainer_gpu.py",
        *("--shape", "tiny", "--tokens", "512", "--steps", "2", "--warmup", "1", "--dtype", "float32"),
        *("--device", "cpu", "--activation-checkpointing", "selective"),
        python_path=tmp_path,
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
