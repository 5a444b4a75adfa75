"""Slurm without Slurm: lists of nodes, the plan of a job, its script, what `scontrol` says, and refusals."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest
from primerl import run_key
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.deployment import Deployment, Slurm, SlurmInferNodes
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig
from primerl.launch import cluster
from primerl.launch.placement import gpus, registry, sharing
from primerl.launch.placement.node_logs import log_files
from primerl.launch.placement.protocol import Command, PlacementError, Resources, Role
from primerl.launch.placement.slurm import agent, allocation, hostlist, planning, step
from primerl.launch.placement.slurm.allocation import Allocation, Shape
from primerl.launch.placement.slurm.placement import SlurmPlacement
from primerl.launch.preflight import output_folder
from primerl.launch.slurm import follow, jobs, script, submission, within
from primerl.process import signals
from primerl.runs.registry import Registry
from primerl.runs.standing import standing
from pydantic import ValidationError
from run_helpers import CONFIG, begin, config_of, told

NODES = ("a1", "a2", "a3", "a4")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3],login", ["n1", "n2", "n3", "login"]),
        ("gpu[08-10,12]", ["gpu08", "gpu09", "gpu10", "gpu12"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[1,3]-ib,m", ["n1-ib", "n3-ib", "m"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert hostlist.expanded(text) == names


@pytest.mark.parametrize("text", ["", "n[1-3", "n[a]", "n]1[", "a,,b", "n[1-9999999]", "n[1-2]]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ValueError, match=r"no list of nodes|names more than"):
        hostlist.expanded(text)


def roles(ranks: int = 1, engines: int = 1, gpus: int = 1, workers: int = 1) -> list[Role]:
    found = [Role("trainer", "trainer", Resources(gpus=ranks), ranks), Role("orchestrator", "orchestrator")]
    names = ["inference"] if engines == 1 else [f"inference_{index}" for index in range(engines)]
    found += [Role(name, "inference", Resources(gpus=gpus)) for name in names]
    return found + [Role(f"env_a_{index}", "env-worker") for index in range(workers)]


def slots(shape: Shape, asked: list[Role], nodes: tuple[str, ...] = NODES) -> dict[str, tuple[Any, ...]]:
    _, found = planning.placed(asked, Allocation("7", nodes[: shape.nodes]), shape)
    return {name: (" ".join(slot.nodes), *slot.gpus) for name, slot in found.items()}


def test_one_node_has_everything_and_each_role_its_own_gpus() -> None:
    assert slots(Shape(1, 0, 4), roles(2, 2, 1)) == {
        "trainer": ("a1", 0, 1),
        "orchestrator": ("a1",),
        "inference_0": ("a1", 2),
        "inference_1": ("a1", 3),
        "env_a_0": ("a1",),
    }


def test_ranks_and_engines_on_nodes_of_their_own() -> None:
    assert slots(Shape(2, 2, 4), roles(8, 4, 2, workers=5)) == {
        "trainer": ("a1 a2", 0, 1, 2, 3),
        "orchestrator": ("a1",),
        "inference_0": ("a3", 0, 1),
        "inference_1": ("a4", 0, 1),
        "inference_2": ("a3", 2, 3),
        "inference_3": ("a4", 2, 3),
        **{f"env_a_{index}": (node,) for index, node in enumerate([*NODES, "a1"])},
    }


def test_without_gpus_engines_take_turns() -> None:
    found = slots(Shape(1, 2, 0), roles(1, 3))
    assert [found[f"inference_{index}"] for index in range(3)] == [("a2",), ("a3",), ("a2",)]


@pytest.mark.parametrize(
    ("shape", "asked", "said"),
    [
        (Shape(2, 0, 0), roles(3), r"trainer\.ranks \(3\) is no multiple of deployment\.num_train_nodes \(2\)"),
        (Shape(1, 0, 2), roles(2, 1), "inference would have no GPUs: 2 on each of 1 nodes"),
        (Shape(1, 1, 4), roles(8, 1), "trainer would have no GPUs"),
        (Shape(1, 1, 4), roles(4, 1, gpus=8), "inference needs 8 GPUs, more than deployment.gpus_per_node .4."),
    ],
)
def test_a_plan_that_cannot_be_is_refused_and_shown(shape: Shape, asked: list[Role], said: str) -> None:
    with pytest.raises(PlacementError, match=said) as refused:
        slots(shape, asked)
    assert "The plan:\n  trainer" in str(refused.value)


def test_a_job_with_too_few_nodes_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"2 nodes are asked for .* and the Slurm job 7 has 1"):
        planning.placed(roles(), Allocation("7", ("a1",)), Shape(1, 1))


def test_a_role_may_name_its_nodes() -> None:
    asked = [Role("judge", "inference", Resources(nodes="a[2-3]"))]
    assert slots(Shape(3, 0), asked) == {"judge": ("a2 a3",)}
    with pytest.raises(PlacementError, match="judge is to run on b1, which the job does not have"):
        slots(Shape(1), [Role("judge", "inference", Resources(nodes="b1"))])


def test_the_nodes_of_a_job_begin_with_the_launchers() -> None:
    environ = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}
    assert allocation.current(environ) == Allocation("9", ("n2", "n1", "n3"))
    assert allocation.current({}) is None
    with pytest.raises(PlacementError, match="the nodes of Slurm job 9 are not known"):
        allocation.current({"SLURM_JOB_ID": "9", "SLURM_NODELIST": "n["})


def test_outside_of_a_job_the_placement_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    placement = registry.chosen(Deployment(type="slurm", num_infer_nodes=1))
    assert isinstance(placement, SlurmPlacement)
    assert placement.shape == Shape(1, 1, 0)
    with pytest.raises(PlacementError, match=r"this process is in none .*; add a section \[slurm\]"):
        placement.plan(roles())
    ahead = SlurmPlacement(num_infer_nodes=1, ahead=True).plan(roles())
    assert [place.host for place in ahead.places] == ["node_0", "node_0", "node_1", "node_0"]


def test_a_step_shares_the_jobs_nodes_and_has_no_secret_on_its_command_line() -> None:
    words = step.command_line("trainer", ("a1", "a2"), "7")
    assert words[0] == "srun"
    assert {"--jobid=7", "--nodes=2", "--ntasks=2", "--nodelist=a1,a2", "--overlap", "--input=all"} < set(words)
    given = {"PRIMERL_API_KEY": "s", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "7", "HOME": "/h"}
    assert step.environment_of_srun(given, frozenset({"PRIMERL_API_KEY"})) == {"SLURM_JOB_ID": "7", "HOME": "/h"}


def test_gpus_are_those_that_slurm_gave() -> None:
    assert agent.visible([1, 2], "4,GPU-x,6,7") == "GPU-x,6"
    assert agent.visible([1, 2], None) == "1,2"


def test_a_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("right")
    assert agent.sees(str(tmp_path / "there"), "right", 0.0)
    assert not agent.sees(str(tmp_path / "there"), "other", 0.0)
    assert not agent.sees(str(tmp_path / "absent"), "right", 0.0)


def test_logs_of_a_role_on_several_nodes(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer.log"
    assert log_files(log, "trainer", ("a1",)) == [log]
    assert not (log.parent / "trainer").exists()
    found = log_files(log, "trainer", ("a1", "a2", "a3"))
    assert found == [log, *(log.parent / "trainer" / f"node_{index}.log" for index in (1, 2))]
    log.write_text("step 1")
    assert (log.parent / "trainer" / "node_0.log").read_text() == "step 1"


def test_each_log_of_ranks_on_several_nodes_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    run = begin(tmp_path / "run")
    for index, log in enumerate(log_files(tmp_path / "run" / "logs" / "trainer.log", "trainer", ("a1", "a2"))):
        log.write_text(f"step of {index}\n")
    ranks = tmp_path / "run" / "logs" / "trainer" / "torchrun" / "node_0" / "1.log"
    ranks.parent.mkdir(parents=True)
    ranks.write_text("another rank\n")
    first, second = "==> trainer <==\nstep of 0\n", "==> trainer/node_1 <==\nstep of 1\n"
    assert told("run", "logs", run, "-c", "trainer", capsys=capsys) == second + first
    other = "==> trainer/torchrun/node_0/1 <==\nanother rank\n"
    assert told("run", "logs", run, capsys=capsys) == second + other + first


# The script


def text_of(slurm: Slurm, deployment: Deployment | None = None) -> str:
    command, folder = ["rl", "@", "/o/configs/job.toml"], Path("/o")
    first = ["--ckpt.resume-step", "3"]
    return script.written(slurm, deployment or Deployment(), folder, command=command, first_start=first)


def test_the_script_asks_for_what_the_config_says() -> None:
    slurm = Slurm(
        partition="gpu", account="me", qos="high", time="1-00:00:00", cpus_per_node=8, mem="64G", exclude="n[1-2]",
        signal_s=120, requeue=False, options=["--reservation=mine"], project_dir="/my project",
        pre_run_command="module load cuda\nulimit -n 65536",
    )  # fmt: skip
    lines = text_of(slurm, Deployment(num_train_nodes=2, num_infer_nodes=1, gpus_per_node=8)).splitlines()
    assert lines[0] == "#!/bin/bash"
    found = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert found == [
        "--job-name=primerl", "--partition=gpu", "--account=me", "--qos=high", "--time=1-00:00:00", "--exclude=n[1-2]",
        "--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=8", "--gpus-per-node=8", "--mem=64G",
        "--exclusive", "--no-requeue", "--output=/o/logs/job.log", "--open-mode=append", "--export=ALL",
        "--signal=B:USR1@120", "--reservation=mine",
    ]  # fmt: skip
    assert "cd '/my project'" in lines
    assert lines.index("ulimit -n 65536") == lines.index("module load cuda") + 1
    assert "    more=(--ckpt.resume-step 3)" in lines
    assert lines[-1].startswith("exec ")
    assert lines[-1].endswith(' -m primerl rl @ /o/configs/job.toml "${more[@]}"')


def test_engines_on_other_nodes_are_a_component_of_their_own() -> None:
    slurm = Slurm(
        partition="big", constraint="h100", nodelist="b1", mem="0", exclusive=False,
        infer=SlurmInferNodes(partition="small", constraint="l40", gpus_per_node=2),
    )  # fmt: skip
    text = text_of(slurm, Deployment(num_train_nodes=2, num_infer_nodes=4, gpus_per_node=8))
    first, second = text.split("#SBATCH hetjob\n")
    options = [set(re.findall(r"^#SBATCH --(\S+)$", part, re.MULTILINE)) for part in (first, second)]
    assert {"partition=big", "constraint=h100", "nodelist=b1", "nodes=2", "gpus-per-node=8", "mem=0"} <= options[0]
    assert {"partition=small", "constraint=l40", "nodes=4", "gpus-per-node=2", "mem=0", "requeue"} <= options[1]
    assert not any(option.startswith(("nodelist", "output", "signal")) for option in options[1])
    assert "hetjob" not in text_of(Slurm(), Deployment(num_infer_nodes=1))


def test_a_template_has_to_have_a_place_for_the_other_nodes(tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/sh\n{% for option in options %}\n#SBATCH {{ option }}\n{% endfor %}\n{{ command }}\n")
    slurm = Slurm(template_path=str(own), infer=SlurmInferNodes(partition="small"))
    with pytest.raises(ConfigError, match=r"has no line `#SBATCH hetjob` for the nodes of slurm\.infer"):
        text_of(slurm, Deployment(num_infer_nodes=1))


def test_nodes_of_engines_have_gpus_of_their_own() -> None:
    shape = Shape(1, 2, 8, infer_gpus_per_node=2)
    found = slots(shape, roles(8, 3))
    assert found["trainer"] == ("a1", *range(8))
    assert [found[f"inference_{index}"] for index in range(3)] == [("a2", 0), ("a3", 0), ("a2", 1)]
    with pytest.raises(PlacementError, match=r"inference needs 4 GPUs, more than slurm.infer.gpus_per_node \(2\)"):
        slots(shape, roles(8, 1, gpus=4))
    # A trainer on CPUs, engines on GPUs, and the other way round.
    assert slots(Shape(1, 1, 0, infer_gpus_per_node=1), roles(1, 1))["inference"] == ("a2", 0)
    assert slots(Shape(1, 1, 1, infer_gpus_per_node=0), roles(1, 1))["inference"] == ("a2",)


def test_a_step_names_the_component_that_its_nodes_are_of() -> None:
    environ = {
        "SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2", "SLURMD_NODENAME": "b1", "SLURM_JOB_NODELIST": "b1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "b[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "s7",
    }  # fmt: skip
    found = allocation.current(environ)
    assert found is not None
    assert found.nodes == ("b1", "b2", "s7")
    assert found.groups == {"b1": 0, "b2": 0, "s7": 1}
    assert "--het-group=1" in step.command_line("inference", ("s7",), found.job, found.groups["s7"])


def test_a_heterogeneous_job_is_in_the_state_of_its_leader() -> None:
    found = jobs.parsed(
        "JobId=3 HetJobId=3 JobState=RUNNING Reason=None NodeList=b[1-2] ExitCode=0:0 Restarts=1\n"
        "JobId=4 HetJobId=3 JobState=COMPLETING Reason=None NodeList=s7 ExitCode=0:0 Restarts=0\n"
    )
    assert (found.state, found.nodes, found.restarts) == ("RUNNING", "b[1-2],s7", 1)


@pytest.mark.parametrize(
    ("folder", "option"),
    [
        ("/my runs/a", "'/my runs/a/logs/job.log'"),
        ("/o/50%j", "/o/50%%j/logs/job.log"),
        ("/a#1", "'/a#1/logs/job.log'"),
    ],
)
def test_the_log_is_where_the_folder_is_whatever_its_name(folder: str, option: str) -> None:
    lines = script.written(Slurm(), Deployment(), Path(folder), command=["rl"]).splitlines()
    assert f"#SBATCH --output={option}" in lines


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch"
    own.write_text("#!/bin/sh\n#SBATCH -N {{ nodes }} -J {{ config.job_name }}\n{{ command }}\n")
    first, second, third = text_of(Slurm(template_path=str(own), job_name="mine")).splitlines()
    assert (first, second) == ("#!/bin/sh", "#SBATCH -N 1 -J mine")
    assert third.endswith("-m primerl rl @ /o/configs/job.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("#!/bin/sh\n{{ nodse }}", "'nodse' is undefined"),
        ("#!/bin/sh\n{% if %}", "Expected an expression"),
        ("echo", "does not begin with `#!`"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    own = tmp_path / "own.sbatch"
    if text is not None:
        own.write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        text_of(Slurm(template_path=str(own)))
    assert str(refused.value).startswith(f"slurm.template_path: {own}")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("time", "tomorrow", "slurm.time: time ('tomorrow') is no time limit of Slurm"),
        ("export", "ALL,KEY=secret", "slurm.export: export must be ALL, NONE or names of variables"),
        ("options", '["reservation=mine"]', "slurm.options: options has 'reservation=mine'"),
        (
            "options",
            '["--export=KEY=secret"]',
            "slurm.options: options has --export, which is not to be given there: s",
        ),
        ("options", '["-C a", "--output=x"]', "options has --output, which is not to be given there: the log is in"),
        (
            "options",
            '["--signal=USR1@9"]',
            "options has --signal, which is not to be given there: slurm.signal_s sets it",
        ),
        ("options", '["--requeue"]', "options has --requeue, which is not to be given there: slurm.requeue sets it"),
        ("partition", "a b", "slurm.partition"),
        ("max_nodes", "3", "slurm.max_nodes"),
        (
            "infer",
            '{"partition": "small"}',
            "slurm.infer describes nodes of the engines, and deployment.num_infer_nodes is",
        ),
    ],
)
def test_a_bad_setting_is_named(key: str, value: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(CONFIG)
    with pytest.raises(ConfigError) as refused:
        load(RLConfig, ["@", str(file), f"--slurm.{key.replace('_', '-')}", value], program="primerl rl")
    assert "slurm" in str(refused.value)
    assert said.split(": ")[-1] in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ckpt": {"interval": 1, "resume_step": 3}}, ["--ckpt.resume-step", "3"]),
        ({"ckpt": None, "trainer": {"ckpt": {"resume_step": 2}}}, ["--trainer.ckpt.resume-step", "2"]),
        ({"ckpt": {"interval": 1}, "skip_event": 5}, ["--skip-event", "5"]),
    ],
)
def test_what_is_asked_of_the_first_start_alone(given: dict[str, Any], expected: list[str]) -> None:
    assert submission.once(config_of(**given)) == expected


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [(None, ()), ({"weights_only": True}, ()), ({"interval": 2}, submission.RESUMES_SFT)],
)
def test_a_fine_tuning_resumes_only_what_it_has_saved(ckpt: dict[str, Any] | None, expected: tuple[str, ...]) -> None:
    assert submission.later(SFTConfig.model_validate({**SFT, "ckpt": ckpt})) == expected
    assert submission.later(config_of()) == ()


@pytest.mark.parametrize(("number", "cancels"), [(signal.SIGHUP, False), (signal.SIGINT, True), (signal.SIGTERM, True)])
def test_a_closed_terminal_leaves_the_job_alone(
    number: signal.Signals, cancels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the job runs; it has ended by the next question."""
    asked: list[jobs.Job] = []
    cancelled: list[bool] = []

    def state(job: jobs.Job) -> jobs.State:
        asked.append(job)
        if len(asked) == 1:
            os.kill(os.getpid(), number)
            return jobs.State("RUNNING")
        return jobs.State("CANCELLED", exit_code=0)

    monkeypatch.setattr(jobs, "state", state)
    monkeypatch.setattr(jobs, "cancel", lambda job, found, *, kill: cancelled.append(kill))
    for name in ("LOOK_EVERY_S", "ASK_EVERY_S", "LAST_LINES_S"):
        monkeypatch.setattr(follow, name, 0.0)
    monkeypatch.setattr(signals, "_current", None)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    job = jobs.Job("7", 0.0, 1)
    try:
        with signals.AsInterrupts():
            if cancels:
                assert follow.to_the_end(job, tmp_path, lambda _: None, 0) == 130
            else:
                with pytest.raises(signals.Terminated, match="SIGHUP"):
                    follow.to_the_end(job, tmp_path, lambda _: None, 0)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert cancelled == [False] * cancels


