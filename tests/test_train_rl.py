"""The trainer's loop against a small server that hands out prepared batches."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from end_to_end import until
from rank_helpers import Meeting, load_shards
from safetensors.torch import load_file
from settings_helpers import TRAINER, run_trainer, trainer_json
from train_helpers import AHEAD, Answer, OrchestratorDouble, Sequence, encode_batch, gone, waiting
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")

LR = 3e-3
OPTIM = {"lr": LR, "max_norm": 0.5, "weight_decay": 0.1}


def sequences(step: int, count: int = 6) -> list[Sequence]:
    """Sampled by nobody: random tokens, with plausible log-probabilities of an older policy. From the fifth on they are
    of a second environment."""
    generator = torch.Generator().manual_seed(step)

    def tokens(most: int) -> list[int]:
        size = int(torch.randint(1, most, (1,), generator=generator))
        return torch.randint(0, 256, (size,), generator=generator).tolist()

    result = []
    for index in range(count):
        prompt, sampled = tokens(9), tokens(14)
        logprobs = (-4 - 2 * torch.rand(len(sampled), generator=generator)).tolist()
        advantage, temperature = 1.0 - 0.5 * index, (1.0, 0.8)[index % 2]
        version = max(0, step - 1 - index % 2)
        sample = Sequence(prompt, sampled, logprobs, version, advantage, temperature, rollout=100 * step + index)
        sample.environment = int(index >= 4)
        result.append(sample)
    return result


def settings(double_url: str, folder: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "orchestrator_url": double_url,
        "max_steps": 3,
        "threads": 1,
        "model": {"path": str(folder)},
        "optim": OPTIM,
        "weights": {"keep_all": True},
        **changes,
    }


def whole_batch(step: int, _rank: int = 0) -> Answer:
    """Two micro-batches and an empty one."""
    samples = sequences(step)
    return 200, encode_batch(step, [samples[:4], samples[4:], []], metrics={"reward/all/mean": 0.25 * step})


def published(output_dir: Path, version: int) -> dict[str, torch.Tensor]:
    return load_shards(output_dir / "broadcasts" / f"step_{version}")


def reference_training(model: Any, steps: int) -> dict[str, torch.Tensor]:
    """The same training written out plainly: one sequence at a time, one token at a time, torch's AdamW."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if (parameter.dim() > 1) == decayed], "weight_decay": w}
        for decayed, w in ((True, 0.1), (False, 0.0))  # norms are not decayed
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), foreach=False)
    for step in range(1, steps + 1):
        samples = sequences(step)
        adamw.zero_grad()
        for sample in samples:
            token_ids = torch.tensor([sample.prompt + sample.sampled])
            logprobs = (model(input_ids=token_ids).logits[0] / sample.temperature).log_softmax(-1)
            for index, (token, engine) in enumerate(zip(sample.sampled, sample.logprobs, strict=True)):
                logprob = logprobs[len(sample.prompt) + index - 1, token]
                ratio = (logprob - engine).exp()
                moved = logprob.exp().item() - torch.tensor(engine).exp().item()
                keep = not (moved > 0.2 if sample.advantage > 0 else moved < -0.2)
                loss = 1e-3 * (logprob - engine) ** 2 - keep * sample.advantage * ratio
                (loss / sum(len(s.sampled) for s in samples)).backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
    return dict(model.state_dict())


