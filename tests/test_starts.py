"""A start that is refused, or that finds nothing to do, leaves a folder as it was."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tomli_w
from eval_endpoint import config as eval_config
from primerl.cli import main
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import run_file
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.gepa import GepaConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.rl import RLConfig
from primerl.evals import preflight
from primerl.gepa import files as gepa_files
from primerl.launch import evaluation, inference_run
from primerl.launch import run as launch_run
from primerl.launch.placement import commands
from primerl.launch.placement.local import LocalPlacement
from primerl.launch.placement.protocol import Command
from primerl.launch.preflight import kinds, output_folder, training
from primerl.launch.registration import begin, registered
from primerl.launch.report.console import Console
from primerl.launch.slurm import jobs, submission
from primerl.launch.supervise.failures import RefusedError
from primerl.models.tiny import write_model
from primerl.runs.registry import Registry
from sft_helpers import settings, write_rows

pytestmark = pytest.mark.usefixtures("own_logging")

RL = {"max_steps": 1, "model": {"path": "m"}, "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}}
OF_A_START = ("logs", "run")
"""Where every start writes: its log, its lock, the run's id."""
LEFT = {
    "rl": ("configs/rl.toml", "configs/orchestrator.toml", "journal/0.snapshot", "metrics.jsonl"),
    "sft": ("configs/sft.toml", "weights/step_1/config.json", "metrics.jsonl"),
    "eval": ("configs/eval.toml", "configs/orchestrator.toml", "journal/0.snapshot", "results.jsonl"),
    "gepa": ("gepa.json", "configs/inference.toml", "evaluations/00000/configs/eval.toml"),
    "serve": ("logs/server.log", "configs/inference_0.toml", "states/a/weights/one/primerl.json"),
    "inference": ("logs/inference.log", "configs/inference.toml"),
}
"""What each command leaves in its folder."""
NOTES = ("run/launcher.lock", "run/id")


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of the run before\n")


def test_saved_states_are_a_servers_without_its_logs(tmp_path: Path) -> None:
    fill(tmp_path, "states/a/sampler_weights/one/primerl.json")
    assert kinds.kinds_in(tmp_path) == {"serve"}
    output_folder.check_output_dir(str(tmp_path), clean=False, goes_on=kinds.holds("serve"), kind="serve")
    with pytest.raises(ConfigError, match="no run of primerl wrote"):
        output_folder.check_output_dir(str(tmp_path), clean=True, kind="serve")


def emptied(folder: Path, kind: str) -> None:
    with output_folder.claimed(str(folder), clean=True, kind=kind):
        pass


def contents(folder: Path, *, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if name.split("/")[0] not in but}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("kind", LEFT)
@pytest.mark.parametrize("clean", [False, True])
def test_what_another_command_has_left_is_neither_continued_nor_deleted(
    left: str, kind: str, clean: bool, tmp_path: Path
) -> None:
    fill(tmp_path, *NOTES, *LEFT[left])
    assert kinds.kinds_in(tmp_path) == {left}
    before = contents(tmp_path)

    def check() -> None:
        output_folder.check_output_dir(str(tmp_path), clean=clean, goes_on=kinds.holds(kind), kind=kind)

    if kind == left:
        check()
        return
    with pytest.raises(ConfigError) as refused:
        check()
    assert str(refused.value) == (
        f"output_dir: {tmp_path} holds {kinds.TITLES[left]}, which `primerl {kind}` neither resumes nor deletes; "
        "choose another --output-dir"
    )
    with pytest.raises(ConfigError, match="neither resumes nor deletes"):
        emptied(tmp_path, kind)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", LEFT)
def test_a_command_begins_where_another_one_was_only_tried(kind: str, tmp_path: Path) -> None:
    fill(tmp_path, *NOTES, "configs/sft.toml", "configs/rl.toml", "configs/job.toml", "configs/inference.toml")
    output_folder.check_output_dir(str(tmp_path), clean=False, goes_on=kinds.holds(kind), kind=kind)
    with output_folder.claimed(str(tmp_path), clean=False, kind=kind):
        # A job that is put back into the queue reads its own.
        assert {"job.toml", "inference.toml"} <= set(os.listdir(tmp_path / "configs"))
        fill(tmp_path, *LEFT[kind])
    # What was tried there is not taken for what was done there.
    others = kinds.kinds_in(tmp_path) - {kind}
    assert not others