# What Slurm says


def test_the_state_of_a_job() -> None:
    line = (
        "JobId=7 JobName=x Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 JobState=PENDING Reason=BeginTime "
        "NodeList=(null) BatchHost=n1"
    )
    found = jobs.parsed(line)
    assert found == jobs.State("PENDING", "BeginTime", 0, "", 2)
    assert found.is_waiting
    assert not found.is_over
    assert found.told() == "PENDING (BeginTime)"
    killed = jobs.parsed("JobState=NODE_FAIL Reason=NodeDown ExitCode=0:9 NodeList=n[1-2]")
    assert killed.is_over
    assert (killed.exit_code, killed.nodes) == (137, "n[1-2]")
    assert jobs.parsed("").state == jobs.UNKNOWN


def test_a_job_is_noted_in_the_runs_folder(tmp_path: Path) -> None:
    assert jobs.noted(tmp_path) is None
    assert jobs.active(tmp_path) is None
    job = jobs.Job("7", 1.5, 2, "/etc/slurm.conf")
    jobs.note(tmp_path, job)
    assert jobs.noted(tmp_path) == job
    (tmp_path / jobs.FILE).write_text("[]")
    assert jobs.noted(tmp_path) is None


def answers(monkeypatch: pytest.MonkeyPatch, **given: str | jobs.SlurmError) -> None:
    """What each command of Slurm prints, or refuses with."""

    def command(*words: str, **_: Any) -> str:
        said = given.get(words[0], jobs.SlurmError("Unable to contact slurm controller (connect failure)"))
        if isinstance(said, jobs.SlurmError):
            raise said
        return said

    monkeypatch.setattr(jobs, "command", command)
    monkeypatch.setattr(jobs, "_queues", {})