def test_trains_publishes_and_saves(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def manifest_is_there(fields: dict[str, Any]) -> None:
        manifest = json.loads(Path(fields["manifest"]).read_text())
        seen.append((fields["version"], manifest["policy_version"] == fields["version"]))

    with OrchestratorDouble(whole_batch, before_weights=manifest_is_there) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    assert seen == [(0, True), (1, True), (2, True), (3, True)]
    assert double.called("/trainer/batch") == [{"step": step, "rank": 0} for step in (1, 2, 3)]
    assert all(Path(fields["manifest"]).is_absolute() for fields in double.called("/trainer/weights"))
    order = [path for path, _ in double.calls if path != "/trainer/heartbeat"]
    assert order[:4] == ["/trainer/begin", "/trainer/resume", "/trainer/weights", "/trainer/batch"]
    first = double.trainers[0]
    assert first is not None
    assert first["pid"] == os.getpid()
    assert all(trainer == first for trainer in double.trainers), "every request says whose it is"
    # Each policy follows its batch; the next batch may be asked for before it.
    asked = [index for index, path in enumerate(order) if path == "/trainer/batch"]
    told = [index for index, path in enumerate(order) if path == "/trainer/weights"]
    assert all(batch < weights for batch, weights in zip(asked, told[1:], strict=True))

    initial = load_file(folder / "model.safetensors")
    assert all(torch.equal(published(tmp_path, 0)[name], initial[name]) for name in initial)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    expected = reference_training(plain, 3)
    final = published(tmp_path, 3)
    moved = 0.0
    for name, tensor in final.items():
        assert (tensor - expected[name]).abs().max().item() <= 2e-5, name
        moved = max(moved, (tensor - initial[name]).abs().max().item())
    assert moved > 2 * LR

    saved = load_file(tmp_path / "weights" / "step_3" / "model.safetensors")
    assert all(torch.equal(saved[name], final[name]) for name in final)


def test_the_next_batch_is_fetched_beside_the_step(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch, ahead=whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "ahead")) == 0
    assert [fields["step"] for fields in double.called("/trainer/batch")] == [1]
    assert [fields["step"] for fields in double.called(AHEAD)] == [2, 3]
    answers = iter([(503, b"busy"), (0, b"")])
    with OrchestratorDouble(whole_batch, ahead=lambda step, rank: next(answers)) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "asked")) == 0
    assert [fields["step"] for fields in double.called("/trainer/batch")] == [1, 2, 3]
    one, other = published(tmp_path / "ahead", 3), published(tmp_path / "asked", 3)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_no_batch_ends_the_trainer_also_beside_the_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, answer, words in [
        ("cut", lambda step, rank: (200, whole_batch(step)[1][:-40]), "batch"),
        ("other", lambda step, rank: whole_batch(step + 1), "asked for step, rank, ranks (2, 0, 1), got (3, 0, 1)"),
    ]:
        with OrchestratorDouble(whole_batch, ahead=answer) as double:
            said = failure(settings(double.url, folder, tmp_path / name), capsys)
        assert words in said
        # Nothing was trained with it, and it is not asked for again.
        assert [fields["step"] for fields in double.called("/trainer/batch")] == [1]
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1]


