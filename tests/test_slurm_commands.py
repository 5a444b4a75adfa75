"""Other runs on a real Slurm of two nodes on this host: fine-tunings, evaluations, engines alone, other partitions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_helpers
import slurm_runs
from cluster_commands import (
    ENGINES,
    FINE_TUNING,
    TINKER,
    TINKER_KEY,
    a_client_trains_and_samples,
    a_port_that_is_taken_is_named,
    an_engine_is_killed_and_comes_back,
    running,
    tinker_address,
    write_rows,
)
from end_to_end import primerl, steps_of, until
from run_helpers import write_run
from slurm_helpers import Cluster
from slurm_runs import LIMIT_S, RUNS, WAIT_S, back_from_the_queue, job_of, left_of_job, one_listed
from tinker_calls import Client

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.long,
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


def test_a_fine_tuning_on_two_nodes_resumes_after_its_time_limit(slurm: Cluster, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "sft.toml").write_text(f"{FINE_TUNING}[slurm]\nexclusive = false\n")
    with running(tmp_path / "o", "sft", "@", "sft.toml") as run:
        until(lambda: run.steps() >= 5, WAIT_S, "its first steps")
        job = job_of(run.output)
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        back_from_the_queue(slurm, job)
        code, printed = run.ended(LIMIT_S)
    assert code == 0, printed
    assert steps_of(run.output) == list(range(1, 61))
    assert slurm.job(job)["Restarts"] == "1"
    assert (run.output / "logs" / "sft" / "node_1.log").is_file()


def test_an_evaluation_over_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    nodes = ["--deployment.num-infer-nodes", "1", "--no-slurm.exclusive", "--output-dir", "e"]
    printed = primerl("eval", "reverse-text", "-m", "tiny", "-n", "4", "--max-tokens", "16", "--seq-len", "128", *nodes)
    assert "4 rollouts are in" in printed
    assert "inference: n2: process" in (tmp_path / "e" / "logs" / "node_1.log").read_text()


def test_engines_on_two_nodes_serve_until_they_are_stopped(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "inference.toml").write_text(f"{ENGINES}[slurm]\nexclusive = false\n")
    with running(tmp_path / "i", "inference", "@", "inference.toml") as run:
        an_engine_is_killed_and_comes_back(run, "inference_1", WAIT_S)
        job = job_of(run.output)
        assert (listed := one_listed(job))["kind"] == "inference"
        assert listed["status"] == "RUNNING"
        assert "inference_0: n1: process" in (run.output / "logs" / "node_0.log").read_text()
        assert "inference_1: n2: process" in (run.output / "logs" / "node_1.log").read_text()
        assert f"stopped job {job}" in primerl("run", "stop", listed["id"])
        code, printed = run.ended(LIMIT_S)
    assert code == 130, printed
    assert "inference_1 was killed by SIGKILL; it is started again" in printed
    assert not (run.output / "engines.json").exists()
    assert one_listed(job)["status"] == "STOPPED"


def test_a_tinker_server_with_engines_on_another_node(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    (tmp_path / "serve.toml").write_text(f"{TINKER}[slurm]\nexclusive = false\n")
    command = ["serve", "--tinker", "@", "serve.toml"]
    assert "TINKER_API_KEY is not set; set it where the job is submitted" in primerl(*command, code=2)
    monkeypatch.setenv("TINKER_API_KEY", TINKER_KEY)
    assert "slurm.export (NONE) does not hand on" in primerl(*command, "--slurm.export", "NONE", code=2)
    assert "nothing was submitted" in primerl(*command, "--output-dir", "dry", "--dry-run")
    script = Path("dry/job.sbatch").read_text()
    assert "-m primerl serve --tinker @ " in script
    assert TINKER_KEY not in script
    with running(tmp_path / "t", *command) as run:
        url = a_client_trains_and_samples(run, WAIT_S)
        job = job_of(run.output)
        assert (listed := one_listed(job))["kind"] == "serve"
        assert listed["status"] == "RUNNING"
        assert f"ready: TINKER_BASE_URL={url}" in primerl("run", "logs", listed["id"], "-c", "server")
        assert "engine_1: n2: process" in (run.output / "logs" / "node_1.log").read_text()
        assert f"stopped job {job}" in primerl("run", "stop", listed["id"])
        code, printed = run.ended(LIMIT_S)
    assert code == 0, printed
    assert "engine_1 was killed by SIGKILL; it is started again" in printed
    assert one_listed(job)["status"] == "STOPPED"
    assert list((run.output / "states").glob("*/sampler_weights/one"))


def test_a_tinker_server_is_back_after_its_jobs_time_limit(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", TINKER_KEY)
    (tmp_path / "serve.toml").write_text(f"{TINKER}[slurm]\nexclusive = false\n")
    with running(tmp_path / "t", "serve", "--tinker", "@", "serve.toml") as run:
        client = Client(tinker_address(run, WAIT_S), "tiny", TINKER_KEY)
        model = client.trained_model()
        client.step(model)
        saved = client.called("save_weights", model, path="one")["path"]
        expected = [client.step(model)[0] for _ in range(2)]
        job = job_of(run.output)
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        back_from_the_queue(slurm, job)
        client = Client(tinker_address(run, WAIT_S, start=2), "tiny", TINKER_KEY)
        loaded = client.trained_model(path=saved, optimizer=True)
        assert [client.step(loaded)[0] for _ in range(2)] == pytest.approx(expected, abs=1e-6)
        assert f"stopped job {job}" in primerl("run", "stop", one_listed(job)["id"])
        code, printed = run.ended(LIMIT_S)
    assert code == 0, printed
    assert "stopping: the job's time limit was near" in printed


HETEROGENEOUS = """
[deployment]
num_infer_nodes = 1
[slurm]
exclusive = false
partition = "left"
[slurm.infer]
partition = "right"
"""


def test_engines_on_nodes_of_another_partition(slurm: Cluster, tmp_path: Path) -> None:
    """A heterogeneous job, which is put back once, as at its time limit."""
    file = write_run(tmp_path)
    file.write_text(file.read_text() + HETEROGENEOUS)
    output = tmp_path / "o"
    assert "nothing was submitted" in primerl("rl", "@", "rl.toml", "--output-dir", "dry", "--dry-run")
    assert "#SBATCH hetjob\n#SBATCH --job-name=primerl\n#SBATCH --partition=right" in Path("dry/job.sbatch").read_text()
    said = primerl("rl", "@", "rl.toml", "--output-dir", "o", "--slurm.infer.partition", "rihgt", code=2)
    assert "slurm.infer.partition" in said
    assert "there is no partition 'rihgt'" in said
    with RUNS.running(output) as run:
        job = job_of(output)
        assert slurm.job(job)["HetJobIdSet"] == f"{job}-{job + 1}"
        assert one_listed(job)["status"] == "RUNNING"
        engine = until(lambda: run.pid_of("inference"), WAIT_S, "the engine")
        os.kill(engine, signal.SIGKILL)
        until(lambda: run.pid_of("inference") not in (None, engine), WAIT_S, "another engine")
        slurm.run("scancel", "--batch", "--signal=USR1", str(job))
        back_from_the_queue(slurm, job)
        printed = RUNS.has_finished(run)
    assert "inference was killed by SIGKILL" in printed
    assert f"job {job} is RUNNING on n1,n2" in printed
    assert "trainer: n1: process" in (output / "logs" / "node_0.log").read_text()
    assert "inference: n2: process" in (output / "logs" / "node_1.log").read_text()


def test_a_job_that_a_more_urgent_one_preempts_resumes(slurm: Cluster, tmp_path: Path) -> None:
    with RUNS.running(tmp_path / "o", "--max-steps", "3000") as run:
        job = job_of(run.output)
        other = ["--parsable", "-p", "urgent", "-N2", "--output=/dev/null", "--wrap", "sleep 600"]
        urgent = int(slurm.run("sbatch", *other))
        until(lambda: slurm.job(urgent)["JobState"] == "RUNNING", WAIT_S, "the urgent job")
        assert slurm.job(job)["JobState"] == "PENDING"
        until(lambda: left_of_job(run.output) == [], WAIT_S, "the end of its processes")
        assert one_listed(job)["status"] == "PENDING"
        before = run.steps()
        slurm.run("scancel", str(urgent))
        back_from_the_queue(slurm, job)
        until(lambda: run.steps() > before + 5, WAIT_S, "more steps")
        primerl("run", "stop", one_listed(job)["id"])
        code, printed = run.ended(LIMIT_S)
    assert code != 0, printed
    assert slurm.job(job)["Restarts"] == "1"
    found = steps_of(run.output)
    assert found == list(range(1, len(found) + 1))
    assert "every invariant holds" in primerl("trace", str(run.output), "--check")


def test_a_port_that_is_taken_on_another_node_is_named(slurm: Cluster, tmp_path: Path) -> None:
    a_port_that_is_taken_is_named(tmp_path, LIMIT_S)
    assert slurm.run("squeue", "-h") == ""
