"""`primerl rl --ckpt.resume-step N`: the same batches again, or a refusal that changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end import launch, read_lines, until
from primerl.config.load import ConfigError
from primerl.config.rl import RLConfig
from primerl.launch import going_back
from primerl.launch.starting import RefusedError
from primerl.models.tiny import TinyConfig, write_model
from pydantic import ValidationError
from train_helpers import OrchestratorDouble, gone

SMALL = ("--orchestrator.eval.env", "[]", "--orchestrator.batch-size", "16", "--orchestrator.max-async-level", "1")
# All stay; the last two with the batches after them.
KEPT = ("--ckpt.interval", "2", "--ckpt.keep-last", "2", "--ckpt.keep-interval", "2")


def config(output: Path, **ckpt: Any) -> RLConfig:
    environments = {"train": {"env": [{"id": "reverse-text"}]}}
    return RLConfig.model_validate(
        {
            "output_dir": str(output),
            "max_steps": 8,
            "model": {"path": "m"},
            "orchestrator": environments,
            "trainer": {"ckpt": {"interval": 2, **ckpt}},
        }
    )


def with_checkpoints(output: Path, *steps: int) -> Path:
    for name in ("checkpoints", "weights"):
        for step in steps:
            (output / name / f"step_{step}").mkdir(parents=True)
    return output


def folders(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def test_what_cannot_be_is_said_before_anything_is_started(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"
    with pytest.raises(ConfigError) as caught:
        going_back.check(config(tmp_path, resume_step=4), tmp_path)
    told = "ckpt.resume_step: there is no checkpoint of step 4 in "
    assert str(caught.value) == f"{told}{there}; there are: none"
    with_checkpoints(tmp_path, 2, 6)
    with pytest.raises(ConfigError) as caught:
        going_back.check(config(tmp_path, resume_step=4), tmp_path)
    assert str(caught.value) == f"{told}{there}; there are: 2, 6"
    for step in (6, -1, None):
        going_back.check(config(tmp_path, resume_step=step), tmp_path)
    for given, message in (
        ({"resume_step": 0}, "ckpt.resume_step is 0; give a step, or -1 for the newest checkpoint"),
        ({"resume_step": 2, "weights_only": True}, "ckpt.weights_only saves nothing to go on from"),
    ):
        with pytest.raises(ValidationError, match=message):
            config(tmp_path, **given)
    with pytest.raises(ValidationError, match="clean_output_dir deletes the checkpoint"):
        RLConfig.model_validate({**config(tmp_path, resume_step=2).model_dump(), "clean_output_dir": True})


def test_the_orchestrator_is_asked_before_anything_is_set_aside(tmp_path: Path) -> None:
    output = with_checkpoints(tmp_path, 2, 4, 6)
    refusal = json.dumps({"error": {"message": "batches before step 5 are gone"}}).encode()
    with OrchestratorDouble(lambda step, rank: gone()) as double:
        double.answer = lambda path, fields: (409, refusal)  # type: ignore[method-assign]
        with pytest.raises(RefusedError) as caught:
            going_back.go_back(config(output, resume_step=2), output, double.url)
    assert "ckpt.resume_step is 2, and there are checkpoints of steps 2, 4, 6, but " in str(caught.value)
    assert "batches before step 5 are gone" in str(caught.value)
    with pytest.raises(RefusedError, match="is over, and only one that is not can go back"):
        going_back.go_back(config(output, resume_step=2), output, None)
    assert folders(output) == ["step_2", "step_4", "step_6"]
    with OrchestratorDouble(lambda step, rank: gone()) as double:
        assert going_back.go_back(config(output, resume_step=-1), output, double.url) == []
        assert double.calls == []
        names = [path.name for path in going_back.go_back(config(output, resume_step=4), output, double.url)]
        assert double.calls == [("/trainer/resume", {"step": 4})]
    assert names == ["replaced_step_6"] * 2, "weights and checkpoints"
    assert folders(output) == ["replaced_step_6", "step_2", "step_4"]


def timeless(output: Path) -> dict[int, dict[str, Any]]:
    untimed = ("time/", "perf/", "timestamp")
    lines = read_lines(output / "metrics.jsonl")
    return {line["step"]: {key: line[key] for key in line if not key.startswith(untimed)} for line in lines}


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_run_goes_back_and_trains_the_same_batches_again(tmp_path: Path) -> None:
    model, run = tmp_path / "tiny", tmp_path / "run"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)

    def ended(*more: str) -> tuple[int, str]:
        return launch(model, run, *SMALL, *KEPT, *more).ended(140)

    code, output = ended("--max-steps", "9")
    assert code == 0, output
    before, saved = timeless(run), folders(run)
    assert saved == ["step_2", "step_4", "step_6", "step_8", "step_9"]
    # By step 8 the trainer has told that batches up to 4 are not needed; whether its last words were heard, which say
    # 6, depends on when the orchestrator ended.
    code, output = ended("--max-steps", "10", "--ckpt.resume-step", "2")
    assert code == 2, output
    assert re.search("go on from a checkpoint of step [46] or later", " ".join(output.split())), output
    assert (timeless(run), folders(run)) == (before, saved)
    code, output = ended("--max-steps", "10", "--ckpt.resume-step", "6")
    assert code == 0, output
    after = timeless(run)
    assert sorted(after) == list(range(1, 11))
    # Bit by bit, on the batches that the spool has kept.
    assert {step: after[step] for step in before} == before
    assert folders(run) == [
        *("replaced_step_8", "replaced_step_9", "step_10", "step_2", "step_4", "step_6", "step_8"),
    ]


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_fewer_steps_than_are_cut_are_refused(tmp_path: Path) -> None:
    """Its trainer would end with the last of them, and the orchestrator wait for the rest."""
    model, output = tmp_path / "tiny", tmp_path / "run"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    run = launch(model, output, *SMALL, "--max-steps", "5000")
    metrics = output / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and len(read_lines(metrics)) >= 2, 120, "two steps")
        trainer = run.pid_of("trainer")
        assert trainer is not None
        os.kill(trainer, signal.SIGSTOP)
        until(lambda: len(read_lines(output / "steps.jsonl")) > len(read_lines(metrics)), 60, "a batch ahead")
        run.launcher.send_signal(signal.SIGINT)
        assert run.ended(60)[0] == 130
    finally:
        run.kill()
    code, said = launch(model, output, *SMALL, "--max-steps", "1").ended(120)
    assert code == 2, said
    assert re.search(r"max_steps is 1, but the batches of \d+ steps are cut already", " ".join(said.split())), said
    # It is as it was: with as many as before it goes on.
    run = launch(model, output, *SMALL, "--max-steps", "5000")
    try:
        trained = len(read_lines(metrics))
        until(lambda: len(read_lines(metrics)) > trained, 120, "a step more")
    finally:
        run.kill()