def test_a_checkpoint_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    """Stopped after step 3, gone on from step 2: the same weights, bit for bit, and the same lines of metrics."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, whole, max_steps=4)) == 0
    saves = {"interval": 2}
    with OrchestratorDouble(lambda step, rank: whole_batch(step) if step < 4 else gone()) as double:
        assert run_trainer(settings(double.url, folder, halves, max_steps=4, ckpt=saves)) == 0
        assert double.called("/trainer/checkpoint") == [{"step": 2, "saved": 2}]
    assert [path.name for path in (halves / "checkpoints").iterdir()] == ["step_2"]
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, halves, max_steps=4, ckpt=saves)) == 0
        assert double.called("/trainer/resume") == [{"step": 2}]
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [2, 3, 4]
        assert [fields["step"] for fields in double.called("/trainer/batch")] == [3, 4]
        assert double.called("/trainer/checkpoint") == [{"step": 4, "saved": 4}]
    for version in (3, 4):
        one, other = published(whole, version), published(halves, version)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert timeless(whole) == timeless(halves)
    assert [path.name for path in (halves / "checkpoints").iterdir()] == ["step_4"]


def test_without_an_interval_there_is_one_checkpoint_at_the_end(folder: Path, tmp_path: Path) -> None:
    """With which the same command and more steps go on."""
    for max_steps, trained in ((2, [1, 2]), (3, [3])):
        with OrchestratorDouble(whole_batch) as double:
            assert run_trainer(settings(double.url, folder, tmp_path, max_steps=max_steps, ckpt={})) == 0
            assert [fields["step"] for fields in double.called("/trainer/batch")] == trained
            assert double.called("/trainer/checkpoint") == [{"step": max_steps, "saved": max_steps}]
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{max_steps}"]


def timeless(output: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on the clock."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if "time" not in key and "perf/" not in key} for line in lines]


def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "checkpoints" / "step_7" / "trainer" / "state.pt"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"no checkpoint")
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 1
    said = capsys.readouterr().out
    assert f"{state} cannot be read" in said
    assert "to resume from the checkpoint before it" in said


def test_metrics(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path, max_steps=2, environments=["reverse"], ckpt={"interval": 5})
        assert run_trainer(values) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["reward/all/mean"] for line in lines] == [0.25, 0.5]
    names = (
        "mismatch_kl/all/mean entropy/all/mean loss/mean optim/grad_norm optim/lr time/step time/wait_for_batch "
        "time/forward_backward time/broadcast perf/throughput masked_advantage_positive/mean "
        "masked_advantage_negative/mean mismatch_kl/all/std mismatch_kl/all/max mismatch_kl/reverse/mean "
        "mismatch_kl/reverse/std mismatch_kl/reverse/max entropy/reverse/mean optim/zero_grad_ratio "
        "perf/throughput_per_gpu perf/peak_memory masked/staleness_0/mean time/save_ckpt time/wait_for_ckpt"
    )
    for name in names.split():
        assert all(isinstance(line[name], float) for line in lines), name
    assert isinstance(lines[1]["mismatch_kl/staleness_1/mean"], float)
    beside = ("time/step", "time/broadcast_thread")
    parts = sum(value for name, value in lines[1].items() if name.startswith("time/") and name not in beside)
    assert parts <= lines[1]["time/step"] * 1.001
    tokens = [sum(len(sample) for sample in sequences(step)) for step in (1, 2)]
    assert lines[1]["progress/num_tokens"] == sum(tokens)
    assert lines[1]["progress/num_samples"] == 12
    # One that has no name goes by its number.
    own = sum(len(sample) for step in (1, 2) for sample in sequences(step)[:4])
    assert lines[1]["progress/reverse/ratio_samples"] == 8 / 12
    assert lines[1]["progress/environment_1/ratio_samples"] == 4 / 12
    assert lines[1]["progress/reverse/ratio_tokens"] == own / sum(tokens)
    assert lines[1]["progress/environment_1/ratio_tokens"] == (sum(tokens) - own) / sum(tokens)
    assert lines[1]["perf/throughput"] == pytest.approx(tokens[1] / lines[1]["time/step"])
    assert lines[1]["perf/throughput_per_gpu"] == lines[1]["perf/throughput"]
    assert lines[1]["staleness/all/mean"] == 0.5
    assert [line["time/save_ckpt"] > 0 for line in lines] == [False, True], "at the end"
    assert [line["time/wait_for_ckpt"] > 0 for line in lines] == [False, True]
    assert "perf/mfu" not in lines[1], "nothing is known of a CPU's peak"
    assert lines[1]["mismatch_kl/all/max"] >= lines[1]["mismatch_kl/all/mean"]
    assert 0.0 <= lines[1]["optim/zero_grad_ratio"] < 1.0
    assert lines[1]["optim/lr"] == LR
    assert 3.0 < lines[0]["entropy/all/mean"] < 6.0


def test_a_checkpoint_that_did_not_tell_environments_apart(folder: Path, tmp_path: Path) -> None:
    """Goes on; shares are of what is trained from there on."""
    with OrchestratorDouble(lambda step, rank: whole_batch(step) if step < 2 else gone()) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, max_steps=2, ckpt={"interval": 1})) == 0
    path = tmp_path / "checkpoints" / "step_1" / "trainer" / "state.pt"
    state = torch.load(path, weights_only=True)
    first = [sum(len(sample) for sample in part) for part in (sequences(1)[:4], sequences(1)[4:])]
    assert state.pop("environments") == {"environment_0": [4, first[0]], "environment_1": [2, first[1]]}
    # Nor did it write what is checked, nor random numbers beside the tensors.
    del state["model_config"]
    state["rng"] = {}
    torch.save(state, path)
    (tmp_path / "checkpoints" / "step_1" / "sums.json").unlink()
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, max_steps=2)) == 0
    line = timeless(tmp_path)[1]
    own, other = (sum(len(sample) for sample in part) for part in (sequences(2)[:4], sequences(2)[4:]))
    assert (line["step"], line["progress/num_samples"]) == (2, 12)
    assert line["progress/environment_0/ratio_tokens"] == own / (own + other)
    assert line["progress/environment_1/ratio_samples"] == 2 / 6


def test_asks_again_after_lost_connections_errors_and_waits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [(0, b""), (503, b"busy"), waiting("rollouts of group 3"), (0, b"")]

    def batch(step: int, rank: int) -> Answer:
        return answers.pop(0) if answers else whole_batch(step, rank)

    with OrchestratorDouble(batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, max_steps=1, log={"level": "debug"})) == 0
    assert double.called("/trainer/batch") == [{"step": 1, "rank": 0}] * 5
    output = capsys.readouterr().out
    assert "503: busy" in output
    assert "waiting for batch 1: rollouts of group 3" in output


def test_ends_well_when_there_are_no_more_batches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(lambda step, rank: whole_batch(step) if step < 2 else gone("stopped by hand")) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    assert "no more batches after step 1: stopped by hand" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step_1"]


def failure(values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert run_trainer(values) == 1
    return capsys.readouterr().out


def test_unreachable_orchestrator(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:  # it holds the port, and does not listen
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        output = failure(settings(url, folder, tmp_path, orchestrator_timeout_s=0.4), capsys)
    assert f"orchestrator at {url} did not answer /trainer/begin for 0.4 s: ConnectionRefusedError" in output


def test_silent_orchestrator(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accepts connections, as a hung process still does, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        output = failure(settings(url, folder, tmp_path, orchestrator_timeout_s=0.4), capsys)
    assert "TimeoutError" in output


def test_batch_that_never_comes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with OrchestratorDouble(lambda step, rank: waiting("engine 0: not proved")) as double:
        output = failure(settings(double.url, folder, tmp_path, batch_timeout_s=0.3), capsys)
    assert "batch 1 did not come within 0.3 s; waiting for: engine 0: not proved" in output


def test_refused_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with OrchestratorDouble(whole_batch) as double:
        refusal = json.dumps({"error": {"message": "file model.safetensors is missing"}}).encode()
        answer = double.answer
        double.answer = lambda path, fields: (  # type: ignore[method-assign]
            (400, refusal) if path == "/trainer/weights" else answer(path, fields)
        )
        output = failure(settings(double.url, folder, tmp_path), capsys)
    assert "/trainer/weights refused (400): file model.safetensors is missing" in output


def test_weights_to_begin_with_that_are_refused_leave_the_metrics(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without checkpoints, resumed with another model: its lines are all that it has."""
    lines = "".join(json.dumps({"step": step, "reward/all/mean": 0.5}) + "\n" for step in (1, 2, 3))
    for name in ("metrics.jsonl", "distributions.jsonl"):
        (tmp_path / name).write_text(lines)
    error = json.dumps({"error": {"message": "version 0 was published before, with other weights"}}).encode()
    with OrchestratorDouble(whole_batch, before_weights=lambda _: (409, error)) as double:
        given = settings(double.url, folder, tmp_path, distributions_interval=1)
        assert "published before, with other weights" in failure(given, capsys)
    for name in ("metrics.jsonl", "distributions.jsonl"):
        assert (tmp_path / name).read_text() == lines


