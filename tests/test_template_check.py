"""`primerl template check`: what a user is told about a model's template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import render_helpers as helpers
from primerl.cli import main

USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "y"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.write_qwen(tmp_path_factory.mktemp("qwen"), helpers.trl_template("qwen3"))


def rows(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_scenarios_are_a_table(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(qwen)]) == 0
    text = capsys.readouterr().out
    assert "a turn ends with <|im_end|>" in text
    assert "tool calls: parser hermes; reasoning: parser think" in text
    assert "slower library" not in text
    assert "12 extends" in text
    assert "forks" not in text


def test_own_conversations_are_told_by_line(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": "r"}
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    path = rows(
        tmp_path / "rows.jsonl",
        json.dumps({"messages": [USER, ANSWER, USER, ANSWER], "source": "kept apart"}),
        json.dumps({"messages": [USER, thought, tool, ANSWER, USER], "tools": helpers.TOOLS}),
    )
    assert main(["template", "check", str(qwen), "--conversations", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["conversations"]
    assert [(turn["conversation"], turn["answer"], turn["new_messages"]) for turn in told] == [
        ("line 1", 1, ["user"]),
        ("line 2", 1, ["tool"]),
        ("line 2", 3, ["user"]),
    ]
    assert {turn["verdict"] for turn in told} == {"extends"}


def test_forks_name_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = helpers.write_family(tmp_path / "gemma", helpers.trl_template("gemma"))
    assert main(["template", "check", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Conversation roles must alternate" in text
    assert "refused" in text


def test_a_reason_is_explained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = helpers.write_family(tmp_path / "deepseek", helpers.trl_template("deepseekv3"))
    assert main(["template", "check", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.count("depends_on_history") > 3
    assert text.count("depends_on_history: what the template writes") == 1


def test_a_tokenizer_that_only_the_slower_library_reads_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = helpers.QWEN_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+")
    tokenizer = helpers.trained_tokenizer(split, helpers.QWEN_SPECIAL, helpers.QWEN_PLAIN, nfc=True)
    folder = helpers.write_model(tmp_path / "marks", tokenizer, helpers.CHATML, eos_token="<|im_end|>")
    assert main(["template", "check", str(folder)]) == 0
    assert "encoded by the slower library" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: no JSON object"),
        ('{"messages": [{"content": "x"}]}', "line 2: messages[0]: missing field `role`"),
        ('{"text": "x"}', "line 2: messages: expected a list of messages"),
    ],
)
def test_a_bad_row_is_named(
    line: str, expected: str, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rows(tmp_path / "rows.jsonl", json.dumps({"messages": [USER]}), line)
    assert main(["template", "check", str(qwen), "--conversations", str(path)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert str(path) in error


def test_bad_input_is_named(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    helpers.write_tiny_model(tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    assert main(["template", "check", str(tmp_path / "bare")]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["template", "check", str(qwen), "--conversations", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["template"]) == 2
    assert main(["template", "check", "--help"]) == 0
