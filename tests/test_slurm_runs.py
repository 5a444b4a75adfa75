"""Runs on a real Slurm of two nodes on this host: a whole one in CI, and every fault in the long tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_helpers
import slurm_runs
from docs_pages import shown
from end_to_end import find, primerl, start, steps_of, until
from primerl.launch.slurm import jobs
from slurm_helpers import Cluster
from slurm_runs import (
    LIMIT_S,
    RUNS,
    WAIT_S,
    back_from_the_queue,
    job_of,
    left,
    left_of_job,
    one_listed,
    variable,
)

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(slurm_helpers.missing() is not None, reason=str(slurm_helpers.missing())),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_helpers.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _within(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with slurm_runs.within(slurm, tmp_path, monkeypatch):
        yield


def test_a_whole_run_over_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "outputs" / "small"
    _, _, *words = shown(__file__, "docs/slurm.md")[0]
    run = start(output, *words, "--keep-broadcasts")
    seen = []
    key_file = output / "run" / "key"
    until(lambda: key_file.is_file() or run.launcher.poll() is not None, WAIT_S, "the run's key")
    seen = left(tmp_path)
    printed = RUNS.has_finished(run, 2)
    job = job_of(output)
    assert f"submitted job {job} of 2 nodes" in printed
    assert f"job {job} is COMPLETED" in printed
    assert re.search(r"inference +node_1 ", printed)
    key = key_file.read_text().strip()
    assert seen
    assert not any(key in line for line in seen)
    assert key not in (output / "job.sbatch").read_text() + (output / "configs" / "job.toml").read_text()
    assert "orchestrator: n1: process" in (output / "logs" / "node_0.log").read_text()
    assert "inference: n2: process" in (output / "logs" / "node_1.log").read_text()
    [listed] = [one for one in json.loads(primerl("run", "list", "--json")) if one["output_dir"] == str(output)]
    assert (listed["status"], listed["job"], listed["step"]) == ("COMPLETED", str(job), 2)
    assert "resumed" not in primerl("run", "logs", listed["id"], "-c", "launcher")
    primerl("verify", str(output))
    assert slurm.run("squeue", "-h") == ""


@pytest.mark.long
def test_what_slurm_would_refuse_is_named_before(slurm: Cluster, tmp_path: Path) -> None:
    for key, value, said in [
        ("--slurm.partition", "gpu", "there is no partition 'gpu'; there are debug, left, right, urgent"),
        (
            "--deployment.num-infer-nodes",
            "7",
            "8 nodes are asked for (num_train_nodes + num_infer_nodes), and partition debug has 2",
        ),
        ("--slurm.time", "1-00:00:00", "slurm.time (1-00:00:00) is above the limit of partition debug (1:00:00)"),
        ("--slurm.template-path", "absent", "absent cannot be read"),
        ("--slurm.nodelist", "n7", "sbatch refuses the job of 2 nodes"),
        ("--deployment.gpus-per-node", "1", "sbatch refuses the job of 2 nodes"),
    ]:
        assert said in primerl("rl", "@", "rl.toml", "--output-dir", "o", key, value, code=2)
        assert slurm.run("squeue", "-h") == ""


@pytest.mark.long
def test_the_commands_of_the_page(slurm: Cluster, tmp_path: Path) -> None:
    _, dry, detached, *looking, scripted, cat = shown(__file__, "docs/slurm.md")
    assert "inference           node_1" in primerl(*dry[1:])
    assert not jobs.noted(tmp_path / "outputs" / "small")
    assert "nothing was submitted" in primerl(*scripted[1:])
    assert cat[0] == "cat"
    written = (tmp_path / cat[1]).read_text()
    assert "#SBATCH --partition=debug" in written
    assert "ulimit -c 0" in written.splitlines()
    run_id = primerl(*detached[1:]).split()[0]
    output = tmp_path / detached[detached.index("--output-dir") + 1]
    for words in looking:
        said = primerl(*(run_id if word == "3f9a1c2e" else word for word in words[1:]))
        if words[2] == "list":
            assert re.search(rf"{run_id} .* {job_of(output)}$", said, re.MULTILINE)
        elif words[2] == "stop":
            assert f"{run_id} is not running: it is COMPLETED at step 2" in said
    assert steps_of(output) == [1, 2]


@pytest.mark.long
def test_a_run_of_minutes_loses_nothing(slurm: Cluster, tmp_path: Path) -> None:
    RUNS.last_undisturbed(tmp_path / "o", 2000)


@pytest.mark.long
def test_each_role_is_killed(slurm: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o") as run:
        for name in ("trainer", "inference", "orchestrator", "env_reverse-text_0"):
            pid = until(lambda name=name: run.pid_of(name), WAIT_S, name)
            os.kill(pid, signal.SIGKILL)
            began = run.steps()
            until(lambda name=name, pid=pid: run.pid_of(name) not in (None, pid), WAIT_S, f"another {name}")
            until(lambda began=began: run.steps() > began + 3, WAIT_S, "more steps")
        printed = RUNS.has_finished(run)
    for name in ("trainer", "inference", "orchestrator", "env_reverse-text_0"):
        assert f"{name} was killed by SIGKILL" in printed


@pytest.mark.long
def test_an_agent_is_killed(slurm: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o") as run:
        engine = until(lambda: run.pid_of("inference"), WAIT_S, "the engine")
        agent = ancestor(engine, "agent.py")
        os.kill(agent, signal.SIGKILL)
        until(lambda: run.pid_of("inference") not in (None, engine), WAIT_S, "another engine")
        printed = RUNS.has_finished(run)
    assert "inference was lost on node n2" in printed


def ancestor(pid: int, word: str) -> int:
    while word not in Path(f"/proc/{pid}/cmdline").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
    return pid


@pytest.mark.long
def test_ranks_on_two_nodes_one_of_which_is_killed(slurm: Cluster, tmp_path: Path) -> None:
    nodes = ["--deployment.num-train-nodes", "2", "--deployment.num-infer-nodes", "0", "--trainer.ranks", "2"]
    with RUNS.running(tmp_path / "o", *nodes) as run:
        log = tmp_path / "o" / "logs" / "trainer" / "node_1.log"
        assert log.is_file()
        second = [pid for pid in ranks_of(run.output) if variable(pid, "RANK") == "1"]
        os.kill(second[0], signal.SIGKILL)
        printed = RUNS.has_finished(run)
    assert "trainer was killed by SIGKILL; it is started again" in printed


def ranks_of(output: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and f"{output}/configs/trainer.toml" in Path(f"/proc/{entry}/cmdline").read_text():
                found.append(int(entry))
    return [pid for pid in found if variable(pid, "RANK") is not None]


@pytest.mark.long
def test_the_time_limit_saves_a_checkpoint_and_the_job_resumes(slurm: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o", "--ckpt.interval", "1000") as run:
        job = job_of(run.output)
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        until(lambda: slurm.job(job)["JobState"] == "PENDING", WAIT_S, "the queue")
        assert (run.output / "checkpoints").is_dir()
        assert one_listed(job)["status"] in ("PENDING", "RUNNING")
        back_from_the_queue(slurm, job)
        printed = RUNS.has_finished(run)
    assert slurm.job(job)["Restarts"] == "1"
    assert "a checkpoint is saved after this step" in printed
    assert re.search(r"the job's time limit was near; the same command resumes from the checkpoint of step \d", printed)


@pytest.mark.long
def test_without_requeueing_the_time_limit_ends_the_job(slurm: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o", "--no-slurm.requeue") as run:
        job = job_of(run.output)
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        code, printed = run.ended(LIMIT_S)
    assert code == 130, printed
    assert slurm.is_over(job)
    assert one_listed(job)["status"] == "STOPPED"


@pytest.mark.long
@pytest.mark.parametrize("how", ["down", "slurmd"])
def test_a_node_that_is_lost(slurm: Cluster, tmp_path: Path, how: str) -> None:
    """Slurm puts the job back, as soon as it has noticed; it resumes on whatever nodes it gets."""
    with RUNS.running(tmp_path / "o", "--max-steps", "3000") as run:
        job = job_of(run.output)
        if how == "down":
            slurm.run("scontrol", "update", "node=n2", "state=down", "reason=test")
            until(lambda: slurm.job(job)["JobState"] == "PENDING", WAIT_S, "the queue")
        else:
            with slurm.impatient():
                slurm.kill("slurmd.n2")
                until(lambda: slurm.job(job)["JobState"] == "PENDING", WAIT_S, "the queue")
        before = run.steps()
        until(lambda: left_of_job(run.output) == [], WAIT_S, "the end of its processes")
        if how == "slurmd":  # another one comes back by itself (ReturnToService)
            slurm.start_node("n2")
        back_from_the_queue(slurm, job)
        until(lambda: run.steps() > before + 5, WAIT_S, "more steps")
        assert slurm.job(job)["Restarts"] == "1"
        run_id = one_listed(job)["id"]
        primerl("run", "stop", run_id)
        code, printed = run.ended(LIMIT_S)
        assert code != 0, printed
        found = steps_of(run.output)
        assert found == list(range(1, len(found) + 1))
        assert "every invariant holds" in primerl("trace", str(run.output), "--check")


@pytest.mark.long
@pytest.mark.parametrize("how", ["scancel", "launcher", "stop", "ctrl-c"])
def test_a_job_that_is_ended_leaves_nothing_and_can_be_resumed(slurm: Cluster, tmp_path: Path, how: str) -> None:
    with RUNS.running(tmp_path / "o", steps=12) as run:
        job = job_of(run.output)
        run_id = one_listed(job)["id"]
        if how == "scancel":
            slurm.run("scancel", str(job))
        elif how == "launcher":
            os.kill(until(lambda: find("rl", "configs/job.toml"), 30, "the launcher"), signal.SIGKILL)
        elif how == "stop":
            assert f"stopped job {job} of {run_id}" in primerl("run", "stop", run_id)
        else:
            run.launcher.send_signal(signal.SIGINT)
        code, printed = run.ended(LIMIT_S)
    assert code not in (0, 2), printed
    until(lambda: left(run.output) == [], WAIT_S, "the end of its processes")
    assert slurm.is_over(job)
    listed = one_listed(job)
    assert listed["status"] == ("FAILED" if how == "launcher" else "STOPPED"), listed
    primerl("run", "resume", run_id, "--max-steps", str(len(steps_of(run.output)) + 5))
    found = steps_of(run.output)
    assert found == list(range(1, len(found) + 1))
    assert "every invariant holds" in primerl("trace", str(run.output), "--check")


@pytest.mark.long
def test_a_detached_run_waits_runs_and_is_followed(slurm: Cluster, tmp_path: Path) -> None:
    slurm.run("scontrol", "update", "node=n2", "state=drain", "reason=test")
    try:
        run_id = primerl("run", "@", "rl.toml", "-d").split()[0]
        listed = json.loads(primerl("run", "list", "--json"))
        [found] = [one for one in listed if one["id"] == run_id]
        assert found["status"] == "PENDING"
        assert f"job {found['job']} uses it" in primerl("run", "resume", run_id, code=2)
        assert "output_dir" in primerl("rl", "@", "rl.toml", code=2)
    finally:
        slurm.run("scontrol", "update", "node=n2", "state=resume")
    primerl("run", "logs", run_id, "-f")
    assert steps_of(tmp_path / "outputs" / "small") == [1, 2]


@pytest.mark.long
def test_a_folder_that_nodes_do_not_share_is_named(slurm: Cluster, tmp_path: Path) -> None:
    """The job's script is on its first node; what another lacks is seen when a role starts there."""
    wrapped = tmp_path / "srun"
    # As if the second node had another /tmp: the witness of the launcher is not there.
    wrapped.write_text(
        '#!/bin/sh\nfor one; do [ "$one" = --nodelist=n2 ] && hide=1; done\n'
        f'if [ -n "${{hide:-}}" ]; then rm -f {tmp_path}/o/logs/.inference.*; fi\nexec /usr/bin/srun "$@"\n'
    )
    wrapped.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    run = start(tmp_path / "o", "@", "rl.toml", "--output-dir", str(tmp_path / "o"), variables={"PATH": path})
    code, printed = run.ended(LIMIT_S)
    assert code == 1
    assert "is not the same folder on node n2 as on the launcher's; give an output_dir that all nodes share" in printed