def test_loss_that_is_not_finite_names_step_and_rollouts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def batch(step: int, _rank: int) -> Answer:
        samples = sequences(step)
        if step == 2:
            # Likelier to the trainer than it was to the engine, and to be made less likely: not masked.
            samples[3].logprobs = [-25.0] * len(samples[3].sampled)
            samples[3].advantage = -3e38
        return 200, encode_batch(step, [samples[:2], samples[2:4], samples[4:]])

    with OrchestratorDouble(batch) as double:
        output = failure(settings(double.url, folder, tmp_path), capsys)
    assert "TrainingDiverged: step 2: the loss is inf; rollouts 203; the batch is in " in output
    kept = tmp_path / "diverged" / "step_2_rank_0" / "batch.msgpack"
    assert str(kept) in output
    assert kept.read_bytes() == batch(2, 0)[1]
    assert not (tmp_path / "broadcasts" / "step_2").exists()
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("logprob", [-100.0, -1e30])
@pytest.mark.parametrize("everything", [False, True])
def test_a_rollout_whose_logprobs_cannot_be_the_engines_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], logprob: float, everything: bool
) -> None:
    """The step is that of the others, and the run continues."""

    def batch(step: int, wrong: float | None) -> bytes:
        samples = sequences(step)
        for index, sample in enumerate(samples):
            if step == 2 and (everything or index == 3):
                sample.advantage = 0.0 if wrong is None else -1.0
                # One token is enough.
                sample.logprobs[-1] = sample.logprobs[-1] if wrong is None else wrong
        return encode_batch(step, [samples[:2], samples[2:4], samples[4:]])

    with OrchestratorDouble(lambda step, _: (200, batch(step, logprob))) as double:
        assert run_trainer(settings(double.url, folder, tmp_path)) == 0
    output = capsys.readouterr().out
    named = ["200, 201", "202, 203", "204"] if everything else ["203"]
    for rollouts in named:
        assert f"step 2: rollouts {rollouts}" in output
    assert output.count("are discarded") == len(named)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(math.isfinite(value) for line in metrics for value in line.values() if isinstance(value, float))
    if everything:
        before, after = published(tmp_path, 1), published(tmp_path, 2)
        assert all(bool(tensor.isfinite().all()) for tensor in after.values())
        assert before.keys() == after.keys()


