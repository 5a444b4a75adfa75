"""Models with the real templates of several families, and what is trained of a row, for the tests of masks."""

from __future__ import annotations

import itertools
from pathlib import Path

import render_helpers as helpers
from primerl.train.data.conversations import RowError
from primerl.train.data.masks import Columns
from primerl.train.sft_settings import LossMaskConfig
from settings_helpers import filled
from sft_helpers import assistant
from transformers import AutoTokenizer

# The stop token of each family.
STOPS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
}
ALL_MASKS = [
    filled(LossMaskConfig),
    filled(LossMaskConfig, user=True),
    filled(LossMaskConfig, system=True, tool=True),
    filled(LossMaskConfig, assistant=False, system=True, user=True, tool=True),
    filled(LossMaskConfig, system=True, user=True, tool=True),
]
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"n": 1}}}
THOUGHT = {**assistant("a"), "reasoning_content": "hm"}


def write_model(folder: Path, family: str) -> Path:
    path = folder / family
    if not path.exists():
        helpers.write_family(path, helpers.trl_template(family), [STOPS[family]])
    return path


def trained_runs(path: Path, columns: Columns | RowError) -> list[str]:
    """Stretches of tokens that are trained."""
    assert not isinstance(columns, RowError), columns
    ids = memoryview(columns[0]).cast("i").tolist()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [
        tokenizer.decode([token for token, _ in run])
        for trained, run in itertools.groupby(zip(ids, columns[1], strict=True), key=lambda pair: pair[1])
        if trained
    ]
