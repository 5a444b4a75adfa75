"""A tiny Qwen3-shaped model folder made from a config: random weights, byte-level tokenizer, plain ChatML template.

The folder is an ordinary Hugging Face checkpoint, so everything downstream (renderer, engines, trainer,
`transformers` itself) treats it as any other model.

Vocabulary of the tokenizer, in the order of its ids:

| ids | token |
|---|---|
| 0-255 | the GPT-2 byte alphabet, sorted by character; no merges, so one token a byte |
| 256 | `<|im_end|>`, ends a turn |
| 257 | `<|endoftext|>`, padding |
| 258 | `<|im_start|>` |
| 259, 260, 261 | `system`, `user`, `assistant`: ordinary tokens, which makes a chat turn a fifth shorter |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from primerl.train.model.import_once import import_transformers

IM_END, END_OF_TEXT, IM_START = 256, 257, 258
SPECIAL_TOKENS = {"<|im_end|>": IM_END, "<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START}
ROLE_TOKENS = {"system": 259, "user": 260, "assistant": 261}
TOKENIZER_SIZE = 262
MOST_PARAMETERS = 10**10
LONGEST_TEXT = 2**30

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Shape of the model. The defaults make 140,224 parameters with tied embeddings.

    `initializer_range` is far above the usual 0.02: at this width the usual value leaves the
    logits nearly flat, and the model does not leave that plateau within a few hundred steps.
    """

    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 264
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    initializer_range: float = 0.08


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's vocabulary, sorted.

    Printable bytes of Latin-1 stand for themselves; the n-th of the other bytes is character 256 + n.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = 256 - len(printable)
    return [chr(code) for code in sorted([*printable, *range(256, 256 + others)])]


def tokenizer_json() -> dict[str, object]:
    """Contents of `tokenizer.json` (the `tokenizers` library's format)."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [(token, id_, True) for token, id_ in SPECIAL_TOKENS.items()]
    added += [(token, id_, False) for token, id_ in ROLE_TOKENS.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for token, id_, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: id_ for id_, character in enumerate(byte_alphabet())},
            "merges": [],
        },
    }


def write_tokenizer(folder: Path, max_length: int = 2048) -> None:
    """Write tokenizer, chat template and generation defaults into `folder` (which exists)."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    generation_config = {"eos_token_id": [IM_END], "pad_token_id": END_OF_TEXT}
    _write_json(folder / "tokenizer.json", tokenizer_json())
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation_config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_text_model(folder: Path) -> None:
    """Write what reads and writes text and has no weights: tokenizer, template and an empty config."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {"model_type": "text", "vocab_size": TOKENIZER_SIZE})
    write_tokenizer(folder, LONGEST_TEXT)


def write_model(folder: Path, config: TinyConfig | None = None, *, seed: int = 0) -> None:
    """Write a whole model folder: tokenizer, template, config and random weights drawn from `seed`.

    Raises:
        ValueError: the vocabulary is smaller than the tokenizer's 262 entries, or `transformers` refuses the shape.
    """
    import torch

    import_transformers()
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    config = config or TinyConfig()
    _check(config)
    shape = Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # The caller's random state is not changed: a seed here must not depend on, or change, any other draw.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    write_tokenizer(folder, config.max_position_embeddings)


def _check(config: TinyConfig) -> None:
    if config.vocab_size < TOKENIZER_SIZE:
        raise ValueError(f"vocab_size is {config.vocab_size}, the tokenizer has {TOKENIZER_SIZE} entries")
    for name, value in vars(config).items():
        if not isinstance(value, bool) and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads})")
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; it must be even, as positions rotate pairs")
    layer = config.hidden_size * (2 * (heads + kv_heads) * config.head_dim + 3 * config.intermediate_size)
    parameters = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"it would have {parameters:,} parameters; a model made from scratch has at most 10 billion")


def differences(folder: Path, config: TinyConfig) -> list[str]:
    """How the model in `folder` is not one of this config, for people."""
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(folder, local_files_only=True)
    found = []
    for name, value in vars(config).items():
        made = own.rope_parameters["rope_theta"] if name == "rope_theta" else getattr(own, name)
        if made != value:
            found.append(f"{name} is {value}, and there {made}")
    return found


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