def engines(folder: Path, **more: Any) -> InferenceRunConfig:
    model = folder.with_name("model")
    if not model.exists():
        write_model(model, seed=3)
    return InferenceRunConfig(model={"path": str(model)}, output_dir=str(folder), replicas=2, **more)


def search(folder: Path) -> None:
    from primerl.gepa import search

    values = {"model": "served", "base_url": "http://127.0.0.1:1/v1", "env": [{"id": "reverse-text"}]}
    search.run(GepaConfig.model_validate({**values, "output_dir": str(folder)}), print)


def start_serve(folder: Path) -> None:
    from primerl.config.schema.serve import ServeConfig
    from primerl.tinker.serve import serve

    serve(ServeConfig(model={"path": "m"}, output_dir=str(folder)))


STARTS: dict[str, Callable[[Path], Any]] = {
    "serve": start_serve,
    "inference": lambda folder: inference_run.run(engines(folder), print),
    "gepa": search,
}


@pytest.mark.parametrize("kind", STARTS)
def test_a_folder_of_strangers_is_left_alone(kind: str, tmp_path: Path) -> None:
    """A start would make it one that a later --clean-output-dir empties."""
    pytest.importorskip({"serve": "tinker", "gepa": "gepa"}.get(kind, "primerl"))
    folder = tmp_path / "mine"
    fill(folder, "thesis.tex")
    with pytest.raises(ConfigError, match=r"^output_dir: .* holds files that no run of primerl wrote, and --clean"):
        STARTS[kind](folder)
    assert contents(folder) == {"thesis.tex": b"thesis.tex of the run before\n"}
    (folder / "thesis.tex").unlink()
    fill(folder, *NOTES, *LEFT["sft"])
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"holds a supervised fine-tuning .* neither resumes nor deletes"):
        STARTS[kind](folder)
    assert contents(folder) == before


def test_a_log_of_what_starts_the_run_is_in_no_way_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, start = tmp_path / "run", tuning(tmp_path)
    logs = ("slurm-12.out", "job.err", "nohup.out", "train.log", ".DS_Store", ".gitignore")
    fill(folder, *logs)
    kept = contents(folder)
    for kind in LEFT:
        output_folder.check_output_dir(str(folder), clean=False, kind=kind)
    assert start("--dry-run") == 0
    assert start() == 0
    assert start("--clean-output-dir", "--dry-run") == 2  # a dry run deletes nothing
    assert start("--clean-output-dir", "--max-steps", "1") == 0
    assert (folder / "weights" / "step_1").is_dir()
    assert {name: text for name, text in contents(folder).items() if name in logs} == kept
    other = tmp_path / "other"
    (other / "notes.log").mkdir(parents=True)
    assert start("--output-dir", str(other)) == 2
    assert "holds files that no run of primerl wrote" in capsys.readouterr().err


