"""Supervised fine-tuning: the gradient, and runs from a config to weights that have learned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from primerl.models.tiny import IM_END, TinyConfig, write_model
from primerl.train.data.mixture import Mixture
from primerl.train.data.packing import step_batches
from primerl.train.distributed import fsdp
from primerl.train.loop.validation import Validation
from primerl.train.model.packed_model import load_model
from primerl.train.objective.cross_entropy import forward_backward
from primerl.train.objective.logprobs import token_logprobs
from primerl.train.optim import Optimizer
from primerl.train.settings import OptimConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from settings_helpers import filled, run_sft
from sft_helpers import assistant, load, metrics, settings, user, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("own_logging")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, seed=3)
    return path


def test_masks_cover_the_answers_and_their_ends(folder: Path, tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "be brief"},
        user("a b"),
        assistant("xy"),
        user("more"),
        assistant("é!"),
    ]
    rows = load(folder, write_rows(tmp_path / "rows.jsonl", {"messages": conversation}), tmp_path / "bad")
    row = rows.row(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert row.token_ids.tolist() == tokenizer.apply_chat_template(conversation, return_dict=False)
    trained = row.token_ids[row.loss_mask == 1].tolist()
    assert tokenizer.decode(trained) == "xy<|im_end|>é!<|im_end|>"
    assert trained.count(IM_END) == 2


def reference_losses(model: Any, rows: Any) -> tuple[torch.Tensor, int]:
    """Summed over all rows, one at a time through `transformers`' own loss."""
    losses, tokens = [], 0
    for index in range(len(rows)):
        row = rows.row(index)
        labels = torch.where(row.loss_mask == 1, row.token_ids.long(), -100).unsqueeze(0)
        trained = int((row.loss_mask == 1).sum())
        losses.append(model(input_ids=row.token_ids.long().unsqueeze(0), labels=labels).loss * trained)
        tokens += trained
    return torch.stack(losses).sum(), tokens


def test_gradient_is_that_of_the_mean_over_answer_tokens(folder: Path, tmp_path: Path) -> None:
    """Split in several micro-batches, against one row at a time through `transformers`' own loss."""
    texts = [("ab", "c"), ("d", "efghijkl"), ("Reverse: xyz", "zyx"), ("", "m")]
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": p, "completion": c} for p, c in texts))
    rows = load(folder, path, tmp_path / "bad")
    mixture = Mixture(rows, None, shuffle=False, seed=0)
    batch = next(step_batches(mixture, rows, batch_size=1000, seq_len=40, epochs=1, device=CPU))
    assert len(batch.micro_batches) > 1
    ours = load_model(folder)
    loss = forward_backward(ours, batch)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    summed, tokens = reference_losses(theirs, rows)
    assert tokens == batch.trained_tokens == sum(len(completion) + 1 for _, completion in texts)
    expected = summed / tokens
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for ours_parameter, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (ours_parameter.grad - parameter.grad).abs().max().item() <= 1e-5


def test_entropies_which_nobody_reads_are_not_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []

    def spied(*given: Any, entropy: bool = True, **options: Any) -> Any:
        wanted.append(entropy)
        return token_logprobs(*given, entropy=entropy, **options)

    monkeypatch.setattr(fsdp, "token_logprobs", spied)
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    mixture = Mixture(rows := load(folder, path, tmp_path / "bad"), None, shuffle=False, seed=0)
    batch = next(step_batches(mixture, rows, batch_size=1000, seq_len=40, epochs=1, device=CPU))
    forward_backward(load_model(folder), batch)
    assert wanted == [False]


