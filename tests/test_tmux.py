"""`scripts/tmux.sh`, with a real tmux whose server is the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from docs_pages import shown

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tmux.sh"
PATIENCE_S = 30.0


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TMUX"}
    environment |= {"TMUX_TMPDIR": str(folder), "TERM": "xterm", **variables}
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (Debian: apt install tmux)")
def test_four_panes_show_the_logs(tmp_path: Path) -> None:
    output = tmp_path / "a run's $folder"
    logs = output / "logs"
    (logs / "envs/train/task").mkdir(parents=True)
    (output / "configs").mkdir()
    (logs / "trainer.log").write_text("the trainer speaks\n")
    (logs / "orchestrator.log").write_text("the orchestrator speaks\n")
    (logs / "inference.log").write_text("the engine speaks\n")
    try:
        meant = {"scripts/tmux.sh": str(SCRIPT), "primerl": "here", "outputs/reverse-text/rl": str(output)}
        [command] = shown(__file__, "docs/page.md", meant)
        started = run(command, tmp_path)
        assert started.returncode == 0, started.stderr
        assert "tmux attach -t here" in started.stdout
        # One that comes later is found.
        (logs / "envs/train/task/env_worker_0.log").write_text("the worker speaks\n")
        wanted = {
            "trainer": "the trainer speaks",
            "orchestrator": "the orchestrator speaks",
            "env workers": "the worker speaks",
            "inference": "the engine speaks",
        }
        panes = run(["tmux", "list-panes", "-t", "here", "-F", "#{pane_id} #{pane_title}"], tmp_path).stdout
        ids = dict(reversed(line.split(" ", 1)) for line in panes.splitlines())
        assert set(ids) == set(wanted)
        deadline = time.monotonic() + PATIENCE_S
        for title, text in wanted.items():
            while text not in (pane := run(["tmux", "capture-pane", "-p", "-t", ids[title]], tmp_path).stdout):
                assert time.monotonic() < deadline, f"{title}: {pane}"
                time.sleep(0.1)
        again = run(command, tmp_path)
        assert "is there already" in again.stdout
    finally:
        run(["tmux", "kill-server"], tmp_path)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (Debian: apt install tmux)")
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    """With the session and the folder as the published guide gives them."""
    output = tmp_path / "later"
    try:
        started = run([str(SCRIPT), "soon", str(output)], tmp_path)
        assert started.returncode == 0, started.stderr
        assert f"there is no run in {output} yet (no {output}/configs)" in started.stdout
        assert not output.exists()
        (output / "logs").mkdir(parents=True)
        (output / "logs/trainer.log").write_text("the trainer speaks\n")
        deadline = time.monotonic() + PATIENCE_S
        while "the trainer speaks" not in (
            pane := run(["tmux", "capture-pane", "-p", "-t", "=soon:.{top-left}"], tmp_path).stdout
        ):
            assert time.monotonic() < deadline, pane
            time.sleep(0.1)
    finally:
        run(["tmux", "kill-server"], tmp_path)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    too_many = (["here", "outputs", "more"], "unknown argument more")
    for arguments, word in (
        too_many,
        (["-x"], "unknown option -x"),
        (["-s"], "-s needs a value"),
        (["-s", "a.b"], "'.' or ':'"),
    ):
        done = run([str(SCRIPT), *arguments], tmp_path)
        assert done.returncode == 2
        assert word in done.stderr
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").symlink_to(bash)
    without = run([bash, str(SCRIPT), "-o", "there"], tmp_path, PATH=str(tmp_path / "bin"))
    assert without.returncode == 2
    assert "tmux is not installed" in without.stderr