INVALID = jobs.SlurmError("slurm_load_jobs error: Invalid job id specified")


@pytest.mark.parametrize(
    ("given", "state", "is_over"),
    [
        ({"scontrol": INVALID}, "UNKNOWN", True),
        ({"scontrol": INVALID, "sacct": "FAILED|1:0\n"}, "FAILED", True),
        ({"sacct": "COMPLETED|0:0\n"}, "COMPLETED", True),
        ({"sacct": "RUNNING|0:0\n"}, "RUNNING", False),
        ({}, "NOT KNOWN", False),
    ],
)
def test_a_controller_that_does_not_answer_says_nothing_of_the_job(
    given: dict[str, Any], state: str, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, **given)
    jobs.note(tmp_path, jobs.Job("7", 1.5, 2))
    found = jobs.state(jobs.Job("7", 1.5, 2))
    assert (found.state, found.is_over) == (state, is_over)
    assert (jobs.active(tmp_path) is None) == is_over
    if is_over:
        submission._check_free(tmp_path)
        return
    with pytest.raises(ConfigError, match=r"output_dir: .* cannot be used: .*job 7"):
        submission._check_free(tmp_path)


@pytest.mark.parametrize(("word", "code"), [("resume", 2), ("delete", 2)])
def test_a_run_whose_job_may_still_run_is_left_alone(
    word: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    answers(monkeypatch)
    run = begin(tmp_path / "run")
    jobs.note(tmp_path / "run", jobs.Job("7", 1.5, 2))
    said = " ".join(told("run", word, run, code=code, capsys=capsys).split())
    assert "whether job 7 of it is over is not known: Unable to contact slurm controller" in said


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        ({"scontrol": "JobState=PENDING Reason=Priority"}, "PENDING", "job 7 is PENDING (Priority)"),
        ({"scontrol": "JobState=RUNNING Reason=None"}, "PENDING", ""),
        ({}, "PENDING", "job 7 is NOT KNOWN (Unable to contact slurm controller (connect failure))"),
        ({"scontrol": "JobState=CANCELLED Reason=None"}, "STOPPED", ""),
        (
            {"scontrol": INVALID},
            "FAILED",
            "job 7 is UNKNOWN: its launcher was killed; `primerl run resume` continues it",
        ),
    ],
)
def test_a_job_that_the_queue_does_not_list_has_not_failed(
    given: dict[str, Any], status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_STATE_DIR", str(tmp_path / "state"))
    answers(monkeypatch, squeue="", **given)
    run = begin(tmp_path / "run")
    jobs.note(tmp_path / "run", jobs.Job("7", 1.5, 2))
    with Registry() as registry:
        found = standing(registry.find(run))
    assert (found.status, found.reason) == (status, reason)


@pytest.mark.processes
def test_a_machine_without_slurm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="slurm: there is no sinfo on this machine; start it on a node that submits"):
        submission.check(config_of(slurm={}))
    submission.check(config_of(slurm={"dry_run": True}))
    submission.check(config_of())