def test_validation_is_the_mean_over_all_tokens_and_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    from primerl.train.sft_settings import SubsetConfig

    for name, texts in (("a", ["b", "cdefgh"]), ("b", ["xyz"])):
        write_rows(tmp_path / f"{name}.jsonl", *({"prompt": "p", "completion": text} for text in texts))
    both = [filled(SubsetConfig, path=str(tmp_path / f"{name}.jsonl")) for name in ("a", "b")]
    model = load_model(folder)
    measured = Validation(load(folder, both, tmp_path / "bad"), 40, CPU).measure(model, 0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, data in (("val/loss", both), ("val/a/loss", both[:1]), ("val/b/loss", both[1:])):
        summed, tokens = reference_losses(theirs, load(folder, data, tmp_path / "bad"))
        assert measured[name] == pytest.approx(summed.item() / tokens, abs=1e-5), name
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_learns_its_rows_and_says_them(tmp_path: Path) -> None:
    answers = {"a": "one", "b": "two", "c": "three", "d": "four"}
    write_rows(tmp_path / "rows.jsonl", *({"prompt": p, "completion": c} for p, c in answers.items()))
    assert run_sft(settings(tmp_path)) == 0
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[0]["loss/mean"] > 4
    assert lines[-1]["loss/mean"] < 0.1
    assert lines[4]["optim/lr"] == pytest.approx(2e-2 * (1 - 0.9 * 5 / 40))
    assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == ["step_0", "step_40"]
    assert not (tmp_path / "run" / "checkpoints").exists()
    checkpoint = tmp_path / "run" / "weights" / "step_40"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for prompt, answer in answers.items():
        inputs = tokenizer.apply_chat_template([user(prompt)], add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == answer + "<|im_end|>"


def test_two_datasets_are_mixed_validated_and_measured(tmp_path: Path) -> None:
    for name, count in (("long", 4), ("short", 3)):
        rows = ({"prompt": str(n), "completion": name * (2 if name == "long" else 1)} for n in range(count))
        write_rows(tmp_path / f"{name}.jsonl", *rows)
    subsets = [{"path": str(tmp_path / f"{name}.jsonl"), "ratio": ratio} for name, ratio in (("long", 3), ("short", 1))]
    val = {"interval": 3, "data": {"path": str(tmp_path / "short.jsonl")}}
    data = {"subsets": subsets, "epochs": 4}
    assert run_sft(settings(tmp_path, data=data, val=val, max_steps=None)) == 0
    lines = metrics(tmp_path / "run")
    steps = lines[-1]["step"]
    assert [line["step"] for line in lines] == list(range(steps + 1))
    assert [line["step"] for line in lines if "val/loss" in line] == sorted({*range(0, steps + 1, 3), steps})
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    last = lines[-1]
    assert last["progress/epoch"] == 4.0
    assert last["progress/num_samples"] == 28
    assert last["progress/long/ratio_samples"] == 0.75
    assert last["progress/long/ratio_tokens"] + last["progress/short/ratio_tokens"] == pytest.approx(1)
    assert last["progress/long/ratio_tokens"] > 0.75
    expected = {"loss/mean", "optim/lr", "optim/grad_norm", "perf/throughput", "progress/num_tokens"}
    expected |= {"time/step", "time/forward_backward", "time/wait_for_batch", "time/optimizer"}
    assert expected <= set(last)


def test_a_sample_count_bounds_the_run_where_it_comes_first(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": str(n), "completion": "x"} for n in range(8)))
    assert run_sft(settings(tmp_path, data={"epochs": 100}, max_steps=2)) == 0
    assert (tmp_path / "run" / "weights" / "step_2").is_dir()


def test_same_seed_same_weights(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": str(n), "completion": "x" * n} for n in range(1, 9)))
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        values = settings(tmp_path, output_dir=str(tmp_path / name), max_steps=3, seed=seed)
        assert run_sft(values) == 0
        digests.append((tmp_path / name / "weights" / "step_3" / "model.safetensors").read_bytes())
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_starts_from_a_folder(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, model={"path": str(folder)}, max_steps=1)) == 0
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3}, "steps: unknown key"),
        ({"model": {"path": "nowhere"}}, "nowhere"),
        ({"model": {"tiny": {"vocab_size": 10}}}, "model.tiny: vocab_size is 10"),
        ({"max_steps": None}, "set `max_steps` or `data.epochs`"),
        ({"data": {"batch_size": 32}}, "data.batch_size is 32, data.seq_len 64"),
        ({"data": {"loss_mask": {"assistant": False}}}, "data.loss_mask leaves nothing"),
        ({"data": {"subsets": [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}]}}, "2 of them are called 'x'"),
        ({"data": {"subsets": [{"path": "a", "ratio": 1}, {"path": "b"}]}}, "give `ratio` for all of them"),
        ({"data": {"subsets": [{"path": "a", "ratio": 0}]}}, "data.subsets[0].ratio: Input should be greater than 0"),
        (
            {"data": {"subsets": [{"path": "a", "ratio": 1e308}]}},
            "data.subsets[0].ratio: Input should be less",
        ),
        ({"data": {"name": "x", "subsets": [{"path": "a"}]}}, "`name` and `split` belong into each subset"),
        ({"val": {"data": {"subsets": [{"path": "a", "ratio": 1}]}}}, "leave `ratio` out"),
        ({"val": {"interval": 0, "data": {"path": "a"}}}, "val.interval: Input should be greater than 0"),
        ({"ckpt": {"resume_step": 0}}, "ckpt.resume_step is 0"),
        ({"ckpt": {"keep_interval": 0}}, "ckpt.keep_interval: Input should be greater than 0"),
        ({"ckpt": {"resume_step": -1, "weights_only": True}}, "ckpt.weights_only saves nothing to resume from"),
    ],
)
def test_bad_settings_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, **changes)) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "weights").exists(), "the same command can be given again"


@pytest.mark.parametrize(("epochs", "code"), [(None, 2), (101, 2), (3, 0)])
def test_a_step_of_the_same_rows_over_and_over_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: int | None, code: int
) -> None:
    """It would be filled for hours; an end of the epochs ends it as well."""
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    data: dict[str, Any] = {"batch_size": 10**9, "seq_len": 10**9}
    if epochs is not None:
        data["epochs"] = epochs
    assert run_sft(settings(tmp_path, data=data, max_steps=1)) == code
    refused = re.search(
        r"data.batch_size is 1,000,000,000, and all rows together have [0-9]+ tokens: a step would hold each of them "
        "[0-9,]+ times, which is limited to 100; lower data.batch_size",
        capsys.readouterr().out,
    )
    assert (refused is not None) == (code == 2)
    assert (tmp_path / "run" / "weights").exists() == (code == 0), "the same command can be given again"


