"""What can be known to be wrong with a model folder before torch is imported."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from primerl.config.errors.fail import ConfigError
from primerl.process.cuda import has_cuda
from primerl.train.model import support

TRAINABLE = {"F64", "F32", "BF16", "F16"}
"""Safetensors' names for number formats; buffers of whole numbers are small, and are let through by their name."""
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
TEXT_EMBEDDING = re.compile(r"^(?:model\.)*(?:language_model\.)*(?:model\.)?embed_tokens\.weight$")
"""Others are of towers, or of layers that predict further tokens."""
A_WORD = re.compile(r"[\u2581\u0120]?\w+")
"""A plain word of a vocabulary; what ends an answer is markup."""
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_model(folder: Path, *, weights: bool = True) -> None:
    """A folder with config.json, whole weights, tokenizer and chat template; `weights`: whether they are there yet."""
    if not folder.is_dir():
        raise ConfigError.at(
            "model.path",
            f"there is no folder {folder}; give the folder of a model, for example one that "
            "`primerl sft` has written (<output_dir>/weights/step_<N>)",
        )
    config = read_json(folder / "config.json")
    if (problem := support.size_problem(config)) is not None:
        raise ConfigError.at("model.path", problem)
    if (problem := support.weights_refusal(config)) is not None:
        raise ConfigError.at("model.path", f"the weights in {folder} are {problem}")
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise ConfigError.at(
            "model.path",
            f"{folder} has no tokenizer.json; save the model's fast tokenizer there "
            "(`AutoTokenizer.from_pretrained(...).save_pretrained(folder)`)",
        )
    _check_vocabulary(config, tokenizer)
    _check_end(config, folder)
    if weights:
        _check_files(config, folder)
    _check_template(folder)


def has_config(folder: Path) -> bool:
    """Whether its config.json can be read."""
    with contextlib.suppress(ConfigError):
        read_json(folder / "config.json")
        return True
    return False


def check_trainable(folder: Path, *, ranks: int = 1, compiles: bool = False, trusted: bool = False) -> None:
    """Raises ConfigError where the trainer would refuse the model after loading it; engines may serve it all the same.
    Quantised weights are refused by `check_model`. `trusted`: code of the model may be run."""
    config = read_json(folder / "config.json")
    problem = support.training_refusal(config, trusted=trusted)
    problem = problem or support.layout_refusal(config, ranks, compiles=compiles)
    if problem is not None:
        raise ConfigError.at("model.path", problem)


def slower_on_gpu(folder: Path, dtype: str | None) -> str | None:
    """Why this machine's GPUs train the model more slowly than they could in this dtype (None: the GPU's default)."""
    if dtype == "float32":
        return None
    return support.slower_on_gpu(read_json(folder / "config.json")) if has_cuda() else None


def longest_sequence(folder: Path) -> int | None:
    """Tokens that the model can attend to, where its config says it."""
    limit = support.text_config(read_json(folder / "config.json")).get("max_position_embeddings")
    return limit if isinstance(limit, int) and not isinstance(limit, bool) else None


