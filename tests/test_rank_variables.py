"""A pod's RANK and WORLD_SIZE are not a rank's."""

from __future__ import annotations

from pathlib import Path

import pytest
from primerl import cli
from primerl.cli import processes
from primerl.config.process_files.files import ProcessConfig
from primerl.config.schema.env_worker import EnvWorkerConfig
from primerl.launch.placement.commands import environment_of
from primerl.process.rank_variables import NAMES, forget_unless_rank, is_rank
from primerl.train.settings import TrainerConfig
from settings_helpers import filled

POD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        (POD, False),
        (POD | {"TORCHELASTIC_RUN_ID": "x"}, True),
        (POD | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, True),
        (POD | {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "2"}, True),
        # A pod's variables within a batch script of Slurm, and a job without srun.
        (POD | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, False),
        # One task in a container whose hook sets them.
        (POD | {"WORLD_SIZE": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
    ],
)
def test_who_has_started_a_rank(environ: dict[str, str], expected: bool) -> None:
    assert is_rank(environ) == expected
    left = dict(environ)
    forget_unless_rank(left, "trainer")
    assert left == (environ if expected else {name: environ[name] for name in environ if name not in NAMES})


@pytest.mark.parametrize("command", ["trainer", "sft"])
def test_a_second_process_that_nobody_started_as_a_rank_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert cli.main([command, "@", "absent.toml"]) == 2
    assert "RANK is 1, but neither torchrun nor Slurm has started this process" in capsys.readouterr().err
    environ = {"RANK": "1"}
    forget_unless_rank(environ, "rl")
    assert environ == {}


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*NAMES, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in POD.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("pod")
def test_a_fine_tuning_in_a_pod_reads_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.toml").write_text("no_such_key = 1\n")
    assert cli.main(["sft", "@", "sft.toml", "--max-steps", "3"]) == 2
    said = capsys.readouterr().err
    assert "no_such_key (in sft.toml, line 1): unknown key" in said
    assert "WORLD_SIZE (2) and RANK are not used" in said


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize("kind", ["trainer", "env-worker"])
def test_a_runs_processes_do_not_get_them(kind: str) -> None:
    config = EnvWorkerConfig(orchestrator_url="http://a:1", environment="e", id="e")
    process = ProcessConfig("p", kind, config, Path("p.toml"), Path("p.log"), threads=0)
    assert not set(POD) & set(environment_of(process))


@pytest.mark.usefixtures("pod")
def test_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("primerl.train.distributed.torchrun.run", lambda ranks, _: started.append(ranks) or 0)
    settings = {"ranks": 2, "orchestrator_url": "http://127.0.0.1:1", "output_dir": "out", "model": {"path": "m"}}
    monkeypatch.setattr(processes, "settings_of", lambda *_: filled(TrainerConfig, **settings, max_steps=1))
    assert cli.main(["trainer", "@", "trainer.toml"]) == 0
    assert started == [2]