@pytest.mark.timeout(60)
def test_epochs_beyond_the_steps_are_not_counted(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, data={"epochs": 10**9}, max_steps=1)) == 0


def test_schedules_longer_than_the_run_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    Optimizer(model.named_parameters(), filled(OptimConfig, schedule="wsd", warmup_steps=5, decay_steps=5), 5)
    assert not caplog.records
    Optimizer(model.named_parameters(), filled(OptimConfig, schedule="wsd", warmup_steps=6, decay_steps=7), 5)
    assert "optim.warmup_steps is 6, and the run has 5 steps" in caplog.text
    assert "optim.decay_steps is 7, and the run has 5 steps" in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize("full", [False, True])
def test_training_goes_on_where_its_output_cannot_be_written(tmp_path: Path, full: bool) -> None:
    """It is said once. `full`: a full disk, else a reader that has left (`| head`)."""
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    (tmp_path / "sft.toml").write_text(tomli_w.dumps(settings(tmp_path, max_steps=5, ckpt={"interval": 1})))
    command = [sys.executable, "-m", "primerl", "sft", "@", str(tmp_path / "sft.toml")]
    if full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(output)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    (said,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert "standard output cannot be written" in said
    assert "Logging error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_too_many_bad_rows_exit_2_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a"}, *[{"prompt": "a", "completion": "b"}] * 9)
    assert run_sft(settings(tmp_path)) == 2
    printed = capsys.readouterr().out
    assert "data.max_bad_share is 1.00%" in printed
    assert "rows, line 1: needs `messages`" in printed
    (named,) = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert (named["dataset"], named["line"], named["kind"]) == ("rows", 1, "not a conversation")
    assert not (tmp_path / "run" / "weights").exists()
    assert run_sft(settings(tmp_path, data={"max_bad_share": 0.1}, max_steps=1)) == 0
    assert "rows: 1 of 10 rows cannot be used" in capsys.readouterr().out


def test_an_unusable_dataset_cannot_have_a_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "a.jsonl", {"prompt": "a"})
    write_rows(tmp_path / "b.jsonl", {"prompt": "a", "completion": "b"})
    subsets = [{"path": str(tmp_path / f"{name}.jsonl"), "ratio": 1} for name in "ab"]
    assert run_sft(settings(tmp_path, data={"subsets": subsets, "max_bad_share": 1.0})) == 2
    assert "no row of a can be used, and it has a ratio" in capsys.readouterr().out


def test_results_of_an_earlier_run_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, max_steps=1)) == 0
    assert run_sft(settings(tmp_path, max_steps=1)) == 2
    assert "weights exists already" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_names_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    write_model(folder, TinyConfig(num_hidden_layers=1, tie_word_embeddings=False), seed=0)
    weights = load_file(folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    weights["model.embed_tokens.weight"][tokenizer.convert_tokens_to_ids("z")] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    texts = ["abc", "abz", "", "aab", "zab", "abc"]
    write_rows(tmp_path / "rows.jsonl", *({"prompt": "a", "completion": text} for text in texts))
    data = {"batch_size": 256, "shuffle": False, "max_bad_share": 0.5, "loss_mask": {"user": True}}
    assert run_sft(settings(tmp_path, model={"path": str(folder)}, data=data)) == 1
    said = capsys.readouterr().out
    assert "step 1: the loss is nan" in said
    assert "look at rows, line 2; rows, line 5; the batch is in " in said, said
    kept = tmp_path / "run" / "diverged" / "step_1_rank_0" / "batch.safetensors"
    assert str(kept) in said
    with safe_open(kept, "pt") as batch:
        assert "abz" in tokenizer.decode(torch.cat([batch.get_tensor(f"{n}.token_ids") for n in range(4)]))
        assert "rows, line 2" in batch.metadata()["0.rows"]


def test_a_loss_on_held_out_rows_that_is_not_finite_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    write_model(folder, TinyConfig(num_hidden_layers=1, tie_word_embeddings=False), seed=0)
    weights = load_file(folder / "model.safetensors")
    z = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("z")
    weights["model.embed_tokens.weight"][z] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    write_rows(tmp_path / "val.jsonl", *({"prompt": "a", "completion": text * 9} for text in ("b", "zb", "c", "bz")))
    val = {"data": {"path": str(tmp_path / "val.jsonl")}}
    assert run_sft(settings(tmp_path, model={"path": str(folder)}, val=val)) == 1
    said = capsys.readouterr().out
    assert "step 0: the loss on rows that are held out (val.data) is not finite" in said
    assert "look at val, line 2; val, line 4, or lower optim.lr" in said, said
    assert metrics(tmp_path / "run") == []


def test_divergence_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert run_sft(settings(tmp_path, optim={"lr": 1e30})) == 1
    assert "lower optim.lr" in capsys.readouterr().out
