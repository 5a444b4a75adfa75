"""Whole runs that learn from a teacher: it scores what the policy samples, or answers in its place."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from end_to_end import EXAMPLE, Started, column, mean, primerl, read_lines, start, steps_of, until
from engine_helpers import Engine, need_vllm, running, torch_command, vllm_command
from primerl.train.data.batch import Batch, MicroBatch, decode_batch
from train_helpers import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts whole runs"),
]
STEPS, ENDLESS = 10, 5000
# Components of a loss.
KINDS = ("rl", "ce", "ref_kl")


@pytest.fixture(scope="module")
def teacher(expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("teacher")
    with running("torch", torch_command(expert, folder), expert, folder / "log") as engine:
        yield engine


def config(student: Path, output: Path, mode: str, teacher: Engine, **orchestrator: Any) -> Path:
    """The short recipe in that mode; the teacher is evaluated beside the policy."""
    values = tomllib.loads((EXAMPLE / "rl-ci.toml").read_text())
    client = {"base_url": f"{teacher.url}/v1", "model": "m"}
    values |= {"output_dir": str(output), "max_steps": STEPS, "keep_broadcasts": True}
    values["model"]["path"] = str(student)
    (own,) = values["orchestrator"]["eval"]["env"]
    values["orchestrator"]["eval"]["env"].append({**own, "name": "teacher", "client": client})
    values["orchestrator"] |= {"training_mode": mode, "teacher": {"client": client}, **orchestrator}
    file = output.with_suffix(".toml")
    file.write_text(tomli_w.dumps(values))
    return file


def run(file: Path) -> None:
    primerl("rl", "@", str(file))
    assert "every invariant holds" in primerl("trace", str(file.with_suffix("")), "--check")


def rises_to_the_teachers(output: Path) -> None:
    """At least half of the way, in exact matches."""
    lines = read_lines(output / "evals.jsonl")
    exact = {name: [line["metrics"]["exact"] for line in lines if line["environment"] == name] for name in EVALUATIONS}
    (before, after), teacher = exact["reverse-text-eval"], exact["teacher"][-1]
    assert teacher >= before + 0.2
    assert after >= (before + teacher) / 2, exact


EVALUATIONS = ("reverse-text-eval", "teacher")


def batches(output: Path) -> list[Batch]:
    return [decode_batch(path.read_bytes()) for path in sorted((output / "spool").glob("*/*.msgpack"))]


def test_on_policy_distillation(imitator: Path, expert: Path, teacher: Engine, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(config(imitator, output, "opd", teacher, group_size=1))
    rises_to_the_teachers(output)
    distance = column(output, "loss/ref_kl/mean")
    assert len(distance) == STEPS
    assert mean(distance[-3:]) < mean(distance[:3]) / 2
    is_what_the_teacher_says(expert, batches(output))
    assert "token-exact" in primerl("verify", str(output))


def is_what_the_teacher_says(expert: Path, batches: list[Batch]) -> None:
    """Each token's log-probability, by transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(expert, dtype=torch.float32)
    compared = 0
    for batch in (batches[0], batches[-1]):
        for micro_batch in batch.micro_batches:
            lengths = list(micro_batch.sequence_lengths)
            columns = (micro_batch.token_ids, micro_batch.extra["teacher_logprobs"], micro_batch.loss_mask)
            for ids, given, mask in list(zip(*(torch.split(values, lengths) for values in columns), strict=True))[:20]:
                with torch.no_grad():
                    logprobs = model(ids[None].long()).logits[0, :-1].log_softmax(-1)
                own = logprobs.gather(1, ids[1:, None].long()).squeeze(1)
                torch.testing.assert_close(given[1:], own, atol=1e-4, rtol=1e-4)
                assert given[0] == 0
                compared += int(mask.sum())
    assert compared > 100