def test_trains_in_bfloat16_with_a_loss_optimizer_and_schedule_of_choice(folder: Path, tmp_path: Path) -> None:
    """Stopped after step 2 and gone on: the same weights, bit for bit."""
    changes = {
        "dtype": "bfloat16",
        "max_steps": 4,
        "activation_checkpointing": "full",
        "loss": {"type": "clip", "args": {"dual_clip": 3.0}, "entropy_weight": 0.01},
        "optim": {"type": "muon", "lr": LR, "schedule": "cosine", "warmup_steps": 1},
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, whole, **changes)) == 0
    with OrchestratorDouble(lambda step, rank: whole_batch(step) if step < 3 else gone()) as double:
        assert run_trainer(settings(double.url, folder, halves, **changes, ckpt={"interval": 2})) == 0
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, halves, **changes, ckpt={"interval": 2})) == 0
        assert [fields["step"] for fields in double.called("/trainer/batch")] == [3, 4]
    one, other = published(whole, 4), published(halves, 4)
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], published(whole, 3)[name]) for name in one)
    assert timeless(whole) == timeless(halves)


def test_a_checkpoint_of_another_optimizer_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path, max_steps=1, ckpt={"interval": 1})) == 0
        output = failure(settings(double.url, folder, tmp_path, optim={"type": "sgd", "lr": LR}), capsys)
    assert "CheckpointError: the checkpoint of step 1 is of the optimizer 'adamw', and optim.type is 'sgd'" in output


def test_a_teacher_without_its_column_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch) as double:
        output = failure(settings(double.url, folder, tmp_path, loss={"ref_kl_weight": 1.0}), capsys)
    assert "BatchError: loss.ref_kl_weight is set, but the batch has no column teacher_logprobs" in output


