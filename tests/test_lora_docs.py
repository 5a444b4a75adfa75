"""docs/lora.md: its configs and commands work as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import peft
import pytest
from docs_pages import shown
from primerl.cli import main
from primerl.models.tiny import write_model
from sft_helpers import write_rows
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")


@pytest.mark.processes
def test_the_page(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (repository / "docs" / "lora.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
    write_model(tmp_path / "models" / "mine", seed=0)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "chats.jsonl", *({"prompt": str(n), "completion": "x"} for n in range(60)))
    commands = shown(__file__, "docs/lora.md")
    assert len(commands) == 3
    # The last one is run, for fewer steps and of another model, by tests/test_lora_rl.py.
    assert [*commands.pop(), "--dry-run"] == commands[-1]
    for program, *arguments in commands:
        assert program == "primerl"
        if arguments[0] == "sft":  # small enough for a test
            arguments += ["--data.batch-size", "64", "--data.seq-len", "64", "--threads", "1"]
        assert main(arguments) == 0, arguments
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "mine")
    folder = tmp_path / "outputs" / "sft-lora" / "weights" / "step_100"
    peft.PeftModel.from_pretrained(base, folder / "lora_adapters")
    AutoModelForCausalLM.from_pretrained(folder)
