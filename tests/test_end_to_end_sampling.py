"""Whole runs that are not sampled at temperature 1 from all tokens: what the trainer and `verify` make of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import arguments_of, column
from primerl.train.data.batch import _frame
from primerl.verify import verify
from train_helpers import encode_frame

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs"),
]
STEPS = 4
TRUNCATIONS = {
    "temperature": [],
    "top_p": ["--orchestrator.sampling.top-p", "0.8"],
    "all": [
        *("--orchestrator.sampling.top-p", "0.9"),
        *("--orchestrator.sampling.top-k", "8"),
        *("--orchestrator.sampling.min-p", "0.02"),
    ],
}
# Who renders the prompts does not matter to it.
RENDERED_BY_ENGINES = ["--orchestrator.client-type", "openai_chat_completions_token"]
RUNS = {**{name: (name, []) for name in TRUNCATIONS}, "rendered_by_engines": ("all", RENDERED_BY_ENGINES)}


@pytest.fixture(scope="module")
def model(imitator: Path) -> Path:
    return imitator


def without_truncations(run: Path, copy: Path) -> Path:
    """The same run, but for what its spool says of truncation."""
    copy.mkdir()
    for name in ("broadcasts", "weights"):
        (copy / name).symlink_to(run / name)
    shutil.copytree(run / "spool", copy / "spool")
    for path in (copy / "spool").glob("*/*.msgpack"):
        header, columns = _frame(bytearray(path.read_bytes()))
        assert all(micro_batch.pop("truncations", []) for micro_batch in header["micro_batches"])
        path.write_bytes(encode_frame(header, bytes(columns)))
    return copy


@pytest.mark.parametrize("name", RUNS)
def test_log_probabilities_are_of_what_was_sampled_from(model: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    name, client = RUNS[name]
    sampling = ["--orchestrator.sampling.temperature", "0.7"]
    if TRUNCATIONS[name]:
        sampling += ["--orchestrator.sampling.truncated", "replay", *TRUNCATIONS[name]]
    arguments = arguments_of(
        model,
        run,
        *("--max-steps", str(STEPS), "--orchestrator.max-async-level", "0", "--keep-broadcasts"),
        *("--orchestrator.eval.env", "[]"),
        *sampling,
        *client,
    )
    done = subprocess.run([sys.executable, "-m", "primerl", "rl", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The trainer's own: at async level 0 it has the weights that sampled.
    differences = column(run, "mismatch_abs_log_ratio/all/mean")
    assert len(differences) == STEPS
    assert max(differences) < 1e-6
    report = verify(run)
    assert report.passed
    assert report.mean_difference < 1e-6
    assert report.steps == STEPS
    assert report.truncated == (report.tokens if TRUNCATIONS[name] else 0)
    if TRUNCATIONS[name]:
        plain = verify(without_truncations(run, tmp_path / "copy"))
        assert not plain.passed
        assert plain.mean_difference > 100 * report.mean_difference
