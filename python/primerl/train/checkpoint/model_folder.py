"""Model folders `weights/step_<N>`, which load in `transformers`, vLLM and the embedded engine like any other."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from primerl.train.adapters.files import ADAPTER_FOLDER
from primerl.train.adapters.merging import adapter_state
from primerl.train.checkpoint.files import check_room, settle, sync
from primerl.train.checkpoint.frozen_files import add_frozen
from primerl.train.distributed.rank_barrier import RankBarrier
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.weights.frozen import frozen_of
from primerl.train.weights.shards import (
    MAX_SHARD_BYTES,
    Files,
    by_file,
    bytes_of,
    computing_dtype,
    gathered,
    own_tensors,
    plan,
    shares,
)

if TYPE_CHECKING:
    from primerl.train.adapters.lora import Adapter

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Everything of a model folder that turns text (and images) into tokens, and the rules of ending a turn."""


def save_model(
    model: Any,
    source: Path,
    output_dir: Path,
    step: int,
    ranks: Ranks = ALONE,
    adapter: Adapter | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tell: Callable[[float], None] = lambda share: None,
) -> Path:
    """Writes `<output_dir>/weights/step_<step>`, replacing one that exists, and returns it. `adapter` is also saved
    separately, in `lora_adapters`.

    What the trainer did not load (`weights.frozen`) is copied from the folder that it was loaded from. Tokenizer, chat
    template and generation config are copied from the model folder `source`, byte for byte: saving
    them through `transformers` may change them, and with them the tokens of every later run.

    All ranks have to call it; each writes its share of the weights, the leading one everything else. `tell` is called
    with the share of this rank's bytes that is written.

    Raises:
        OSError, SafetensorError: it cannot be written.
        RankError: another rank could not write its share, or did not in time.
    """
    target = output_dir / "weights" / f"step_{step}"
    files = by_file(shares(model, ranks, plan(model, ranks, max_shard_bytes)))
    adapted = gathered(model, adapter_state(own_tensors(model)), keep=ranks.leads) if adapter is not None else {}

    frozen = frozen_of(model)

    def complete(folder: Path, parts: list[dict[str, dict[str, int]]]) -> None:
        written = {file: sizes for part in parts for file, sizes in part.items()}
        if frozen is not None:
            written = add_frozen(folder, written, frozen, max_shard_bytes)
        _describe(model, source, folder, written)
        if adapter is not None:
            adapter.save(folder / ADAPTER_FOLDER, adapted)
        _copy_text(source, folder)
        settle(folder, target)

    barrier = RankBarrier(ranks, ranks.agree(uuid.uuid4().hex))
    sizes = barrier.each(lambda: bytes_of(files), "say how much it will write")
    copied = 0 if frozen is None else frozen.nbytes()
    barrier.lead(lambda: check_room(target, sum(sizes) + copied), "find room for the model")
    with barrier.folder(target) as folder:
        parts = barrier.each(lambda: _write(folder, files, tell), "write its share of the model")
        barrier.lead(lambda: complete(folder, parts), "complete the model folder")
    return target


def _write(folder: Path, files: Files, tell: Callable[[float], None]) -> dict[str, dict[str, int]]:
    """Returns the tensors' sizes in bytes, by file and name."""
    sizes = {file: {name: tensor.nbytes for name, tensor in tensors.items()} for file, tensors in files.items()}
    written, total = 0, sum(sum(own.values()) for own in sizes.values())
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
        sync(folder / file)
        written += sum(sizes[file].values())
        tell(written / max(total, 1))
    return sizes


def _describe(model: Any, source: Path, folder: Path, files: dict[str, dict[str, int]]) -> None:
    """The model's config, and where its tensors are when they are in several files, as transformers' `save_pretrained`
    writes both. `files`: sizes in bytes of their tensors."""
    # Weights may be in fp32 and are saved in the dtype of the computation; FSDP renames the class.
    model.config.dtype = str(computing_dtype(model)).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    _as_whole(model.config, source, folder)
    if model.can_generate() and not (source / "generation_config.json").is_file():
        model.generation_config.save_pretrained(folder)
    if len(files) > 1:
        total = sum(size for sizes in files.values() for size in sizes.values())
        frozen = frozen_of(model)
        parameters = model.num_parameters() + (0 if frozen is None else frozen.parameters())
        index = {
            "metadata": {"total_parameters": parameters, "total_size": total},
            "weight_map": {name: file for file, sizes in files.items() for name in sizes},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _as_whole(config: Any, source: Path, folder: Path) -> None:
    """Where only the text model of a folder was loaded, the saved one is whole again: it gets the config of its
    source, with what loading has changed in the text model's part (dtype, dropout)."""
    given = source / "config.json"
    whole = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
    text = whole.get("text_config")
    if not isinstance(text, dict) or whole.get("model_type") == config.model_type:
        return
    own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text |= {name: own[name] for name in text if "dropout" in name and name in own}
    for part in (whole, text):
        part.pop("torch_dtype", None)
        part["dtype"] = own["dtype"]
    (folder / "config.json").write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_text(source: Path, folder: Path) -> None:
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if "auto_map" in (folder / "config.json").read_text(encoding="utf-8"):
        for code in source.glob("*.py"):
            shutil.copyfile(code, folder / code.name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", folder / "chat_templates")