def test_each_environment_learns_from_what_it_names(
    imitator: Path, expert: Path, teacher: Engine, tmp_path: Path
) -> None:
    """Rewards, a teacher's log-probabilities and its answers, in groups of eight, two and one, in the same batches."""
    output = tmp_path / "run"
    file = config(imitator, output, "rl", teacher, batch_size=24)
    values = tomllib.loads(file.read_text())
    orchestrator = values["orchestrator"]
    client = orchestrator.pop("teacher")
    (own,) = orchestrator["train"]["env"]
    sampling = {"temperature": 0.7}
    scored = {**own, "name": "scored", "training_mode": "opd", "teacher": client, "group_size": 2, "sampling": sampling}
    taught = {**own, "name": "taught", "training_mode": "sft", "teacher": client, "group_size": 1}
    orchestrator["train"]["env"] = [own, scored | {"ratio": 2.0}, taught | {"ratio": 4.0}]
    values["max_steps"] = 4
    file.write_text(tomli_w.dumps(values))
    run(file)
    found = batches(output)
    assert len(found) == 4
    temperatures, kinds = set[float](), list[set[str]]()
    for batch in found:
        kinds.append(set())
        for micro_batch in (own for own in batch.micro_batches if own.sequence_lengths):
            mask = micro_batch.loss_mask.float()
            weights = {name: micro_batch.extra[f"{name}_weights"] for name in KINDS}
            torch.testing.assert_close(weights["rl"] + weights["ref_kl"], mask)
            assert not (weights["ce"] * mask).any()
            kinds[-1] |= {name for name, column in weights.items() if column.any()}
            temperatures |= set(micro_batch.temperatures[weights["ref_kl"] > 0].tolist())
    assert set().union(*kinds) == set(KINDS)
    assert [round(one, 5) for one in temperatures] == [0.7]
    # Which groups are ready for a batch is a matter of time: it need not have all three.
    lines = read_lines(output / "metrics.jsonl")
    assert [{name for name in KINDS if f"loss/{name}/mean" in line} for line in lines] == kinds
    assert "token-exact" in primerl("verify", str(output))


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_as_the_teacher(imitator: Path, expert: Path, tmp_path: Path) -> None:
    need_vllm()
    output = tmp_path / "run"
    with running("vllm", vllm_command(expert, tmp_path), expert, tmp_path / "log") as teacher:
        run(config(imitator, output, "opd", teacher, group_size=1, eval={"env": []}))
    distance = column(output, "loss/ref_kl/mean")
    assert len(distance) == STEPS
    assert mean(distance[-3:]) < mean(distance[:3]) / 2
    is_what_the_teacher_says(expert, batches(output))
    assert "token-exact" in primerl("verify", str(output))


def of_several(student: Path, output: Path, teachers: list[Engine], steps: int) -> Path:
    file = config(student, output, "opd", teachers[0], group_size=1, eval={"env": []})
    values = tomllib.loads(file.read_text())
    values["max_steps"] = steps
    values["orchestrator"]["teacher"]["client"]["base_url"] = [f"{teacher.url}/v1" for teacher in teachers]
    file.write_text(tomli_w.dumps(values))
    return file


def test_teachers_that_hang_or_die_are_left_out_and_come_back(imitator: Path, expert: Path, tmp_path: Path) -> None:
    """As long as that takes: SIGINT ends the run."""
    output = tmp_path / "run"
    with contextlib.ExitStack() as started_here:
        folders = [tmp_path / name for name in ("one", "other")]
        for folder in folders:
            folder.mkdir()
        one, other = (
            started_here.enter_context(running("torch", torch_command(expert, folder), expert, folder / "log"))
            for folder in folders
        )
        started = start(output, "@", str(of_several(imitator, output, [one, other], ENDLESS)))
        log = output / "logs" / "orchestrator.log"

        def said(words: str, teacher: Engine) -> bool:
            assert started.launcher.poll() is None, started.ended(5)
            return any(words in line and teacher.url in line for line in log.read_text().splitlines())

        try:
            until(lambda: started.steps() >= 2 or started.launcher.poll() is not None, 180, "two steps")
            one.process.send_signal(signal.SIGSTOP)
            until(lambda: said("gets no requests until it answers again", one), 30, "the hung teacher's name")
            one.process.send_signal(signal.SIGCONT)
            until(lambda: said("answers again, and gets requests", one), 30, "its return")
            other.process.send_signal(signal.SIGKILL)
            until(lambda: said("gets no requests until it answers again", other), 30, "the killed teacher's name")
            steps = started.steps() + 5
            until(lambda: started.steps() >= steps or started.launcher.poll() is not None, 60, "steps with one teacher")
            assert started.launcher.poll() is None, started.ended(5)
            started.launcher.send_signal(signal.SIGINT)
            code, printed = started.ended(60)
        finally:
            one.process.send_signal(signal.SIGCONT)
            started.kill()
    assert code == 130, printed
    is_what_the_teacher_says(expert, batches(output))


