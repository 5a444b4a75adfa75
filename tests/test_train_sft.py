"""Supervised fine-tuning: rows, masks, batches, and a run from a config to a checkpoint that has learned."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.models.tiny import IM_END, write_model
from primerl.train import sft
from primerl.train.conversations import RowError
from primerl.train.model import load_model
from primerl.train.rows import Row, batches, load_rows, micro_batches
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_model(path, seed=3)
    return path


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    logger = logging.getLogger("primerl")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_masks_cover_the_answers_and_their_ends(folder: Path, tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "be brief"},
        user("a b"),
        assistant("xy"),
        user("more"),
        assistant("é!"),
    ]
    (row,) = load_rows(write_rows(tmp_path / "rows.jsonl", {"messages": conversation}), folder, 200)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert row.token_ids.tolist() == tokenizer.apply_chat_template(conversation, return_dict=False)
    trained = row.token_ids[row.loss_mask == 1].tolist()
    assert tokenizer.decode(trained) == "xy<|im_end|>é!<|im_end|>"
    assert trained.count(IM_END) == 2


def test_prompt_and_completion_are_messages_in_short(folder: Path, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        {"messages": [user("Reverse: abc"), assistant("cba")]},
        {"prompt": "Reverse: abc", "completion": "cba", "source": "columns beside these are left alone"},
        {"prompt": [user("Reverse: abc")], "completion": [assistant("cba")]},
    )
    path.write_text(path.read_text() + "\n  \n")
    first, second, third = load_rows(path, folder, 200)
    for other in (second, third):
        assert torch.equal(first.token_ids, other.token_ids)
        assert torch.equal(first.loss_mask, other.loss_mask)


GOOD = json.dumps({"prompt": "a", "completion": "b"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        (GOOD + "\n{", "line 2: not JSON"),
        (GOOD + "\n\n[1]", "line 3: expected an object"),
        (GOOD + '\n{"prompt": "a"}', r"line 2: needs `messages`, or `prompt` and `completion`; it has \['prompt'\]"),
        (GOOD + '\n{"messages": ["a"]}', "line 2: messages must be a list of objects"),
        (GOOD + '\n{"messages": [{"role": "user", "content": "a"}]}', "line 2: nothing to train"),
        (GOOD + '\n{"prompt": "a", "completion": "' + "b" * 300 + '"}', r"line 2: 31\d tokens, data.seq_len is 200"),
        (GOOD + '\n{"messages": [], "tools": [{}]}', "line 2: rows with `tools`"),
        (GOOD + '\n{"prompt": "a", "completion": 5}', "line 2: "),
    ],
)
def test_bad_rows_are_named(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(RowError, match=rf"rows\.jsonl.*{message}"):
        load_rows(path, folder, 200)


def test_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=r"data\.path: .*nowhere cannot be read"):
        load_rows(tmp_path / "nowhere", folder, 200)


def numbered(count: int, length: int = 3) -> list[Row]:
    return [Row(torch.full((length,), index, dtype=torch.int32), torch.ones(length)) for index in range(count)]


def names(batch: list[Row]) -> list[int]:
    return [int(row.token_ids[0]) for row in batch]


def test_every_epoch_has_every_row_once() -> None:
    rows = numbered(7)
    order = [name for batch in islice(batches(rows, 3, shuffle=True, seed=1), 7) for name in names(batch)]
    epochs = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = [name for batch in islice(batches(rows, 3, shuffle=True, seed=1), 7) for name in names(batch)]
    assert order == again
    assert names(next(batches(rows, 9, shuffle=False, seed=1))) == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_micro_batches_hold_every_row_and_keep_the_limit() -> None:
    rows = [row for length in (5, 9, 2, 7, 3, 1, 9) for row in numbered(1, length)]
    packed = micro_batches(rows, 10)
    assert sorted(len(row) for group in packed for row in group) == [1, 2, 3, 5, 7, 9, 9]
    assert all(sum(map(len, group)) <= 10 for group in packed)
    assert len(packed) == 4


def test_gradient_is_that_of_the_mean_over_answer_tokens(folder: Path, tmp_path: Path) -> None:
    """Split in several micro-batches, against one row at a time through `transformers`' own loss."""
    texts = [("ab", "c"), ("d", "efghijkl"), ("Reverse: xyz", "zyx"), ("", "m")]
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": p, "completion": c} for p, c in texts))
    rows = load_rows(path, folder, 200)
    ours = load_model(folder)
    loss = sft.forward_backward(ours, rows, 40, torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    for row in rows:
        labels = torch.where(row.loss_mask == 1, row.token_ids.long(), -100).unsqueeze(0)
        output = theirs(input_ids=row.token_ids.long().unsqueeze(0), labels=labels)
        losses.append(output.loss * (row.loss_mask == 1).sum())
    expected = torch.stack(losses).sum() / sum(len(completion) + 1 for _, completion in texts)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for ours_parameter, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (ours_parameter.grad - parameter.grad).abs().max().item() <= 1e-5


def settings(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 40,
        "threads": 1,
        "model": {"tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}},
        "data": {"path": str(tmp_path / "rows.jsonl"), "batch_size": 4, "seq_len": 64},
        "optim": {"lr": 2e-2, "warmup_steps": 5, "schedule": "linear", "weight_decay": 0.01},
        **changes,
    }


def test_learns_its_rows_and_says_them(tmp_path: Path) -> None:
    answers = {"a": "one", "b": "two", "c": "three", "d": "four"}
    write_rows(tmp_path / "rows.jsonl", *({"prompt": p, "completion": c} for p, c in answers.items()))
    assert sft.main(settings(tmp_path)) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[0]["loss/mean"] > 4
    assert lines[-1]["loss/mean"] < 0.1
    assert lines[4]["optim/lr"] == pytest.approx(2e-2 * (1 - 0.9 * 5 / 40))
    assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == ["step_0", "step_40"]
    checkpoint = tmp_path / "run" / "weights" / "step_40"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    for prompt, answer in answers.items():
        inputs = tokenizer.apply_chat_template([user(prompt)], add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == answer + "<|im_end|>"


def test_same_seed_same_weights(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", *({"prompt": str(n), "completion": "x" * n} for n in range(1, 9)))
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        values = settings(tmp_path, output_dir=str(tmp_path / name), max_steps=3, seed=seed)
        assert sft.main(values) == 0
        digests.append((tmp_path / name / "weights" / "step_3" / "model.safetensors").read_bytes())
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_starts_from_a_folder(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert sft.main(settings(tmp_path, model={"path": str(folder)}, max_steps=1)) == 0
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["step_1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 3}, "unknown setting `steps`"),
        ({"model": {"path": "nowhere"}}, "nowhere"),
        ({"model": {"tiny": {"vocab_size": 10}}}, "model.tiny: vocab_size is 10"),
    ],
)
def test_bad_settings_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert sft.main(settings(tmp_path, **changes)) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_bad_row_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a"})
    assert sft.main(settings(tmp_path)) == 2
    assert "rows.jsonl, line 1: needs `messages`" in capsys.readouterr().out


def test_results_of_an_earlier_run_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert sft.main(settings(tmp_path, max_steps=1)) == 0
    assert sft.main(settings(tmp_path, max_steps=1)) == 2
    assert "weights exists already" in capsys.readouterr().err


def test_divergence_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    assert sft.main(settings(tmp_path, optim={"lr": 1e30})) == 1
    assert "lower optim.lr" in capsys.readouterr().out
