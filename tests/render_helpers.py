"""Model folders without weights, and generated conversations, for the tests of the renderer."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

Message = dict[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The published split patterns of the two families.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <today> & "tomorrow" – it\'s free',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Größe"},
                "days": {"type": "integer", "minimum": 1, "default": 3},
                "limit": {"type": "number", "maximum": 1e-7},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}
TOOLS = [WEATHER, CLOCK]


def trl_template(name: str) -> str:
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def trl_template_names() -> list[str]:
    folder = resources.files("trl") / "chat_templates"
    return sorted(entry.name.removesuffix(".jinja") for entry in folder.iterdir() if entry.name.endswith(".jinja"))


def more_templates() -> dict[str, str]:
    """Templates below the folders of PRIMERL_TEMPLATES (see docs/templates.md), which no test dependency carries."""
    folders = [Path(folder) for folder in os.environ.get("PRIMERL_TEMPLATES", "").split(os.pathsep) if folder]
    paths = sorted(path for folder in folders for path in folder.rglob("*.jinja"))
    return {f"{path.parent.name}/{path.stem}": path.read_text(encoding="utf-8") for path in paths}


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tiny_model(folder: Path) -> Path:
    """The demo's model: 256 bytes, three special tokens, three role words."""
    vocabulary = {token: index for index, token in enumerate(byte_alphabet())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("system", "user", "assistant")])
    return write_model(folder, tokenizer, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@cache
def _trained(split: str, nfc: bool) -> str:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    corpus = [inspect.getsource(module) for module in (json, random, inspect, re)]
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer.to_str()


def trained_tokenizer(split: str, special: list[str], plain: list[str], nfc: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE of 1,500 tokens learned from Python's own sources, with a family's special tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(_trained(split, nfc))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer


def write_model(folder: Path, tokenizer: tokenizers.Tokenizer, template: str, **special_tokens: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}), encoding="utf-8")
    return folder


def write_qwen(folder: Path, template: str) -> Path:
    tokenizer = trained_tokenizer(QWEN_SPLIT, QWEN_SPECIAL, QWEN_PLAIN, nfc=True)
    return write_model(folder, tokenizer, template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def write_llama(folder: Path, template: str) -> Path:
    tokenizer = trained_tokenizer(LLAMA_SPLIT, LLAMA_SPECIAL, [], nfc=False)
    return write_model(folder, tokenizer, template, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def write_family(folder: Path, template: str, stop: Sequence[str] = ()) -> Path:
    """A model for any template: every `<...>` or `[...]` marker the template writes is a special token.

    `stop` are the tokens that the family's generation_config.json names; without it, `</s>`.
    """
    patterns = [
        r"<[|｜a-z_/][^<>'\"\s{}]*>",
        r"<[|｜][^<>'\"{}]*[|｜]>",
        r"\[/?[A-Z_]{3,}\]",
        r"[\]\[][!a-z]~[a-z]*[\]\[]",
    ]
    markers = set(re.findall("|".join(patterns), template))
    special = sorted(markers | {"<s>", "</s>", *stop})
    tokenizer = trained_tokenizer(QWEN_SPLIT, special, [], nfc=True)
    eos = stop[0] if stop else "</s>"
    write_model(folder, tokenizer, template, bos_token="<s>", eos_token=eos, pad_token="</s>")
    if stop:
        ids = [tokenizer.token_to_id(token) for token in stop]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return folder


_WORDS = [
    "Reverse: qwxyz", "<r>zyx</r>", "Größe", "naïve e\u0301cole", "你好,世界", "👩‍👩‍👧 family", "  two  spaces ",
    "tab\there", "line\n\nbreaks\n", "12345 + 0.5", "don't", "user", "<|im_end|>", "</think>", "{'a': \"b\"}",
    "a < b & c > d", "مرحبا", "\u00a0nbsp", "x" * 40, "", "{{ messages }}", "\r\n", "ﬁ Ⅷ", "- item\n- item", "<b>",
]  # fmt: skip


def _text(random_: random.Random, *, strip: bool = False) -> str:
    text = random_.choice([" ", "\n", ""]).join(random_.choices(_WORDS, k=random_.randint(1, 5)))
    return text.strip() if strip else text


def conversation(seed: int, *, system: bool = True, tools: bool = True, reasoning: bool = True) -> list[Message]:
    """A conversation that ends with a user message, a tool result, or an answer."""
    random_ = random.Random(seed)
    messages: list[Message] = []
    if system and random_.random() < 0.5:
        messages.append({"role": "system", "content": _text(random_)})
    for turn in range(random_.randint(1, 4)):
        messages.append({"role": "user", "content": _text(random_)})
        if tools and random_.random() < 0.4:
            messages.extend(_tool_turn(random_, turn))
        answer: Message = {"role": "assistant", "content": _text(random_)}
        if reasoning and random_.random() < 0.3:
            answer["reasoning_content"] = _text(random_)
        elif reasoning and random_.random() < 0.2:
            answer["content"] = f"<think>\n{_text(random_)}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    if random_.random() < 0.6:
        messages.pop()
    return messages


def _tool_turn(random_: random.Random, turn: int) -> list[Message]:
    arguments: list[dict[str, Any]] = [
        {"city": "Zürich", "days": 2},
        {"city": "a\"b'", "nested": {"x": [1, 2.5, None, True], "y": {}}},
        {},
    ]
    calls = [
        {
            "id": f"call{turn:04}{index}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": random_.choice(arguments)},
        }
        for index in range(random_.randint(1, 2))
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": _text(random_)} for call in calls
    ]
    return [{"role": "assistant", "content": random_.choice(["", "I look."]), "tool_calls": calls}, *results]


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Name and arguments of an assistant message's tool calls."""
    calls = message.get("tool_calls") or []
    functions = [call["function"] for call in calls]
    return [
        (call["name"], json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"])
        for call in functions
    ]