@pytest.mark.processes
def test_an_unknown_partition_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'cpu*|3|infinite|n/a'\necho 'cpu*|1|infinite|n/a'\necho 'gpu|2|1:00:00|n/a'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"slurm.partition: there is no partition 'gpus'; there are cpu, gpu"):
        submission.check(config_of(slurm={"partition": "gpus"}))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    found = submission.begun(config_of(slurm={"partition": "gpu,cpu", "project_dir": "project"}))
    assert found.slurm is not None
    assert found.slurm.project_dir == str(Path.cwd()) == str(tmp_path / "project")
    with pytest.raises(ConfigError, match=r"slurm\.project_dir: /absent cannot be used: No such file or directory"):
        submission.begun(config_of(slurm={"project_dir": "/absent"}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 5400), ("1:30", 90), ("1:00:00", 3600), ("2-00", 172800), ("1-02:03", 93780), ("1-00:00:01", 86401),
        ("infinite", float("inf")), ("n/a", float("inf")),
    ],
)  # fmt: skip
def test_times_as_slurm_writes_them(text: str, expected: float) -> None:
    assert submission.seconds(text) == expected


@pytest.mark.parametrize(
    ("slurm", "deployment", "said"),
    [
        ({}, {"num_infer_nodes": 4}, "deployment: 5 nodes are asked for .*, and partition cpu has 4"),
        ({"partition": "gpu"}, {"num_infer_nodes": 2}, "deployment: 3 nodes are asked for .*, and partition gpu has 2"),
        ({"partition": "gpu", "time": "2:00:00"}, {}, r"slurm.time \(2:00:00\) is above the limit of partition gpu"),
        ({"partition": "gpu,cpu", "time": "2:00:00"}, {"num_infer_nodes": 3}, None),
        ({"time": "30-00"}, {}, None),
        (
            {"partition": "gpu", "signal_s": 3600},
            {},
            r"slurm.signal_s: the limit of partition gpu \(1:00:00\) is not longer than",
        ),
        ({"partition": "gpu,cpu", "signal_s": 3600}, {}, None),
        (
            {"partition": "short"},
            {},
            r"slurm.signal_s: the limit of partition short \(5:00\) is not longer than slurm.signal_s \(300 s\)",
        ),
        ({"partition": "short", "time": "10:00"}, {}, None),
        ({"partition": "gpu", "infer": {"partition": "cpu"}}, {"num_train_nodes": 2, "num_infer_nodes": 4}, None),
        (
            {"partition": "gpu", "infer": {"partition": "cpu"}},
            {"num_infer_nodes": 5},
            r"5 nodes are asked for \(num_infer_nodes\), and partition cpu has 4; lower it, or choose",
        ),
        (
            {"infer": {"partition": "cpus"}},
            {"num_infer_nodes": 1},
            "slurm.infer.partition: there is no partition 'cpus'",
        ),
    ],
)
def test_what_a_partition_does_not_have(slurm: dict[str, Any], deployment: dict[str, Any], said: str | None) -> None:
    found = submission.partitions("cpu*|3|infinite|n/a\ncpu*|1|infinite|n/a\ngpu|2|1:00:00|n/a\nshort|1|1-00|5:00\n")
    given = Slurm(**slurm)

    def check() -> None:
        for part in script.parts(given, Deployment(**deployment)):
            submission._check_partition(part, given, found)

    if said is None:
        check()
        return
    with pytest.raises(ConfigError, match=said):
        check()