def test_weights_that_are_not_finite_are_not_published(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The loss and the gradient of the first step are those of sound weights.
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path, optim={"lr": 1e308}, ckpt={"interval": 1})
        output = failure(values, capsys)
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [0]
    assert "TrainingDiverged: step 1: the weights are not finite after the optimizer's step" in output
    assert "lower trainer.optim.lr" in output
    assert not (tmp_path / "broadcasts" / "step_1").exists()
    assert not list((tmp_path / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (encode_batch(1, [[Sequence([1], [2], [-1.0], version=1, rollout=9)]]), "rollout 9: a policy version"),
        (encode_batch(2, [sequences(1)]), "asked for step, rank, ranks (1, 0, 1), got (2, 0, 1)"),
        (encode_batch(1, [sequences(1)], ranks=2), "data_ranks must be the trainer's ranks"),
        (b"garbage", "BatchError: not a batch"),
        (
            encode_batch(1, [sequences(1)], loss_tokens=1000),
            "tokens to train, and the batch has 1000",
        ),
    ],
)
def test_batch_that_must_not_be_trained(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes, message: str
) -> None:
    with OrchestratorDouble(lambda step, rank: (200, body)) as double:
        assert message in failure(settings(double.url, folder, tmp_path), capsys)
    assert not (tmp_path / "broadcasts" / "step_1").exists()


def test_bad_settings_end_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output_dir = tmp_path / "run"
    values = settings("http://127.0.0.1:1", tmp_path, output_dir)
    assert run_trainer({**values, "optimizer": {}}) == 2
    assert "optimizer: unknown key" in capsys.readouterr().err
    assert run_trainer({**values, "orchestrator_url": "127.0.0.1:8000"}) == 2
    assert "orchestrator_url is '127.0.0.1:8000'; it must look like" in capsys.readouterr().err
    assert run_trainer(values) == 2
    assert "has no config.json" in capsys.readouterr().out
    assert not output_dir.exists()


