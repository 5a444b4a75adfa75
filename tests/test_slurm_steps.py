"""Steps of a job without Slurm: the launcher's half, `srun` in the form of a script, and the agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end import until
from primerl.forking.exit_status import NOT_KNOWN
from primerl.launch.placement import alike
from primerl.launch.placement.protocol import Command, Process, Resources, Role
from primerl.launch.placement.slurm import agent, step
from primerl.launch.placement.slurm import placement as slurm_placement
from primerl.launch.placement.slurm.placement import SlurmPlacement
from primerl.launch.supervise import orchestrator
from primerl.launch.supervise.failures import RunFailedError
from primerl.run_key import VARIABLE

pytestmark = pytest.mark.processes
WAIT_S = 60
TRAINER = Role("trainer", "trainer", Resources(), 2)
ENGINE = Role("inference", "inference")
SLEEPS = "import signal; print('here', flush=True); signal.pause()"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmPlacement]:
    """Within a job of two nodes, with a trainer on both and an engine on the first."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = Path(__file__).with_name("fake_srun.py")
    for name, text in {
        "srun": f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n',
        "scancel": "#!/bin/sh\n",
        "scontrol": '#!/bin/sh\necho "JobId=9 JobState=${FAKE_STATE:-RUNNING} Reason=NodeDown ExitCode=0:0"\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, value)
    placement = SlurmPlacement(num_train_nodes=2)
    placement.plan([TRAINER, ENGINE])
    with placement:
        yield placement


def command(tmp_path: Path, name: str, source: str, **variables: str) -> Command:
    log = tmp_path / "logs" / f"{name}.log"
    return Command([sys.executable, "-c", source], {**os.environ, **variables}, log, frozenset(variables))


def ends(placement: SlurmPlacement, process: Process) -> None:
    until(lambda: process in placement.watch(0.1), WAIT_S, "its end")


def test_a_process_is_started_reports_and_ends(job: SlurmPlacement, tmp_path: Path) -> None:
    source = "import os; print(os.environ['MINE'], os.environ['SLURMD_NODENAME'], os.environ['PRIMERL_FORK_SERVER'])"
    process = job.start(ENGINE, command(tmp_path, "inference", f"{source}; raise SystemExit(3)", MINE="x"))
    ends(job, process)
    assert (process.code, process.lost, process.failure) == (3, None, None)
    assert process.cpu_s > 0
    assert process.pid is not None
    assert job.logs("inference").read_text() == "x n1 off\n"
    assert f"n1: process {process.pid} was started" in (tmp_path / "logs" / "node_0.log").read_text()
    assert [path.name for path in (tmp_path / "logs").iterdir() if path.name.startswith(".")] == []


def test_what_is_sent_is_in_no_process_list(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "the-runs-own-key")
    source = f"import os, signal; print(os.environ['{VARIABLE}'], flush=True); signal.pause()"
    process = job.start(ENGINE, command(tmp_path, "inference", source))
    until(
        lambda: job.watch(0.1) == [] and process.pid and process.log.is_file() and process.log.read_text(), WAIT_S, ""
    )
    assert process.log.read_text() == "the-runs-own-key\n"
    found = subprocess.run(["ps", "-e", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "fake_srun.py" in found
    assert "the-runs-own-key" not in found


def test_signals_reach_it_and_a_stop_ends_it(job: SlurmPlacement, tmp_path: Path) -> None:
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True)\n"
    process = job.start(ENGINE, command(tmp_path, "inference", source + "while True: signal.pause()"))
    until(lambda: job.watch(0.1) == [] and process.log.is_file() and process.log.read_text(), WAIT_S, "its output")
    job.signal("inference", signal.SIGUSR1)
    ends(job, process)
    assert process.code == -signal.SIGUSR1
    process = job.start(ENGINE, command(tmp_path, "inference", source + "while True: signal.pause()"))
    until(lambda: job.watch(0.1) == [] and process.log.read_text().count("here") == 2, WAIT_S, "its output")
    job.stop(grace_s=0.2, names=["inference"])
    assert process.code == -signal.SIGKILL
    job.stop(grace_s=0.2)
    refused = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    assert job.watch(0.0) == [refused]
    assert refused.describe_end() == "could not be started: the run is being stopped"


def test_an_agent_that_is_killed_takes_its_process_with_it(job: SlurmPlacement, tmp_path: Path) -> None:
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    until(lambda: job.watch(0.1) == [] and process.pid, WAIT_S, "its start")
    pid = process.pid
    assert pid is not None
    guard = parent(pid)
    os.kill(parent(guard), signal.SIGKILL)
    ends(job, process)
    assert process.code == NOT_KNOWN
    assert process.describe_end().startswith("was lost on node n1: srun ended with code ")
    until(lambda: not Path(f"/proc/{pid}").exists(), WAIT_S, "the end of the process")
    assert job.lost is None


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_that_falls_silent_loses_the_whole_role(job: SlurmPlacement, tmp_path: Path) -> None:
    """Its agent is stopped, as on a node that hangs; the other one still sends."""
    process = job.start(TRAINER, command(tmp_path, "trainer", SLEEPS))
    found = job._steps["trainer"]
    until(lambda: job.watch(0.1) == [] and found.is_started, WAIT_S, "its start")
    pids = {node: task.pid for node, task in found.tasks.items()}
    assert pids["n2"] is not None
    its_agent = parent(parent(pids["n2"]))
    os.kill(its_agent, signal.SIGSTOP)

    def ends_once_silent() -> bool:
        # What it has sent before is read first.
        found.tasks["n2"].heard -= step.SILENT_S
        return process in job.watch(0.1)

    try:
        until(ends_once_silent, WAIT_S, "its end")
    finally:
        os.kill(its_agent, signal.SIGCONT)
    assert process.code == NOT_KNOWN
    assert process.describe_end().startswith("was lost on node n2: its agent has sent nothing for ")
    for pid in pids.values():
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), WAIT_S, "the end of the processes")


