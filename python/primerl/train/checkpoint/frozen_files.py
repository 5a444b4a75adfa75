"""Copies of frozen tensors (`weights.frozen`) as files of a saved model folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from primerl.train.checkpoint.files import sync
from primerl.train.weights.frozen import Frozen
from primerl.train.weights.shards import file_name

TEMPORARY = "frozen-{}.safetensors"


def add_frozen(
    folder: Path, trained: dict[str, dict[str, int]], frozen: Frozen, max_shard_bytes: int
) -> dict[str, dict[str, int]]:
    """Writes the frozen tensors next to the trained ones, in files of about `max_shard_bytes` at most, and numbers all
    files again.

    Args:
        trained: sizes in bytes of the tensors that are there, by file and name.
    Returns:
        The same of all tensors.
    """
    written: dict[str, dict[str, int]] = {}
    for number, tensors in enumerate(_in_files(frozen.tensors(), max_shard_bytes)):
        name = TEMPORARY.format(number)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        sync(folder / name)
        written[name] = {tensor: value.nbytes for tensor, value in tensors.items()}
    found = {}
    count = len(trained) + len(written)
    for number, (name, sizes) in enumerate([*sorted(trained.items()), *written.items()], 1):
        numbered = file_name(number, count)
        # No file has the name of a later one: there are more of them now.
        (folder / name).rename(folder / numbered)
        found[numbered] = sizes
    return found


def _in_files(tensors: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > most:
            yield held
            held = {}
        held[name] = tensor
    if held:
        yield held
