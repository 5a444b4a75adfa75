"""What comes back from the store: a run begins from it, or goes on when its own folder is gone."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from end_to_end import primerl, steps_of
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.rl import RLConfig
from primerl.launch.preflight import output_folder, training
from primerl.launch.resume import going_back, warm_start
from primerl.models.tiny import TinyConfig, write_model
from primerl.runs.registry import Registry
from primerl.stores.choice import open_store
from primerl.stores.entries import begun_with, model_digest, weights_digest
from primerl.stores.store import Store
from primerl.train.checkpoint import staging
from run_helpers import CONFIG, config_of, told, write_run
from store_helpers import RUN, adapter, finish, saved, uploader, with_orchestrator

pytestmark = pytest.mark.usefixtures("state")

SHORT = """\
model = "{model}"
max_steps = 2
batch_size = 8
rollouts_per_example = 4
checkpoint_id = "{checkpoint}"
[sampling]
max_tokens = 16
[[env]]
id = "reverse-text"
"""


def applied(store: Store, checkpoint_id: str, path: Path, **more: Any) -> RLConfig:
    own = {"model": {"path": str(path)}, "store": {"url": store.url}, "checkpoint_id": checkpoint_id}
    return warm_start.applied(config_of(**own, **more))


def test_it_needs_the_same_model_and_something_ready(model: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "kept"))
    for kind in ("weights", "checkpoint"):
        store.put(saved(tmp_path / kind), RUN, kind, 7, *begun_with(model))
    store.put(adapter(tmp_path / "adapter", rank=16, alpha=32), RUN, "adapter", 7, model_digest(model))
    warm = applied(store, RUN, model)
    assert (Path(warm.model.path) / "model.safetensors").read_text() == "weights"
    assert warm.model.name == model.name
    # By which it is shown in the list of runs.
    assert warm.model.path.endswith(f"/{RUN}/step_7")
    lora = applied(store, f"{RUN}/adapter/step_7", model, trainer={"model": {"lora": {}}}).trainer.model.lora
    assert lora is not None
    assert lora.adapter_path is not None
    assert (Path(lora.adapter_path) / "adapter_config.json").exists()
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=3)
    of_rank_4 = {"trainer": {"model": {"lora": {"rank": 4}}}}
    more: dict[str, Any]
    for name, path, more, complaint in (
        (RUN, other, {}, rf"checkpoint_id: {RUN}/weights/step_7 is of another model than the one in {other}: their"),
        (f"{RUN}/step_8", model, {}, f"checkpoint_id: .* is not READY .*; there is {RUN}/adapter/step_7, "),
        (f"{RUN}/adapter/step_7", model, {}, r"is an adapter, which needs \[trainer\.model\.lora\]"),
        (
            f"{RUN}/adapter/step_7",
            model,
            of_rank_4,
            "has rank 16, and trainer.model.lora.rank is 4; set",
        ),
        ("a b", model, {}, "is no id of the store"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            applied(store, name, path, **more)
    assert warm_start.applied(config_of()) == config_of()


def test_other_weights_of_the_same_shape_are_another_model(model: Path, tmp_path: Path) -> None:
    store, trained = open_store(str(tmp_path / "kept")), tmp_path / "trained"
    write_model(trained, seed=1)
    write_model(other := tmp_path / "other", seed=2)
    assert model_digest(other) == model_digest(model)
    store.put(trained, RUN, "weights", 3, *begun_with(model))
    with pytest.raises(ConfigError, match="its run began with other weights of the same shape; give the model"):
        applied(store, RUN, other)
    begun = Path(applied(store, RUN, model).model.path)
    # A run that began from there is known by the model that the first one began with, which stays `model.path`.
    assert begun_with(begun) == (model_digest(model), weights_digest(model))
    assert weights_digest(begun) != weights_digest(model)
    store.put(trained, "dcba4321", "weights", 2, *begun_with(begun))
    assert applied(store, "dcba4321", model).model.path.endswith("/dcba4321/step_2")
    assert applied(store, "dcba4321", begun).model.path.endswith("/dcba4321/step_2")
    # Of a version that did not compare them.
    store.put(trained, RUN, "weights", 4, model_digest(model))
    assert applied(store, RUN, other).model.path.endswith("/step_4")


def test_an_adapter_of_other_weights_is_told_by_the_key_that_named_it(model: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "kept"))
    write_model(other := tmp_path / "other", seed=2)
    folder = adapter(tmp_path / "adapter", rank=16, alpha=32, base=weights_digest(model))
    store.put(folder, RUN, "adapter", 7, model_digest(model))
    lora = {"trainer": {"model": {"lora": {}}}}
    assert applied(store, RUN, model, **lora).trainer.model.lora
    with pytest.raises(ConfigError, match=rf"^checkpoint_id: {RUN}/adapter/step_7 was trained on another base model"):
        applied(store, RUN, other, **lora)


def test_weights_of_any_step_are_found_before_its_checkpoint_in_both_forms(model: Path, tmp_path: Path) -> None:
    store = open_store()
    for step in (1, 2, 3):
        store.put(saved(tmp_path / f"weights_{step}", f"of step {step}"), RUN, "weights", step, *begun_with(model))
        store.put(saved(tmp_path / f"checkpoint_{step}", "of the trainer"), RUN, "checkpoint", step, *begun_with(model))
    store.put(saved(tmp_path / "alone"), RUN, "checkpoint", 4, *begun_with(model))
    for name, content in ((f"{RUN}/step_2", "of step 2"), (f"{RUN}/step_1", "of step 1"), (RUN, "of step 3")):
        file = tmp_path / "short.toml"
        file.write_text(SHORT.format(model=model, checkpoint=name))
        for config in (
            load_run(["@", str(file)], program="primerl rl"),
            config_of(model={"path": str(model)}, checkpoint_id=name),
        ):
            begun = Path(warm_start.applied(config).model.path)
            assert (begun / "model.safetensors").read_text() == content
    for name in (f"{RUN}/step_4", f"{RUN}/checkpoint/step_4"):
        with pytest.raises(ConfigError) as caught:
            applied(store, name, model)
        assert f"checkpoint_id: {RUN}/checkpoint/step_4 is what its own run resumes from" in str(caught.value)
        assert str(caught.value).endswith("there are weights of steps 1, 2, 3")


# A checkpoint has two parts


def test_a_checkpoint_is_stored_with_the_orchestrators_part(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl.stores.worker.PART_S", 600.0)
    store, output = open_store(str(tmp_path / "kept")), tmp_path / "run"
    ours = uploader(store, output, model, keep=-1)

    def uploads() -> list[str]:
        ours.stage(last=False)
        while (one := ours._take(set())) is not None:
            ours._upload_one(one)
        return [f"{entry.step}{' whole' if entry.goes_on else ''}" for entry in store.entries(RUN)]

    folder = saved(output / "checkpoints" / "step_2")
    assert uploads() == []
    # As it may be seen: the folder is there before what is in it.
    (folder / "orchestrator").mkdir()
    assert uploads() == []
    with_orchestrator(folder)
    assert uploads() == ["2 whole"]
    assert staging.staged(output) == []
    # One that another has followed will not get it any more, nor one that is old.
    saved(output / "checkpoints" / "step_4")
    assert uploads() == ["2 whole"]
    with_orchestrator(saved(output / "checkpoints" / "step_6"))
    assert uploads() == ["2 whole", "4", "6 whole"]
    saved(output / "checkpoints" / "step_8")
    monkeypatch.setattr("primerl.stores.worker.PART_S", 0.0)
    assert uploads() == ["2 whole", "4", "6 whole", "8"]
    # It came after all.
    time.sleep(0.01)
    with_orchestrator(output / "checkpoints" / "step_8")
    assert uploads() == ["2 whole", "4", "6 whole", "8 whole"]
    # At the end there is nothing to wait for.
    monkeypatch.setattr("primerl.stores.worker.PART_S", 600.0)
    saved(output / "checkpoints" / "step_9")
    assert finish(uploader(store, output, model, keep=-1)) == 0
    assert store.find(f"{RUN}/checkpoint/step_9")


# The folder is gone


def begun(folder: Path, config: str, kind: str = "rl") -> str:
    folder.mkdir(parents=True)
    with Registry() as registry:
        given = {"name": folder.name, "model": "/models/m", "environments": ["e"], "kind": kind}
        run = registry.begin(folder, config, goes_on=False, form="full", **given)
        registry.end(run, 0)
    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RLConfig]:
    """What would be started."""
    configs: list[RLConfig] = []
    monkeypatch.setattr("primerl.launch.run.run", lambda config, *, form: configs.append(config) or 0)
    return configs


def stored_run(model: Path, tmp_path: Path, *steps: int) -> tuple[str, Path, Store]:
    """A run that is stored, with its checkpoints of these steps whole, and its folder removed."""
    output, url = tmp_path / "outputs" / "small", tmp_path / "kept"
    run, store = begun(output, CONFIG + f'[store]\nurl = "{url}"\n'), open_store(str(url))
    for step in steps:
        with_orchestrator(saved(output / "checkpoints" / f"step_{step}", f"of step {step}"))
        saved(output / "weights" / f"step_{step}", f"weights of step {step}")
    assert finish(uploader(store, output, model, run=run, keep=-1)) == 0
    shutil.rmtree(output)
    return run, output, store


@pytest.mark.processes
def test_a_run_whose_folder_is_gone_comes_back_from_the_store(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[RLConfig],
) -> None:
    monkeypatch.chdir(tmp_path)
    run, output, store = stored_run(model, tmp_path, 2, 4)
    (output.parent / f".small.{2**22 + 1}.tmp").mkdir()  # of a fetch that was killed
    assert main(["run", "resume", run, "--max-steps", "9"]) == 0
    said = capsys.readouterr().out
    assert (
        f"the folder {output} is gone; fetching {run}/checkpoint/step_4 and {run}/weights/step_4 from {store.url}"
        in said
    )
    assert "resuming from step 4 with a new journal" in said
    (config,) = started
    assert (config.max_steps, going_back.needed(config, output)) == (9, 4)
    assert (output / "checkpoints" / "step_4" / "model.safetensors").read_text() == "of step 4"
    assert (output / "weights" / "step_4" / "model.safetensors").read_text() == "weights of step 4"
    assert sorted(path.name for path in output.iterdir()) == ["checkpoints", "run", "weights"]
    assert [path.name for path in output.parent.iterdir()] == ["small"]
    # The launcher goes on with it.
    training._output_dir(config)
    assert output_folder.begun_in(output)
    assert going_back.flags(config, output) == ["--resume-step", "4"]
    # It is in the store already.
    again = uploader(store, output, model, run=run, keep=-1)
    assert (finish(again), again.uploaded) == (0, [])
    # A start that went wrong before there was a journal is repeated.
    assert main(["run", "resume", run]) == 0
    assert going_back.flags(started[-1], output) == ["--resume-step", "4"]
    assert capsys.readouterr().out == ""
    # From then on there is one.
    (output / "journal" / "000000000120.snapshot").touch()
    assert going_back.flags(config, output) == []


@pytest.mark.processes
def test_the_step_to_come_back_to_can_be_named(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[RLConfig],
) -> None:
    monkeypatch.chdir(tmp_path)
    run, output, _ = stored_run(model, tmp_path, 2, 4)
    assert main(["run", "resume", run, "--ckpt.resume-step", "3"]) == 2
    assert "has no checkpoint of step 3 to resume from; of: 2, 4" in capsys.readouterr().err
    assert not output.exists()
    assert main(["run", "resume", run, "--ckpt.resume-step", "2"]) == 0
    assert [going_back.needed(config, output) for config in started] == [2]


def test_what_does_not_come_back_is_said(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[RLConfig],
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(run: str) -> str:
        assert main(["run", "resume", run]) == 2
        return " ".join(capsys.readouterr().err.split())

    run, output, store = stored_run(model, tmp_path)
    said = f"is gone, and there is no checkpoint to resume from: the store {store.url} has nothing of it"
    assert said in refused(run)
    store.put(saved(tmp_path / "old"), run, "checkpoint", 4, model_digest(model))
    store.put(saved(tmp_path / "old_weights"), run, "weights", 4, model_digest(model))
    said = refused(run)
    assert "hold the trainer's part alone, and without the orchestrator's no run can be resumed" in said
    assert (
        f'has checkpoints of step 4; weights of step 4; `checkpoint_id = "{run}/weights/step_4"` begins another' in said
    )
    # A file that is not as it was stored: nothing is left of what was fetched.
    entry = store.put(with_orchestrator(saved(tmp_path / "whole")), run, "checkpoint", 5, model_digest(model))
    (tmp_path / "kept" / entry.data / "model.safetensors").write_text("other")
    assert "its hash differs" in refused(run)
    assert os.listdir(output.parent) == []
    assert "is gone, and it has no store" in refused(begun_and_gone(tmp_path / "outputs" / "without"))
    assert "holds no run to resume" in refused(begun_and_gone(tmp_path / "outputs" / "tuned", kind="sft"))
    assert started == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts a whole run")
@pytest.mark.end_to_end
@pytest.mark.timeout(400)
def test_a_run_that_has_lost_its_folder_ends_with_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file, output = write_run(tmp_path), tmp_path / "outputs" / "small"
    with file.open("a") as opened:
        opened.write("[store]\n")
    primerl("rl", "@", str(file), "--max-steps", "8", "--ckpt.keep-last", "8")
    (listed,) = json.loads(told("run", "list", "--json", capsys=capsys))
    # Of the last steps the orchestrator does not hear: it has nothing to do any more, and ends.
    stored = open_store().entries(listed["id"])
    newest = max(entry.step for entry in stored if entry.goes_on)
    assert newest >= 4
    shutil.rmtree(output)
    said = primerl("run", "resume", "small", "--max-steps", "10")
    assert f"resuming from step {newest} with a new journal" in said
    (again,) = json.loads(told("run", "list", "--json", capsys=capsys))
    assert (again["id"], again["status"], again["step"]) == (listed["id"], "COMPLETED", 10)
    assert steps_of(output) == list(range(newest + 1, 11))
    assert {entry.step for entry in open_store().entries(listed["id"]) if entry.kind == "weights"} >= {9, 10}
    primerl("trace", str(output), "--check")


def begun_and_gone(folder: Path, kind: str = "rl") -> str:
    run = begun(folder, CONFIG, kind)
    shutil.rmtree(folder)
    return run