def check_weights(file: Path) -> dict[str, Any]:
    """Whether the file is as long as its header says (github.com/huggingface/safetensors, "Format"), and holds numbers
    that can be trained. Returns what the header says of each tensor."""
    problem = "its header cannot be read"
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError), file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        size = file.stat().st_size
        if 8 + length <= size:
            header = json.loads(content.read(length))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            expected = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            if expected == size:
                _check_formats(file, {name: tensor["dtype"] for name, tensor in tensors.items()})
                return tensors
            problem = f"it has {size} bytes, its header says {expected}"
    raise ConfigError.at(
        "model.path", f"{file} is not a whole safetensors file: {problem}; fetch or save the model again"
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError.at(
            "model.path", f"{path.parent} has no {path.name}; is it a model folder as `save_pretrained` writes it?"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.at("model.path", f"{path} cannot be read: {error}; fetch the model again") from None
    if not isinstance(content, dict):
        raise ConfigError.at("model.path", f"{path} is not a JSON object; fetch the model again")
    return content


def _check_formats(file: Path, formats: dict[str, str]) -> None:
    for name, dtype in formats.items():
        if name.endswith("weight") and dtype not in TRAINABLE:
            raise ConfigError.at(
                "model.path",
                f"{name} in {file} is of type {dtype}, which cannot be trained; give the model in bfloat16 or float32",
            )


def _check_files(config: dict[str, Any], folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError.at(
            "model.path", f"{folder} has no *.safetensors weights; save the model with `save_pretrained`"
        )
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        for name in sorted(set(map(str, named.values()))) if isinstance(named, dict) else []:
            if not (folder / name).is_file():
                raise ConfigError.at(
                    "model.path", f"{INDEX} names {name}, which is not in {folder}; fetch the model again"
                )
    layers: set[int] = set()
    for file in files:
        tensors = check_weights(file)
        _check_shapes(config, file, {name: tensor.get("shape") for name, tensor in tensors.items()})
        layers.update(int(match[1]) for match in map(LAYER.search, tensors) if match)
    expected = support.text_config(config).get("num_hidden_layers")
    # There may be more: of DeepSeek's that predict further tokens.
    if layers and isinstance(expected, int) and max(layers) + 1 < expected:
        raise ConfigError.at(
            "model.path",
            f"the weights in {folder} have {max(layers) + 1} layers, config.json says num_hidden_layers "
            f"{expected}; give weights and a config.json that belong together",
        )


def _check_shapes(config: dict[str, Any], file: Path, shapes: dict[str, Any]) -> None:
    """Checks the embedding only: the other shapes are compared when the model is loaded."""
    text = support.text_config(config)
    expected = [text.get("vocab_size"), text.get("hidden_size")]
    if not all(isinstance(size, int) for size in expected):
        return
    for name, shape in shapes.items():
        if TEXT_EMBEDDING.search(name) and shape != expected:
            raise ConfigError.at(
                "model.path",
                f"{file}: {name} has shape {shape}, config.json implies {expected}; give weights and a "
                "config.json that belong together",
            )


def _check_vocabulary(config: dict[str, Any], tokenizer: Path) -> None:
    """Whether the model has a row for each token."""
    words = support.text_config(config).get("vocab_size")
    with contextlib.suppress(TypeError, AttributeError, KeyError):
        content = read_json(tokenizer)
        vocabulary = content["model"]["vocab"]
        # Unigram models have a list. Added tokens may be beyond it, such as those for images in Gemma 3.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        largest = max(ids, default=0)
        if isinstance(words, int) and largest >= words:
            raise ConfigError.at(
                "model.path",
                f"{tokenizer} has token ids up to {largest}, but config.json says vocab_size {words}; give "
                "a tokenizer and a model that belong together",
            )


def _check_end(config: dict[str, Any], folder: Path) -> None:
    """Whether what ends an answer, as the model has it, is markup in the tokenizer: a word is of another tokenizer."""
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    ends: list[int] = []
    for source in (config, support.text_config(config), generation):
        given = source.get("eos_token_id")
        ends += [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)]
    tokenizer = folder / "tokenizer.json"
    with contextlib.suppress(TypeError, AttributeError, KeyError):
        content = read_json(tokenizer)
        added = {token["id"] for token in content.get("added_tokens") or []}
        vocabulary = content["model"]["vocab"]
        if not ends or not isinstance(vocabulary, dict) or not added.isdisjoint(ends):
            return
        words = {number: word for word, number in vocabulary.items() if number in ends}
        if all(end not in words or A_WORD.fullmatch(words[end]) for end in ends):
            has = f"has as {words[ends[0]]!r}" if ends[0] in words else "does not have"
            raise ConfigError.at(
                "model.path",
                f"config.json says that token {ends[0]} ends an answer, which {tokenizer} {has}; give a "
                "tokenizer and a model that belong together",
            )


def _check_template(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    if template.is_file() and template.read_text(errors="replace", encoding="utf-8").strip():
        return
    named = folder / "tokenizer_config.json"
    if not named.is_file() or not read_json(named).get("chat_template"):
        raise ConfigError.at(
            "model.path",
            f"{folder} has no chat template; add chat_template.jinja to it, or a `chat_template` to its "
            "tokenizer_config.json (base models have none: take the instruct model's)",
        )
