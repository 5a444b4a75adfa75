"""Runs that `ray job submit` starts, on a real Ray of two nodes on this host with its server for jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import ray_helpers
from docs_pages import shown
from end_to_end import primerl, steps_of, until
from ray_helpers import CPUS, HEAD, SECOND, Cluster
from run_helpers import write_run
from test_ray_runs import RAY, left

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(ray_helpers.no_jobs() is not None, reason=str(ray_helpers.no_jobs())),
]
WAIT_S = 240
OUTPUT = "/shared/small"
"""As the page has it."""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Jobs get what the head was started with: the commands of this environment, and this list of runs.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        with ray_helpers.cluster(takes_jobs=True) as cluster:
            yield cluster


@pytest.fixture(autouse=True)
def _within(ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder with `rl.toml`, from which jobs are submitted. Nothing may be left behind."""
    file = write_run(tmp_path)
    file.write_text(file.read_text() + RAY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.dashboard)
    with forks.own_servers():
        yield
        until(lambda: left(tmp_path / "shared") == [], WAIT_S, "the end of all processes")
        until(lambda: ray.free() == {HEAD: CPUS, SECOND: CPUS}, WAIT_S, "what was reserved")


def asked(*words: str, code: int = 0) -> str:
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run([str(program), *words[1:]], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_commands_of_the_page(ray: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "shared" / "small"
    submit, stop = shown(__file__, "docs/ray.md", {OUTPUT: str(output)})
    printed = asked(*submit)
    assert f"Ray has reserved {HEAD}: " in printed
    assert "succeeded" in printed
    assert steps_of(output) == [1, 2]
    assert "every invariant holds" in primerl("trace", str(output), "--check")
    assert "inference: process" in (output / "logs" / f"node_{SECOND}.log").read_text()
    key = "run/key"
    assert not (output / key).exists() or (output / key).stat().st_mode & 0o077 == 0
    # Another one, which is stopped while it trains.
    name = "stopped-" + output.parent.parent.name
    submit[submit.index(str(output))] = str(again := tmp_path / "shared" / "again")
    asked(*submit[:3], "--submission-id", name, "--no-wait", *submit[3:], "--max-steps", "4000")
    until(lambda: len(steps_of(again)) > 2, WAIT_S, "its first steps")
    assert left(again)
    asked(*(name if word.startswith("raysubmit") else word for word in stop))
    until(lambda: left(again) == [], 30, "the end of all processes")
    until(lambda: ray.free() == {HEAD: CPUS, SECOND: CPUS}, 30, "what was reserved")
    assert "was stopped" in asked("ray", "job", "status", name)
    more = ["--max-steps", str(len(steps_of(again)) + 3)]
    assert "resuming the run" in asked(*submit, *more)
    found = steps_of(again)
    assert found == list(range(1, len(found) + 1))
    assert "every invariant holds" in primerl("trace", str(again), "--check")


def test_an_output_folder_that_ray_would_delete_is_refused(ray: Cluster, tmp_path: Path) -> None:
    submit, _ = shown(__file__, "docs/ray.md", {OUTPUT: None, "--output-dir": None})
    printed = asked(*submit, code=1)
    assert re.search(r"output_dir \(.*\): \S+/outputs/small is in the folder that was uploaded for this job", printed)
    assert "Traceback" not in printed