def test_an_agent_hears_that_its_launcher_is_there(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the launcher's main thread waits for something else."""
    monkeypatch.setattr(agent, "ALIVE_S", 0.05)
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(step.Step, "send", lambda _step, message: sent.append(message))
    job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    until(lambda: sent.count({"alive": True}) > 1, WAIT_S, "two signs of life")


def test_an_agent_whose_launcher_is_silent_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node whose slurmd is gone: nothing closes its input there."""
    now = [0.0]
    monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agent, "Processes", object)  # none is started
    found = agent.Agent()
    now[0] = 1000.0  # in which the whole job was suspended
    assert not found.is_orphan()
    for _ in range(int(agent.ORPHAN_S / agent.ALIVE_S) - 1):
        now[0] += agent.ALIVE_S
        assert not found.is_orphan()
    now[0] += agent.ALIVE_S
    assert found.is_orphan()


def test_the_end_of_the_job_is_told(job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SRUN_FAILS", "Unable to confirm allocation for job 9")
    monkeypatch.setenv("FAKE_STATE", "PENDING")
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    ends(job, process)
    assert process.describe_end() == (
        "could not be started: on node n1: srun: error: Unable to confirm allocation for job 9"
    )
    assert job.lost == "Slurm has ended job 9: it is PENDING (NodeDown)"


def test_a_step_that_slurm_refuses_at_first_is_asked_for_again(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_placement, "AGAIN_S", 0.1)
    monkeypatch.setenv("FAKE_SRUN_FAILS", "Requested node configuration is not available")
    process = job.start(ENGINE, command(tmp_path, "inference", "raise SystemExit(4)"))
    until(lambda: job.watch(0.1) == [] and job._again, WAIT_S, "a refusal")
    assert not process.ended
    monkeypatch.delenv("FAKE_SRUN_FAILS")
    ends(job, process)
    assert process.code == 4
    assert "Requested node configuration is not available" in (tmp_path / "logs" / "node_0.log").read_text()
    monkeypatch.setenv("FAKE_SRUN_FAILS", "Invalid job")
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    ends(job, process)
    assert process.describe_end() == "could not be started: on node n1: srun: error: Invalid job"
    assert job._asked["inference"].tries == slurm_placement.TRIES


def test_a_step_that_is_never_created_is_named(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked for again: it would wait as long."""
    srun = tmp_path / "bin" / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: Job 9 step creation temporarily disabled, retrying' >&2\nexec sleep 600\n")
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    waiting = job._steps["inference"]
    until(lambda: job.watch(0.1) == [] and waiting.errors, WAIT_S, "what srun says")
    monkeypatch.setattr(step, "CREATED_S", 0.0)
    ends(job, process)
    assert process.describe_end().startswith("could not be started: on node n1: srun has waited ")
    assert process.describe_end().endswith("retrying")
    until(lambda: waiting.srun.poll() is not None, WAIT_S, "the end of srun")
    assert not job._again


def test_the_orchestrator_has_more_time_in_a_step(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    monkeypatch.setattr(orchestrator, "START_S", 600.0)
    monkeypatch.setattr(job, "start_s", 0.0)
    with pytest.raises(RunFailedError, match=r"orchestrator did not write \S+ within 0 s: it was not"):
        orchestrator.wait_for_orchestrator(job, job.by_name["inference"], tmp_path)


def test_without_srun_the_start_fails(job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    assert job.watch(0.0) == [process]
    assert "srun" in process.describe_end()


def test_a_node_with_another_version_is_named(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = alike.versions()
    monkeypatch.setattr(alike, "versions", lambda: {**own, "primerl": "0.0.1"})
    process = job.start(ENGINE, command(tmp_path, "inference", SLEEPS))
    ends(job, process)
    assert process.failure == f"node n1 has primerl {own['primerl']}, and the launcher's has 0.0.1; install the same"
    assert not process.log.exists()


def test_a_clock_that_is_far_off_is_named_once_for_each_node(
    job: SlurmPlacement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert alike.skew("node n1", 29) is None
    assert alike.skew("node n1", -29) is None
    assert "the clock of node n1 is 45 s ahead of this one's" in str(alike.skew("node n1", 45))
    assert "the clock of node n1 is 45 s behind this one's" in str(alike.skew("node n1", -45))
    said: list[str] = []
    job.say = said.append
    monkeypatch.setattr(alike, "MOST_SKEW_S", -1.0)
    for role in (TRAINER, ENGINE):
        ends(job, job.start(role, command(tmp_path, role.name, "pass")))
    assert sorted(text.partition(" is ")[0] for text in said) == ["the clock of node n1", "the clock of node n2"]


def test_parts_on_two_nodes_end_together(job: SlurmPlacement, tmp_path: Path) -> None:
    """The second fails, which ends the first, and its code is that of the role."""
    source = "import os, signal\nif os.environ['PRIMERL_NODE_RANK'] == '1': raise SystemExit(7)\nsignal.pause()"
    process = job.start(TRAINER, command(tmp_path, "trainer", source))
    ends(job, process)
    assert process.code == 7
    assert "trainer exited with code 7" in (tmp_path / "logs" / "node_1.log").read_text()


def test_ranks_are_told_where_the_first_node_is(job: SlurmPlacement, tmp_path: Path) -> None:
    source = "import os; print(os.environ['PRIMERL_NODE_RANK'], os.environ['PRIMERL_RENDEZVOUS'])"
    process = job.start(TRAINER, command(tmp_path, "trainer", source))
    ends(job, process)
    assert process.code == 0
    first, second = (tmp_path / "logs" / "trainer" / f"node_{index}.log" for index in (0, 1))
    (own, given), (other, same) = first.read_text().split(), second.read_text().split()
    assert (own, other, given) == ("0", "1", same)
    nodes, ranks, host, port, _, folder = given.split(";")
    assert (nodes, ranks, host, folder) == ("2", "1", "n1", str(tmp_path / "logs" / "trainer" / "torchrun"))
    assert int(port) > 0


def test_leaving_the_placement_leaves_no_process(job: SlurmPlacement, tmp_path: Path) -> None:
    process = job.start(TRAINER, command(tmp_path, "trainer", SLEEPS))
    until(lambda: job.watch(0.1) == [] and process.pid, WAIT_S, "its start")
    job.__exit__(RuntimeError, RuntimeError(), None)
    assert process.ended
    until(lambda: not Path(f"/proc/{process.pid}").exists(), WAIT_S, "the end of the process")


def test_a_role_that_was_not_planned_runs_next_to_the_launcher(job: SlurmPlacement, tmp_path: Path) -> None:
    process = job.start(Role("monitor", "monitor"), command(tmp_path, "monitor", "print('here')"))
    ends(job, process)
    assert process.code == 0
    assert job.by_name["monitor"] is process