@pytest.mark.parametrize(("time", "signal_s"), [("5", 300), ("0:30", 300), ("10:00", 600)])
def test_a_time_limit_that_would_stop_the_run_at_once_is_refused(time: str, signal_s: int) -> None:
    """A dry run too."""
    slurm = {"time": time, "signal_s": signal_s, "dry_run": True}
    said = rf"slurm.signal_s: slurm.time \({time}\) is not longer than slurm.signal_s \({signal_s} s\)"
    with pytest.raises(ConfigError, match=said):
        submission.check(config_of(slurm=slurm))
    submission.check(config_of(slurm={**slurm, "signal_s": signal_s // 20}))
    submission.check(config_of(slurm={**slurm, "time": "0"}))


SFT = {"max_steps": 2, "model": {"path": "tiny"}, "data": {"path": "rows.jsonl"}}
EVAL = {"model": "tiny", "env": [{"id": "reverse-text"}]}


@pytest.mark.parametrize(
    ("deployment", "said", "said_of_sft"),
    [
        (
            {"num_infer_nodes": 1},
            *[r"deployment.num_infer_nodes is 1, and without Slurm( or Ray)? all processes are on this"] * 2,
        ),
        (
            {"num_train_nodes": 2},
            *[r"deployment.num_train_nodes is 2, and without Slurm( or Ray)? all processes are on this"] * 2,
        ),
        ({"type": "slurm", "num_train_nodes": 2}, None, "deployment.type is 'slurm', and `primerl sft` trains on this"),
        ({"type": "mine:Own"}, None, None),
        ({}, None, None),
    ],
)
def test_nodes_without_slurm_are_refused(deployment: dict[str, Any], said: str | None, said_of_sft: str | None) -> None:
    def sft(**more: Any) -> SFTConfig:
        return SFTConfig.model_validate({**SFT, **more})

    def evaluation(**more: Any) -> EvalConfig:
        return EvalConfig.model_validate({**EVAL, **more})

    for make, expected in ((config_of, said), (evaluation, said), (sft, said_of_sft)):
        make(deployment=deployment, slurm={})
        if expected is None:
            make(deployment=deployment)
            continue
        with pytest.raises(ValidationError, match=expected):
            make(deployment=deployment)


@pytest.mark.parametrize("more", [{"slurm": {}}, {"deployment": {"type": "slurm"}}])
def test_gpus_of_a_job_are_not_shared(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by a submitting machine with a single GPU."""
    deployment = {**more.get("deployment", {}), "engine_share": 0.4}
    with pytest.raises(ValidationError, match=r"deployment.engine_share shares GPUs of this machine alone: on Slurm"):
        config_of(**{**more, "deployment": deployment})
    monkeypatch.setattr(resolve, "engine_gpus", lambda _: 1)
    monkeypatch.setattr(gpus, "found", lambda: [object()])
    assert sharing.applied(config_of())[0].deployment.engine_share == sharing.ON_ONE_GPU
    config = config_of(**more)
    assert sharing.applied(config) == (config, None)


def test_another_placement_is_not_run_in_a_job() -> None:
    with pytest.raises(ConfigError, match=r"deployment.type: 'mine:Own' does not run in a Slurm job"):
        submission.placement(Deployment(type="mine:Own"))


# Within the job


def test_addresses_are_the_jobs_and_stay_out_of_the_stored_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocation, "addresses", lambda nodes: {node: f"10.0.0.{node[1:]}" for node in nodes})
    config = config_of(slurm={}, deployment={"num_infer_nodes": 1})
    found = within.placed(config)
    assert (found.orchestrator.host, found.inference.host) == ("10.0.0.1", "0.0.0.0")
    assert found.deployment.type == "slurm"
    assert found.model_dump(exclude_unset=True)["orchestrator"].keys() == tomllib.loads(CONFIG)["orchestrator"].keys()
    assert config.orchestrator.host == "127.0.0.1"
    assert "host" not in found.inference.model_fields_set
    given = config_of(slurm={}, inference={"max_model_len": 128, "host": "::"})
    assert within.placed(given).inference.host == "::"


def test_a_dry_submission_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "journal").mkdir()
    config = config_of(slurm={"dry_run": True}, output_dir=str(tmp_path), clean_output_dir=True)
    said: list[str] = []
    assert submission.submit(config, said.append, command="rl", goes_on=lambda _: False) == 0
    assert "nothing was submitted" in said[-1]
    assert (tmp_path / "journal").is_dir()


def test_a_dry_submission_leaves_a_run_and_its_job_alone(tmp_path: Path) -> None:
    config = config_of(slurm={"dry_run": True}, output_dir=str(tmp_path))
    said: list[str] = []

    def submitted() -> str:
        assert submission.submit(config, said.append, command="rl", goes_on=output_folder.begun_in) == 0
        return said.pop()

    job = tmp_path / "job.sbatch"
    assert f"the job's script is {job}, and nothing was submitted" in submitted()
    # What it wrote is no run: a start in the folder is the first one.
    assert not output_folder.begun_in(tmp_path)
    assert f"the job's script is {job}" in submitted()
    job.write_text("of the run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.toml")}
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00000000000000000001.log").write_bytes(b"")
    assert (
        submitted() == f"everything checked; {tmp_path} holds a run, which is left as it is, and nothing was submitted"
    )
    assert job.read_text() == "of the run"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.toml")} == before


def test_only_the_launcher_that_the_script_started_is_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.delenv(script.VARIABLE, raising=False)
    assert submission.is_wanted(config_of(slurm={}))  # in an interactive job, say
    monkeypatch.setenv(script.VARIABLE, "8")
    assert not within.is_within()
    monkeypatch.setenv(script.VARIABLE, "9")
    assert not submission.is_wanted(config_of(slurm={}))
    assert not submission.is_wanted(config_of())


def test_before_the_time_limit_a_checkpoint_is_asked_for_and_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
    said: list[str] = []
    limit = within.TimeLimit(tmp_path, 60.0, said.append, saves=True)
    limit.check()
    limit.is_near = True
    limit.check()
    assert said == ["the job's time limit is 60 s away; a checkpoint is saved after this step"]
    assert (tmp_path / "run" / "save_checkpoint").exists()
    limit.check()
    (tmp_path / "checkpoints" / "step_5").mkdir()
    with pytest.raises(within.TimeIsUp):
        limit.check()
    assert limit.is_up
    assert not (tmp_path / "run" / "save_checkpoint").exists()


def test_without_a_checkpoint_to_save_the_run_stops_at_once(tmp_path: Path) -> None:
    for before_s, saves in ((60.0, False), (within.LAST_S, True)):
        (tmp_path / "run").mkdir(exist_ok=True)
        limit = within.TimeLimit(tmp_path, before_s, lambda _: None, saves=saves)
        limit.is_near = True
        with pytest.raises(within.TimeIsUp):
            limit.check()


def test_the_runs_key_is_kept_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_key.VARIABLE, raising=False)
    (tmp_path / "run").mkdir()
    cluster.make_key(tmp_path)
    key = os.environ[run_key.VARIABLE]
    assert len(key) == 2 * run_key.KEY_BYTES
    assert not (tmp_path / run_key.FILE).exists()
    run_key.keep(tmp_path)
    assert (tmp_path / run_key.FILE).read_text() == f"{key}\n"
    assert (tmp_path / run_key.FILE).stat().st_mode & 0o777 == 0o600
    monkeypatch.delenv(run_key.VARIABLE)
    assert run_key.made(tmp_path) == key
    monkeypatch.setenv(run_key.VARIABLE, "given")
    cluster.make_key(tmp_path)
    assert os.environ[run_key.VARIABLE] == "given"


def test_what_is_sent_to_a_node_differs_from_what_srun_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    monkeypatch.setenv(run_key.VARIABLE, "secret")
    given = {**os.environ, "MINE": "2"}
    placement = SlurmPlacement(num_train_nodes=2, ahead=True)
    placement.plan(roles(2))
    command = Command(["x"], given, Path("/o/logs/trainer.log"), own=frozenset({"MINE"}))
    one = placement._environment(roles()[1], placement._slots["orchestrator"], command)
    assert one == {"MINE": "2", run_key.VARIABLE: "secret", "PRIMERL_FORK_SERVER": "off"}


def test_a_job_that_is_put_back_is_ended_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SIGTERM, which may come before `scontrol` has returned, and is no interruption of the run."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    said: list[str] = []
    asked: list[tuple[str, ...]] = []

    def command(*words: str) -> str:
        asked.append(words)
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(jobs, "command", command)
    assert within.requeue(2, said.append)
    assert (asked, said) == ([("scontrol", "requeue", "9")], [])
    assert signal.getsignal(signal.SIGTERM) == before
    assert not within.requeue(1, said.append)
    assert len(asked) == 1

    def refuses(*words: str) -> str:
        raise jobs.SlurmError("not allowed")

    monkeypatch.setattr(jobs, "command", refuses)
    assert not within.requeue(2, said.append)
    assert said[-1] == "the job was not put back into the queue: not allowed; the same command resumes the run"
