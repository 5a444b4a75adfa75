"""`primerl inference` of several engines: what is asked of each, what is refused, and the engines themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster_commands import ENGINES, an_engine_is_killed_and_comes_back, running
from end_to_end import primerl
from primerl.config.errors.fail import ConfigError
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.launch import inference_run, placing
from primerl.launch.slurm import script
from pydantic import ValidationError
from run_helpers import write_run

WAIT_S = 90


def config(**more: Any) -> InferenceRunConfig:
    return InferenceRunConfig.model_validate({"model": {"path": "tiny"}, "backend": "torch", **more})


def test_a_single_engine_of_this_machine_is_the_process_itself() -> None:
    assert config().is_this_process
    for more in ({"replicas": 2}, {"slurm": {}}, {"ray": {}}, {"deployment": {"type": "slurm"}}, {"dry_run": True}):
        assert not config(**more).is_this_process, more


def test_each_engine_has_a_name_and_the_model_by_its_path() -> None:
    found = inference_run.engines(config(replicas=2, join="http://o:1", join_as="mine", threads=3))
    assert [one.name for one in found] == ["inference_0", "inference_1"]
    assert [one.config.join_as for one in found] == ["mine_0", "mine_1"]  # type: ignore[attr-defined]
    assert {one.config.model.path for one in found} == {os.path.abspath("tiny")}  # type: ignore[attr-defined]
    assert {one.threads for one in found} == {3}
    [alone] = inference_run.engines(config(join="http://o:1", join_as="mine"))
    assert (alone.name, alone.config.join_as) == ("inference", "mine")  # type: ignore[attr-defined]


def test_a_job_has_nodes_of_engines_alone() -> None:
    for asked, nodes in ((0, 1), (3, 3)):
        found = placing.on_nodes(config(slurm={}, deployment={"num_infer_nodes": asked}))
        assert found.slurm is not None
        assert [part.nodes for part in script.parts(found.slurm, found.deployment)] == [nodes]
    on_ray = placing.on_nodes(config(ray={})).deployment
    assert (on_ray.num_train_nodes, on_ray.num_infer_nodes) == (0, 0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"replicas": 2, "port": 8001}, r"port \(8001\) cannot be shared by 2 replicas"),
        ({"slurm": {}, "deployment": {"num_train_nodes": 2}}, "num_train_nodes counts the trainer's nodes"),
        ({"ray": {}, "deployment": {"num_train_nodes": 2}}, "num_train_nodes counts the trainer's nodes"),
        ({"deployment": {"engine_share": 0.3}}, "engine_share is a part of the trainer's GPUs"),
        ({"deployment": {"num_infer_nodes": 2}}, r"add a section \[slurm\] or \[ray\]"),
        ({"slurm": {"infer": {"partition": "a"}}, "deployment": {"num_infer_nodes": 1}}, "there is no trainer"),
        ({"slurm": {}, "ray": {}}, "name two places"),
        ({"pull_to": "/here"}, "pull_to needs join"),
        ({"dry_run": True, "clean_output_dir": True}, "a dry run deletes nothing"),
    ],
)
def test_what_engines_alone_cannot_have(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(**more)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path"):
        inference_run.check(config(replicas=2))


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_engines_of_this_machine_serve_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "inference.toml").write_text(ENGINES.replace("num_infer_nodes = 2", "num_infer_nodes = 0"))
    planned = primerl("inference", "@", "inference.toml", "--dry-run")
    assert "inference_1  this machine  1 CPU" in planned
    assert not (tmp_path / "i" / "logs").exists()
    with running(tmp_path / "i", "inference", "@", "inference.toml") as run:
        an_engine_is_killed_and_comes_back(run, "inference_1", WAIT_S)
        assert "another run is using" in primerl("inference", "@", "inference.toml", code=2)
        run.launcher.send_signal(signal.SIGTERM)
        code, printed = run.ended(WAIT_S)
    assert code == 130, printed
    assert "inference_1 was killed by SIGKILL; it is started again" in printed
    assert not (tmp_path / "i" / "engines.json").exists()


@pytest.mark.end_to_end
def test_an_engine_that_gives_up_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "inference.toml").write_text(ENGINES.replace("num_infer_nodes = 2", "num_infer_nodes = 0"))
    said = primerl("inference", "@", "inference.toml", "--host", "192.0.2.1", code=2)
    assert "inference" in said
    assert "192.0.2.1" in said