def test_teachers_of_two_checkpoints_end_the_run_by_name(imitator: Path, expert: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as started_here:
        teachers = []
        for name, model in (("one", expert), ("other", imitator)):
            (tmp_path / name).mkdir()
            command = torch_command(model, tmp_path / name)
            teachers.append(started_here.enter_context(running("torch", command, model, tmp_path / name / "log")))
        said = primerl("rl", "@", str(of_several(imitator, tmp_path / "run", teachers, 5)), code=1)
    assert "so it serves another checkpoint" in said
    assert all(teacher.url in said for teacher in teachers)


def test_a_teachers_answers(imitator: Path, teacher: Engine, tmp_path: Path) -> None:
    output = tmp_path / "run"
    run(config(imitator, output, "sft", teacher))
    rises_to_the_teachers(output)
    assert len(column(output, "loss/ce/mean")) == STEPS
    # Of the same answers: which of them a step has, and how likely the teacher found them, depends on who was faster.
    before, after = (
        cross_entropy(folder, batches(output)) for folder in (imitator, output / "weights" / f"step_{STEPS}")
    )
    assert after < before
    assert column(output, "progress/num_samples")[-1] == 32 * STEPS
    # Rewards are the teacher's from the start.
    assert mean(column(output, "reward/all/mean")) > 0.9
    tokenizer = AutoTokenizer.from_pretrained(imitator)
    for batch in batches(output):
        taught = sum(int(micro_batch.extra["ce_weights"].sum()) for micro_batch in batch.micro_batches)
        assert taught == batch.loss_tokens
        for micro_batch in batch.micro_batches:
            assert not micro_batch.loss_mask.any()
            is_as_the_policy_would_write(tokenizer, micro_batch)
    assert "trained what a teacher wrote" in primerl("verify", str(output), code=2)


def is_as_the_policy_would_write(tokenizer: Any, micro_batch: MicroBatch) -> None:
    """The prompt of the run's own template, and an answer that its stop token ends."""
    lengths = list(micro_batch.sequence_lengths)
    columns = (micro_batch.token_ids, micro_batch.extra["ce_weights"])
    for ids, weights in zip(*(torch.split(values, lengths) for values in columns), strict=True):
        start = int(weights.argmax())
        assert weights.tolist() == [0.0] * start + [1.0] * (len(ids) - start)
        text = tokenizer.decode(ids[:start])
        user = text.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        asked = [{"role": "user", "content": user}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert prompt == ids[:start].tolist()
        answer = {"role": "assistant", "content": tokenizer.decode(ids[start:-1])}
        assert tokenizer.apply_chat_template([*asked, answer], tokenize=False).startswith(tokenizer.decode(ids))
        assert ids[-1] == tokenizer.eos_token_id


def test_a_teacher_that_dies_ends_the_run_by_name_and_nothing_is_lost(
    imitator: Path, expert: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with running("torch", torch_command(expert, tmp_path), expert, tmp_path / "log") as first:
        file = config(imitator, output, "opd", first, timeouts={"no_engine_s": 5.0}, eval={"env": []})
        command = [sys.executable, "-m", "primerl", "rl", "@", str(file)]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started = Started(launcher, output)
        try:
            until(lambda: started.steps() >= 2 or started.launcher.poll() is not None, 180, "two steps")
            first.process.send_signal(signal.SIGKILL)
            code, said = started.ended(30)
        finally:
            started.kill()
    assert code == 1, said
    assert "the teacher" in said
    assert "it has not answered for" in said
    # At another port, the same command goes on.
    with running("torch", torch_command(expert, tmp_path), expert, tmp_path / "log") as second:
        run(config(imitator, output, "opd", second, eval={"env": []}))
    assert steps_of(output) == list(range(1, STEPS + 1))


HALVED = """
def advantages(group):
    mean = sum(trace.reward for trace in group.traces) / len(group.traces)
    return [[(group.traces[sample.trace].reward - mean) / 2] * len(sample.token_ids) for sample in group.samples]
"""


def test_an_adapter_learns_from_teacher_and_rewards(
    imitator: Path, expert: Path, teacher: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both losses at a time, the advantages from a function of one's own."""
    (tmp_path / "halved_advantages.py").write_text(HALVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    output = tmp_path / "run"
    algorithm = {"type": "custom", "path": "halved_advantages:advantages"}
    file = config(imitator, output, "opd", teacher, algorithm=algorithm)
    values = tomllib.loads(file.read_text())
    values["trainer"]["model"] = {"lora": {"rank": 8, "alpha": 32.0}}
    values["trainer"]["loss"] = {"rl_weight": 1.0}
    values["trainer"]["optim"]["lr"] = 2e-3
    file.write_text(tomli_w.dumps(values))
    run(file)
    distance = column(output, "loss/ref_kl/mean")
    assert mean(distance[-3:]) < mean(distance[:3]) / 2
    assert all(column(output, "loss/rl/mean"))
    whole = batches(output)
    is_what_the_teacher_says(expert, whole)
    for batch in whole:
        given = torch.cat([micro_batch.advantages[micro_batch.loss_mask == 1] for micro_batch in batch.micro_batches])
        # A group's rewards are from 0 to 1.
        assert 0 < given.abs().max() <= 0.5
    assert "token-exact" in primerl("verify", str(output))