def test_names_alone_make_no_folder_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Projects have files of such names; a start would leave a lock, by which --clean-output-dir deletes them."""
    folder, start = tmp_path / "run", tuning(tmp_path)
    fill(folder, "configs/sft.toml", "configs/rl.toml", "gepa.json", "journal/notes.snapshot", "states/a/old_weights/x")
    assert kinds.kinds_in(folder) == {"sft", "rl"}
    before = contents(folder)
    (folder / "checkpoints" / "step_5").mkdir(parents=True)
    for kind in LEFT:
        for clean in (False, True):
            with pytest.raises(ConfigError, match=r"no run of primerl wrote|neither resumes nor deletes"):
                output_folder.check_output_dir(str(folder), clean=clean, goes_on=lambda _: True, kind=kind)
    for arguments in (RESUME, [*RESUME, "--dry-run"], ["--dry-run"], ["--clean-output-dir"]):
        assert start(*arguments) == 2
        assert "holds files that no run of primerl wrote" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("left", [(), ("run/launcher.lock",), ("run/state/runs.db", "run/launcher.lock")])
def test_a_start_that_was_killed_at_once_is_in_the_way_of_none(left: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fill(tmp_path, *left)
    for kind in LEFT:
        output_folder.check_output_dir(str(tmp_path), clean=False, kind=kind)
        with output_folder.claimed(str(tmp_path), clean=False, kind=kind):
            pass


def test_a_restored_checkpoint_is_resumed_without_its_config(tmp_path: Path) -> None:
    tune, folder = tuning(tmp_path), tmp_path / "run"
    assert tune() == 0
    for name in ("configs", "run", "logs"):
        shutil.rmtree(folder / name)
    assert tune(*RESUME, "--max-steps", "3") == 0
    assert (folder / "weights" / "step_3").is_dir()


@pytest.mark.parametrize("clean", [False, True])
def test_each_command_asks_whose_folder_it_is(clean: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    given: dict[str, Any] = {"output_dir": str(folder), "clean_output_dir": clean}
    fill(folder, *NOTES, *LEFT["sft"])
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"^output_dir: .* holds a supervised .*`primerl rl` neither resumes"):
        training._output_dir(RLConfig.model_validate({**RL, **given}))
    with pytest.raises(ConfigError, match=r"^output_dir: .* holds a supervised .*`primerl eval` neither resumes"):
        preflight._check_output_dir(eval_config(**given))
    assert contents(folder) == before
    shutil.rmtree(folder)
    fill(folder, *NOTES, *LEFT["eval"])
    before = contents(folder)
    assert tuning(tmp_path)(*(["--clean-output-dir"] if clean else RESUME)) == 2
    assert "holds an evaluation (`primerl eval`), which `primerl sft` neither" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("given", "said", "key"),
    [
        ({"max_tokens": 3000}, r"\(3000\) asks for 16384 tokens .*; lower it, or set seq_len", "max_tokens"),
        ({"seq_len": 4096}, r"seq_len \(4096\) is above what the model", "seq_len"),
    ],
)
def test_what_asks_for_more_than_a_model_attends_to_is_named(
    given: dict[str, Any], said: str, key: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_model(folder)
    values = {"model": str(folder), "output_dir": str(tmp_path / "out"), "env": [{"id": "reverse-text"}], **given}
    with pytest.raises(ConfigError, match=said) as refused:
        preflight._check_model(EvalConfig.model_validate(values))
    assert refused.value.keys == (key,)


def test_a_dry_run_leaves_a_run_that_has_lost_its_journal(tmp_path: Path) -> None:
    fill(tmp_path, "configs/rl.toml", "checkpoints/step_3/complete", "checkpoints/step_3/orchestrator/0.snapshot")
    assert output_folder.can_go_on(tmp_path)
    before, output = contents(tmp_path), io.StringIO()
    config = RLConfig.model_validate({**RL, "output_dir": str(tmp_path)})
    assert launch_run.end_dry_run(config, tmp_path, Console(output), {}, cast("Any", None)) == 0
    assert "whose configs are left as they are" in output.getvalue()
    assert contents(tmp_path) == before


def test_a_start_that_changes_nothing_leaves_the_configs(tmp_path: Path, state: Path) -> None:
    config = RLConfig.model_validate({**RL, "output_dir": str(tmp_path / "run")})
    folder = tmp_path / "run"
    fill(folder, "configs/rl.toml", "configs/trainer.toml", "configs/monitor.toml")
    begin(config, folder, print, goes_on=False)
    before = contents(folder)

    def start(code: int = 2, *, error: Exception | None = None, **how: bool) -> dict[str, bytes]:
        with registered(config, folder, print, goes_on=True) as session:
            for name in ("rl.toml", "monitor.toml", "env_1.toml"):
                (folder / "configs" / name).write_text("new")
            session.exit_code = code
            for name, value in how.items():
                setattr(session, name, value)
            if error is not None:
                raise error
        return contents(folder)

    assert start() == before
    for error in (ConfigError.at("seed", "no"), RefusedError("no", "seed")):
        with pytest.raises(type(error)):
            start(1, error=error)
        assert contents(folder) == before
        with Registry() as registry:
            (noted,) = registry.all()
        assert noted.exit_code is None
    # The monitors have sent by the new one.
    assert start(0, did_nothing=True) == before | {"configs/monitor.toml": b"new"}
    # An orchestrator that was killed, and could not be started again: what was trained was trained by the new ones.
    changed = start(2, has_begun=True)
    assert {changed[f"configs/{name}.toml"] for name in ("rl", "monitor", "env_1")} == {b"new"}
    with Registry() as registry:
        assert registry.all()[0].exit_code == 2


def test_configs_of_a_first_start_stay_to_be_looked_at(tmp_path: Path, state: Path) -> None:
    config = RLConfig.model_validate({**RL, "output_dir": str(tmp_path)})
    with registered(config, tmp_path, print, goes_on=True) as session:
        fill(tmp_path, "configs/rl.toml")
        session.exit_code = 2
    assert (tmp_path / "configs" / "rl.toml").is_file()


# Supervised fine-tuning


def tuning(tmp_path: Path, **more: Any) -> Callable[..., int]:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": "b" * many} for many in range(1, 9)))
    given = settings(tmp_path, output_dir=str(tmp_path / "run"), max_steps=2, ckpt={"interval": 1}, **more)
    (tmp_path / "sft.toml").write_text(tomli_w.dumps(given))
    return lambda *arguments: main(["sft", "@", str(tmp_path / "sft.toml"), *arguments])


def noted() -> tuple[Any, str]:
    with Registry() as registry:
        (run,) = registry.all()
    return run, run.config.read_text()


RESUME = ("--ckpt.resume-step", "-1")


def test_a_fine_tuning_keeps_its_config_unless_it_trains(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune, folder = tuning(tmp_path), tmp_path / "run"
    assert tune("--dry-run") == 0
    assert tune() == 0
    before, listed = contents(folder, but=OF_A_START), noted()
    changed = ("--optim.lr", "0.25")

    # It is over.
    assert tune(*RESUME, *changed) == 0
    assert contents(folder, but=OF_A_START) == before
    assert noted() == listed
    # A dry run.
    capsys.readouterr()
    assert tune(*RESUME, *changed, "--dry-run") == 0
    assert f"a start resumes the run in {folder}, whose configs are left as they are" in capsys.readouterr().out
    assert contents(folder, but=OF_A_START) == before
    # Refused by the trainer.
    assert tune(*RESUME, *changed, "--data.seed", "5", "--max-steps", "3") == 2
    assert contents(folder, but=OF_A_START) == before
    assert noted() == listed
    # It trains.
    assert tune(*RESUME, *changed, "--max-steps", "3") == 0
    config = tomllib.loads((folder / "configs" / "sft.toml").read_text())
    assert (config["optim"]["lr"], config["max_steps"]) == (0.25, 3)
    assert "max_steps = 3" in noted()[1]

    # So does one that is refused after a step, as for a checkpoint that it cannot write.
    def refused_later(*_: Any) -> int:
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 4}\n')
        return 2

    with monkeypatch.context() as patched:
        patched.setattr("primerl.cli.sft._train", refused_later)
        assert tune(*RESUME, "--optim.lr", "0.375", "--max-steps", "5") == 2
    assert tomllib.loads((folder / "configs" / "sft.toml").read_text())["optim"]["lr"] == 0.375
    # So does one that goes back, and has no step left to train.
    assert tune("--ckpt.resume-step", "2", "--max-steps", "2", "--optim.lr", "0.5") == 0
    assert tomllib.loads((folder / "configs" / "sft.toml").read_text())["optim"]["lr"] == 0.5


# Evaluations


def evaluated(folder: Path, program: str | None, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[int, str]:
    """Exit code and output of a start whose processes run this program of Python."""
    monkeypatch.setattr(
        commands, "command_of", lambda process: Command([sys.executable, "-c", program or ""], os.environ, process.log)
    )
    output = io.StringIO()
    config = eval_config(output_dir=str(folder), concurrency=7, **more)
    code = evaluation._measure(config, Console(output), {"a": {}}, LocalPlacement(), None)
    return code, output.getvalue()


def begun_evaluation(folder: Path) -> dict[str, bytes]:
    fill(folder, *NOTES[:1], *LEFT["eval"], "logs/orchestrator.log")
    run_file.write(eval_config(output_dir=str(folder)))
    return contents(folder, but=OF_A_START)


@pytest.mark.processes
def test_an_evaluation_that_is_refused_keeps_its_configs(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun_evaluation(tmp_path)
    says = "import sys; sys.exit(print('error: batch_size = 32, and now batch_size = 64') or 2)"
    code, output = evaluated(tmp_path, says, monkeypatch)
    assert (code, "the orchestrator refuses the run: batch_size = 32" in output) == (2, True)
    after = contents(tmp_path, but=OF_A_START)
    assert {name: after[name] for name in before} == before
    assert {name for name in after if name.startswith("configs/")} == {
        name for name in before if name.startswith("configs/")
    }


def test_a_dry_run_leaves_the_evaluation_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = begun_evaluation(tmp_path)
    code, output = evaluated(tmp_path, None, monkeypatch, dry_run=True)
    assert (code, "whose configs are left as they are" in output) == (0, True)
    assert contents(tmp_path, but=OF_A_START) == before


# Engines, searches, jobs


def test_engines_keep_their_configs_unless_they_start(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = tmp_path / "engines", list[str]()
    # Only tried so far.
    for threads in (1, 2):
        assert inference_run.run(engines(folder, dry_run=True, threads=threads), said.append) == 0
        assert f"threads = {threads}" in (folder / "configs" / "inference_0.toml").read_text()
    fill(folder, "logs/inference_0.log")
    before = contents(folder, but=OF_A_START)
    assert inference_run.run(engines(folder, dry_run=True, threads=3), said.append) == 0
    assert said[-1].endswith("are left as they are")
    assert contents(folder, but=OF_A_START) == before
    codes = iter((2, 130))
    monkeypatch.setattr(inference_run.EngineWatch, "run", lambda *_, **__: next(codes))
    assert inference_run.run(engines(folder, threads=3), said.append) == 2
    assert contents(folder, but=OF_A_START) == before
    assert inference_run.run(engines(folder, threads=3), said.append) == 130
    assert "threads = 3" in (folder / "configs" / "inference_0.toml").read_text()


@pytest.mark.processes
def test_a_server_that_is_refused_leaves_what_is_there(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tinker")
    from primerl.config.schema.serve import ServeConfig
    from primerl.tinker import serve

    folder, model = tmp_path / "served", tmp_path / "model"
    write_model(model, seed=3)
    fill(folder, *NOTES[:1], *LEFT["serve"])
    config = ServeConfig(model={"path": str(model)}, output_dir=str(folder))
    begin(config, folder, print, goes_on=False)
    before, listed = contents(folder, but=OF_A_START), noted()
    assert serve.serve(config.model_copy(update={"dry_run": True})) == 0
    assert contents(folder, but=OF_A_START) == before

    async def refused(_: Any) -> int:
        fill(folder, "configs/inference_1.toml")
        (folder / "configs" / "inference_0.toml").write_text("new")
        raise RefusedError("there is no node")

    monkeypatch.setattr(serve._Server, "run", refused)
    with pytest.raises(ConfigError, match="there is no node"):
        serve.serve(config)
    # The base model as engines load it is made before.
    assert contents(folder, but=(*OF_A_START, "engines_model")) == before
    assert noted() == listed


def test_a_search_that_was_over_keeps_its_summary(tmp_path: Path) -> None:
    candidates = [{gepa_files.COMPONENT: text} for text in ("a", "b")]
    found = SimpleNamespace(
        candidates=candidates,
        best_idx=1,
        val_aggregate_scores=[0.0, 1.0],
        val_subscores=[{0: 0.0}, {0: 1.0}],
        parents=[[None], [0]],
        discovery_eval_counts=[0, 3],
        total_metric_calls=9,
    )
    summary = tmp_path / gepa_files.SUMMARY

    def end(**gepa: Any) -> dict[str, Any]:
        values = {"model": "served", "base_url": "http://127.0.0.1:1/v1", "env": [{"id": "reverse-text"}]}
        gepa_files.write(tmp_path, found, GepaConfig.model_validate({**values, "gepa": gepa}))
        return dict(json.loads(summary.read_text()))

    summary.write_text(json.dumps({**end(), "completed_at": "before"}))
    before = contents(tmp_path)
    assert end(max_calls=600)["completed_at"] == "before"
    assert contents(tmp_path) == before
    found.total_metric_calls = 12
    assert end(max_calls=600)["completed_at"] != "before"


def test_a_job_that_slurm_refuses_leaves_the_run(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    config = RLConfig.model_validate({**RL, "output_dir": str(folder), "slurm": {"project_dir": str(tmp_path)}})
    fill(folder, *LEFT["rl"], "configs/job.toml")
    begin(config, folder, print, goes_on=False)
    before, listed = contents(folder, but=("logs",)), noted()
    monkeypatch.setattr(submission, "_check_free", lambda _: None)

    def refuse(name: str, *arguments: str, **_: Any) -> str:
        if "--parsable" in arguments:
            raise jobs.SlurmError("the limit of jobs is reached")
        return ""

    monkeypatch.setattr(jobs, "command", refuse)
    changed = config.model_copy(update={"seed": 9})
    with pytest.raises(ConfigError, match="sbatch has refused the job: the limit"):
        submission.submit(changed, print, command="rl", goes_on=output_folder.begun_in)
    after = contents(folder, but=("logs",))
    assert {name: after.get(name) for name in before} == before
    assert noted() == listed
