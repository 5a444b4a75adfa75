"""`primerl rl --ckpt.resume-step N`: the run is what it was at that step, or a refusal that changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end import launch, primerl, read_lines, until
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.schema.rl import RLConfig
from primerl.launch.resume import going_back
from primerl.models.tiny import TinyConfig, write_model
from pydantic import ValidationError

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


def folders(output: Path, kind: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in (output / kind).iterdir())


def weights(output: Path) -> list[str]:
    return folders(output, "weights")


def test_a_checkpoint_of_a_script_is_resumed_by_a_script_alone(tmp_path: Path) -> None:
    with_checkpoints(tmp_path, 2, 4)
    going_back.check_trainer(config(tmp_path), tmp_path)
    (tmp_path / "checkpoints" / "step_4" / "script").mkdir()
    with pytest.raises(ConfigError, match=r"trainer\.external: .*step_4 was saved by a training script.*--trainer ext"):
        going_back.check_trainer(config(tmp_path), tmp_path)
    going_back.check_trainer(config(tmp_path, resume_step=2), tmp_path)
    external = config(tmp_path)
    external.trainer.external = True
    going_back.check_trainer(external, tmp_path)
    going_back.check_trainer(config(tmp_path).model_copy(update={"clean_output_dir": True}), tmp_path)


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
    for given, message in (
        ({"resume_step": 0}, "ckpt.resume_step is 0; give a step, or -1 for the newest checkpoint"),
        ({"resume_step": 2, "weights_only": True}, "ckpt.weights_only saves nothing to resume from"),
    ):
        with pytest.raises(ValidationError, match=message):
            config(tmp_path, **given)
    with pytest.raises(ValidationError, match="clean_output_dir deletes the checkpoint"):
        RLConfig.model_validate({**config(tmp_path, resume_step=2).model_dump(), "clean_output_dir": True})


def test_a_step_without_the_orchestrators_part_is_refused_but_for_the_newest(tmp_path: Path) -> None:
    output = with_checkpoints(tmp_path, 2, 4, 6)
    (output / "journal").mkdir()
    (output / "journal" / "000000000000.snapshot").touch()
    (output / "checkpoints" / "step_4" / "orchestrator").mkdir()
    (output / "checkpoints" / "step_4" / "orchestrator" / "000000000012.snapshot").touch()
    with pytest.raises(ConfigError) as caught:
        going_back.check(config(output, resume_step=2), output)
    assert (
        "ckpt.resume_step is 2, but the orchestrator saved no state with the trainer's checkpoint of that step"
        in str(caught.value)
    )
    assert str(caught.value).endswith("steps with both, and the newest: 4, 6")
    for step, flags in ((4, ["--resume-step", "4"]), (6, []), (-1, []), (None, [])):
        going_back.check(config(output, resume_step=step), output)
        assert going_back.flags(config(output, resume_step=step), output) == flags
    assert folders(output) == ["step_2", "step_4", "step_6"]


def test_an_event_is_left_out_at_the_first_start_and_by_nothing_that_is_kept(tmp_path: Path) -> None:
    output = with_checkpoints(tmp_path, 2, 4)
    (output / "journal").mkdir()
    (output / "journal" / "000000000000.snapshot").touch()
    skipping = config(output).model_copy(update={"skip_event": 17})
    assert going_back.flags(skipping, output) == ["--skip-event", "17"]
    back = config(output, resume_step=2).model_copy(update={"skip_event": 17})
    assert going_back.flags(back, output) == ["--resume-step", "2", "--skip-event", "17"]
    given = RLConfig.model_validate({**run_file.settings(config(output)), "skip_event": 17})
    assert given.skip_event == 17
    assert "skip_event" not in run_file.settings(given)
    with pytest.raises(ValidationError, match="clean_output_dir deletes the journal that skip_event is about"):
        RLConfig.model_validate({**run_file.settings(given), "skip_event": 17, "clean_output_dir": True})


def test_a_run_without_a_journal_goes_back_to_a_checkpoint_in_any_case(tmp_path: Path) -> None:
    output = with_checkpoints(tmp_path, 2, 4, 6)
    assert going_back.flags(config(output), output) == []
    for step in (2, 4):
        (output / "checkpoints" / f"step_{step}" / "orchestrator").mkdir()
        (output / "checkpoints" / f"step_{step}" / "orchestrator" / "000000000012.snapshot").touch()
    with pytest.raises(ConfigError) as caught:
        going_back.check(config(output, resume_step=6), output)
    assert str(caught.value).endswith("steps with both: 2, 4")
    assert not (output / "journal").exists()
    for step, flags in ((None, ["--resume-step", "4"]), (2, ["--resume-step", "2"])):
        going_back.check(config(output, resume_step=step), output)
        assert going_back.flags(config(output, resume_step=step), output) == flags
    # The orchestrator sets it aside.
    assert (output / "journal").is_dir()


def timeless(output: Path) -> dict[int, dict[str, Any]]:
    untimed = ("time/", "perf/", "timestamp")
    lines = read_lines(output / "metrics.jsonl")
    return {line["step"]: {key: line[key] for key in line if not key.startswith(untimed)} for line in lines}


@pytest.mark.end_to_end
@pytest.mark.timeout(400)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_run_goes_back_to_what_it_was(tmp_path: Path) -> None:
    model, run = tmp_path / "tiny", tmp_path / "run"
    write_model(model, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)

    def ended(*more: str) -> tuple[int, str]:
        return launch(model, run, *SMALL, *KEPT, *more).ended(140)

    code, output = ended("--max-steps", "9")
    assert code == 0, output
    before, saved = timeless(run), folders(run)
    assert saved == ["step_2", "step_4", "step_6", "step_8", "step_9"] == weights(run)
    shutil.rmtree(run / "checkpoints" / "step_4" / "orchestrator")
    code, output = ended("--max-steps", "10", "--ckpt.resume-step", "4")
    assert code == 2, output
    assert (timeless(run), folders(run)) == (before, saved)
    # Of a run that is over, and further back than batches are kept.
    code, output = ended("--max-steps", "10", "--ckpt.resume-step", "2")
    assert code == 0, output
    after = timeless(run)
    assert sorted(after) == list(range(1, 11))
    assert {step: after[step] for step in (1, 2)} == {step: before[step] for step in (1, 2)}
    assert [line["step"] for line in read_lines(run / "steps.jsonl")] == list(range(1, 11))
    aside = ["replaced_step_4", "replaced_step_6", "replaced_step_8", "replaced_step_9"]
    assert folders(run) == [*aside, "step_10", "step_2", "step_4", "step_6", "step_8"] == weights(run)
    assert "every invariant holds" in primerl("trace", str(run), "--check")
    # The newest by its name is the newest.
    code, output = ended("--max-steps", "11", "--ckpt.resume-step", "10")
    assert code == 0, output
    assert {step: line for step, line in timeless(run).items() if step <= 10} == after


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