@contextmanager
def started(values: dict[str, Any], **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The trainer as a process of its own, which does not outlive the block."""
    # Under nohup it would inherit that SIGHUP is ignored.
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {TRAINER}"
    process = subprocess.Popen(
        [sys.executable, "-c", program, trainer_json(values)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.timeout(400)  # starts three times what imports torch
@pytest.mark.parametrize("seed", [int(os.environ.get("PRIMERL_TEST_SEED", "1"))])
def test_a_trainer_killed_at_random_moments_goes_on_bit_by_bit(folder: Path, tmp_path: Path, seed: int) -> None:
    """With the same batches: all weights that were published and all metrics are those of a run that was not."""
    steps, ckpt, generator = 24, {"interval": 3}, random.Random(seed)
    whole, output = tmp_path / "whole", tmp_path / "killed"
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, whole, max_steps=steps)) == 0
    lines = output / "metrics.jsonl"

    def killed(after: int) -> None:
        """Once so many lines are written. It gets little further while it is looked at."""

        def batch(step: int, _rank: int) -> Answer:
            return whole_batch(step) if step <= after + 2 else waiting("nothing, it is to be killed")

        with (
            OrchestratorDouble(batch) as double,
            started(settings(double.url, folder, output, max_steps=steps, ckpt=ckpt)) as process,
        ):

            def is_far_enough() -> bool:
                assert process.poll() is None, process.communicate()
                return lines.exists() and lines.read_bytes().count(b"\n") >= after

            until(is_far_enough, 150, f"{after} lines of metrics")
            time.sleep(generator.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL

    first = generator.randint(1, 9)
    killed(first)
    # Again, after it went on: further than it has come, and than the first checkpoint.
    killed(first + generator.randint(6, 12))
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, output, max_steps=steps, ckpt=ckpt)) == 0
        (resumed,) = double.called("/trainer/resume")
    assert 0 < resumed["step"] < steps
    assert timeless(output) == timeless(whole)
    for version in range(steps + 1):
        one, other = published(whole, version), published(output, version)
        assert all(torch.equal(one[name], other[name]) for name in one), version


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_a_wait_at_once_and_cleanly(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    asked, over = threading.Event(), threading.Event()

    def batch(_step: int, _rank: int) -> Answer:
        asked.set()
        over.wait(60)
        return gone()

    with OrchestratorDouble(batch) as double, started(settings(double.url, folder, tmp_path)) as process:
        assert asked.wait(80)
        process.send_signal(number)
        output, _ = process.communicate(timeout=150)
        over.set()
    assert process.returncode == 128 + number, output
    assert f"stopped by {number.name}" in output
    assert "Traceback" not in output
    assert sorted(path.name for path in (tmp_path / "broadcasts").iterdir()) == ["LATEST", "step_0"]
    beats = [fields["doing"].split("; in the background ")[0] for fields in double.called("/trainer/heartbeat")]
    doing = [beat.split(" (for ")[0] for beat in beats]
    assert doing
    assert set(doing) <= {
        "starting",
        "loading the model",
        "publishing the weights of policy 0",
        "waiting for the batch",
    }


@pytest.mark.processes
@pytest.mark.timeout(300)  # two more processes import torch, on what may be a busy machine
def test_two_ranks_train_what_one_trains(folder: Path, tmp_path: Path) -> None:
    def share(step: int, rank: int) -> Answer:
        """Rank 1 has one micro-batch of the first step only, and nothing to train in the second."""
        samples = sequences(step)
        loss_tokens = sum(len(sample.sampled) for sample in samples)
        first, second = (samples[:4], samples[4:]) if step == 1 else (samples, [])
        return 200, encode_batch(step, [(first, second)[rank]], rank=rank, ranks=2, loss_tokens=loss_tokens)

    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "one", max_steps=2)) == 0
    with OrchestratorDouble(share) as double:
        values = settings(double.url, folder, tmp_path / "two", max_steps=2, ranks=2)
        meeting = Meeting()
        shared = {"WORLD_SIZE": "2"} | meeting.environment
        with started(values, RANK="0", **shared) as leader, started(values, RANK="1", **shared) as follower:
            ranks = [leader, follower]
            outputs = [process.communicate(timeout=200)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    one, two = (published(tmp_path / name, 2) for name in ("one", "two"))
    assert all((one[name] - two[name]).abs().max().item() <= 1e-5 for name in one)
    assert [fields["version"] for fields in double.called("/trainer/weights")] == [0, 1, 2]
    for alone, shared_out in zip(timeless(tmp_path / "one"), timeless(tmp_path / "two"), strict=True):
        assert alone.pop("reward/all/mean"), "which came with the batch of one rank only"
        assert shared_out == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_heartbeat_tells_what_the_trainer_does(tmp_path: Path) -> None:
    from primerl.train.loop.client import Heartbeat

    beats: list[dict[str, Any]] = []
    changed = threading.Event()

    class Double(OrchestratorDouble):
        def answer(self, path: str, fields: dict[str, Any]) -> Answer:
            beats.append(fields)
            if fields["doing"] == "optimizer":
                changed.set()
            # The first beats fail: the thread goes on.
            return (500, b"") if len(beats) < 3 else (200, msgpack.packb({}))

    with Double(whole_batch) as double:
        heartbeat = Heartbeat(double.url, interval_s=0.05)
        heartbeat.doing(4, "optimizer")
        assert changed.wait(20)
        heartbeat.leave()
        heartbeat.close()
    assert {"step": 4, "doing": "optimizer", "leaving": False} in beats
    assert beats[-1] == {"step": 4, "doing": "finished", "leaving": True}
    assert not any(beat["leaving"] for beat in beats[:-1])


def test_heartbeat_says_how_long_the_trainer_has_been_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl.train.loop import client

    monkeypatch.setattr(client, "_LONG_S", 0.0)
    beaten = threading.Event()
    beats: list[str] = []

    class Double(OrchestratorDouble):
        def answer(self, path: str, fields: dict[str, Any]) -> Answer:
            beats.append(fields["doing"])
            beaten.set()
            return 200, msgpack.packb({})

    with Double(whole_batch) as double:
        heartbeat = client.Heartbeat(double.url, interval_s=0.05)
        assert beaten.wait(20)
        heartbeat.close()
        silent = client.Heartbeat(double.url, interval_s=0.05, active=False)
        silent.close()
    assert beats[0] == "starting (for 0 s)"


def test_going_back_to_a_chosen_step_sets_the_later_ones_aside(folder: Path, tmp_path: Path) -> None:
    """The same batches give the same weights and metrics, bit for bit."""
    ckpt = {"interval": 1, "keep_last": 3}
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(settings(double.url, folder, tmp_path / "whole", max_steps=4, ckpt=ckpt)) == 0
        # Batches after the oldest checkpoint that is kept stay with the orchestrator.
        assert [fields["step"] for fields in double.called("/trainer/checkpoint")] == [1, 1, 1, 2]
    checkpoints = tmp_path / "whole" / "checkpoints"
    before, lines = published(tmp_path / "whole", 4), timeless(tmp_path / "whole")
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path / "whole", max_steps=4, ckpt={**ckpt, "resume_step": 2})
        assert run_trainer(values) == 0
        assert double.called("/trainer/resume") == [{"step": 2}]
        assert [fields["step"] for fields in double.called("/trainer/batch")] == [3, 4]
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        *("replaced_step_3", "replaced_step_4", "step_2", "step_3", "step_4"),
    ]
    assert (tmp_path / "whole" / "weights" / "replaced_step_4").is_dir()
    after = published(tmp_path / "whole", 4)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert timeless(tmp_path / "whole") == lines


def test_a_second_trainer_ends_before_it_has_loaded_or_told_anything(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch) as double:
        refusal = json.dumps({"error": {"message": "this run has a trainer: process 7 on node-a"}}).encode()
        answers = iter([waiting("a sign of the run's trainer"), (409, refusal)])
        double.answer = lambda path, fields: next(answers)  # type: ignore[method-assign]
        assert "this run has a trainer: process 7 on node-a" in failure(settings(double.url, folder, tmp_path), capsys)
        assert next(answers, None) is None, "nothing else was said"
    assert not (tmp_path / "broadcasts").exists()


def test_a_step_that_cannot_be_gone_back_to_leaves_the_run_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path, ckpt={"interval": 1, "keep_last": 2})
        assert run_trainer(values) == 0
        answer = double.answer
        refusal = json.dumps({"error": {"message": "batches before step 4 are gone"}}).encode()
        double.answer = lambda path, fields: (  # type: ignore[method-assign]
            (409, refusal) if path == "/trainer/resume" else answer(path, fields)
        )
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        lines = (tmp_path / "metrics.jsonl").read_text()
        for step, message in ((2, "batches before step 4 are gone"), (1, "no checkpoint of step 1 in")):
            assert message in failure({**values, "ckpt": {**values["ckpt"], "resume_step": step}}, capsys)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names == ["step_2", "step_3"]
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_each_checkpoint_has_its_model_folder(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path, max_steps=5, ckpt={"interval": 2, "keep_last": 2})
        assert run_trainer(values) == 0
    for kind in ("checkpoints", "weights"):
        assert sorted(path.name for path in (tmp_path / kind).iterdir()) == ["step_4", "step_5"]
    for step in (4, 5):
        saved = load_file(tmp_path / "weights" / f"step_{step}" / "model.safetensors")
        broadcast = published(tmp_path, step)
        assert saved.keys() == broadcast.keys()
        assert all(torch.equal(saved[name], broadcast[name]) for name in saved)
    with OrchestratorDouble(whole_batch) as double:
        output = tmp_path / "last"
        ckpt = {"interval": 2, "keep_last": 2, "weights": {"only_last": True}}
        assert run_trainer(settings(double.url, folder, output, max_steps=5, ckpt=ckpt)) == 0
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_4", "step_5"]
    assert [path.name for path in (output / "weights").iterdir()] == ["step_5"]


def test_weights_only(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        values = settings(double.url, folder, tmp_path, max_steps=5, ckpt={"interval": 2, "weights_only": True})
        assert run_trainer({**values, "ckpt": {**values["ckpt"], "keep_last": 2}}) == 0
        assert double.called("/trainer/checkpoint") == []
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step_4", "step_5"]
    assert not (tmp_path / "checkpoints").exists()
    saved, broadcast = load_file(tmp_path / "weights" / "step_4" / "model.safetensors"), published(tmp_path, 4)
    assert all(torch.equal(saved[name], broadcast[name]) for name in saved)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["time/save_ckpt"]] == [2, 4, 5]
    # Started again it begins anew.
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer({**values, "orchestrator_url": double.url, "max_steps": 1}) == 0
        assert double.called("/trainer/resume") == [{"step": 0}]
