"""Reads adapters and their base models as files, without loading a model. Imports no torch."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from primerl.train.model import support
from primerl.train.model.families import OF_EXPERTS
from primerl.train.settings import ALL_LINEAR, ConfigError, LoraConfig
from primerl.train.weights.digest import digest_of, hash_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_FOLDER = "lora_adapters"
"""In a model folder: the adapter that is merged into the model there, in peft's layout."""
PREFIX = "base_model.model."
"""peft's prefix of the names of an adapter's tensors."""
BASE_DIGEST = "base_model_digest"
"""Key, in an adapter's metadata and among the tensors of a broadcast, of the weights it was trained on."""
LORA_ALPHA = "lora_alpha"
READ_AT_ONCE = 2 * 2**30
"""Bytes of a base model that can be hashed in a second or two; a larger one is compared after loading."""

READ_OR_HARMLESS = {
    *(
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "target_parameters",
        "init_lora_weights",
        "base_model_name_or_path",
        "bias",
    ),
    *("task_type", "inference_mode", "lora_dropout", "auto_mapping", "revision", "peft_version", "exclude_modules"),
    *("megatron_core", "qalora_group_size", "layers_pattern", "runtime_config"),
}
"""Keys of `adapter_config.json` that are read or harmless; any other key that is set makes another kind of adapter."""


def is_targeted(module: str, targets: Iterable[str]) -> bool:
    """Whether the module's name matches a target, as peft compares them."""
    return any(module == target or module.endswith("." + target) for target in targets)


def is_read_by_kernel(module: str, tensors: Container[str]) -> bool:
    """Whether it is the last matrix of a Mamba layer (which also has a `D`): a fused kernel reads its weight past
    the layer that peft puts in its place, so peft and engines refuse an adapter of it."""
    parent, _, own = module.rpartition(".")
    return own == "out_proj" and f"{parent}.D" in tensors


READ_BY_KERNEL = (
    "is the last matrix of a Mamba layer, whose weight a fused kernel reads past an adapter; omit it (in_proj can "
    "have one)"
)


def targeted_layers(shapes: Mapping[str, Sequence[int]], targets: list[str]) -> list[str]:
    """The linear layers that get an adapter, from the shapes of a model's tensors, as an engine knows them.

    Raises ValueError for any other target.
    """
    linear = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2
    ]
    if targets == [ALL_LINEAR]:
        return [name for name in linear if not is_read_by_kernel(name, shapes)]
    for target in targets:
        if not any(is_targeted(name, [target]) for name in linear):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
            raise ValueError(f"lora.target_modules: the model has no layer {target!r}; there are {known}")
    return [name for name in linear if is_targeted(name, targets)]


def adapter_shapes(shapes: Mapping[str, Sequence[int]], rank: int, targets: list[str]) -> dict[str, tuple[int, int]]:
    """Names and shapes of an adapter's own tensors, as they are broadcast. Raises ValueError as `targeted_layers`."""
    adapter: dict[str, tuple[int, int]] = {}
    for name in targeted_layers(shapes, targets):
        rows, columns = shapes[f"{name}.weight"]
        adapter[f"{PREFIX}{name}.lora_A.weight"] = (rank, columns)
        adapter[f"{PREFIX}{name}.lora_B.weight"] = (rows, rank)
    return adapter


def check_lora_files(config: LoraConfig, base: Path, key: str) -> None:
    """Checks what can be known before a model is loaded; `key` is the dotted prefix of the settings.

    Raises ConfigError.
    """
    shapes = {name: shape for name, _, shape, _ in tensor_bytes(base)}
    modules = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    has_experts = support.experts(support.read(base)) > 0
    for target in config.target_modules:
        for module in sorted(modules):
            if is_targeted(module, [target]) and is_read_by_kernel(module, shapes):
                raise ConfigError.at(f"{key}target_modules", f"{module} {READ_BY_KERNEL}")
        if has_experts and target.rsplit(".", 1)[-1] in OF_EXPERTS:
            continue  # Files have their tensors by other names than the model: it is asked when it is loaded.
        if target != ALL_LINEAR and not any(is_targeted(module, [target]) for module in modules):
            names = sorted({module.rsplit(".", 1)[-1] for module in modules})
            raise ConfigError.at(
                f"{key}target_modules",
                f"no layer of the model in {base} is called {target!r}; there are {', '.join(names)}",
            )
    if config.adapter_path is not None:
        read_adapter_config(config, key)
        file = Path(os.path.expanduser(config.adapter_path)) / ADAPTER_FILE
        if sum(path.stat().st_size for path in base.glob("*.safetensors")) <= READ_AT_ONCE:
            check_base(file, base, folder_digest(base), key)


def check_base(file: Path, base: Path, digest: str, key: str) -> None:
    """Raises ConfigError if the adapter in `file` was, by its metadata, trained on other weights than `base`."""
    try:
        found = base_digest(file)
    except ValueError as error:
        raise ConfigError.at(f"{key}adapter_path", f"{error}") from None
    if found is not None and found != digest:
        said = json.loads((file.parent / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ConfigError.at(
            f"{key}adapter_path",
            f"{file} was trained on another base model ({said}, digest {found}; that of {base} is "
            f"{digest}); give the model it was trained on as model.path",
        )


def base_digest(file: Path) -> str | None:
    """Digest of the weights that an adapter was trained on, if recorded. Raises ValueError, OSError."""
    with file.open("rb") as content:
        length = min(int.from_bytes(content.read(8), "little"), file.stat().st_size)
        try:
            found = json.loads(content.read(length)).get("__metadata__", {}).get(BASE_DIGEST)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from None
    return None if found is None else str(found)


def read_adapter_config(config: LoraConfig, key: str) -> dict[str, Any]:
    """`adapter_config.json` of the initial adapter. Raises ConfigError if the adapter is of another kind."""
    assert config.adapter_path is not None
    file = Path(os.path.expanduser(config.adapter_path)) / ADAPTER_CONFIG
    found = _of_known_kind(file, key)
    for name, own, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if found.get(name) != value:
            raise ConfigError(
                f"{key}{own} is {value:g}, but {file} has {name} = {found.get(name)}; set {key}{own} to that",
                f"{key}{own}",
            )
    return found


def published_scale(folder: Path, rank: int, alpha: float) -> float:
    """The factor of a published adapter's product, by its `adapter_config.json`, which has no hash in the manifest.

    `rank` is the run's, `alpha` that of the broadcast, which has it in float32. Raises ConfigError where the file is of
    another kind of adapter, or has another rank or alpha.
    """
    file = folder / ADAPTER_CONFIG
    found = _of_known_kind(file, "the run's lora.")
    if found.get("r") != rank:
        raise ConfigError(f"{file} has r = {found.get('r')}, but the run's adapters are of rank {rank}")
    own: Any = found.get("lora_alpha")
    if not is_alpha(own, alpha):
        raise ConfigError(f"{file} has lora_alpha = {own}, but the broadcast next to it was made with {alpha:g}")
    return float(own) / rank


def is_alpha(value: Any, published: float) -> bool:
    """Whether `published` is this value in float32, as broadcasts have it."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except (struct.error, OverflowError):
        return False
    return bool(rounded == published)


def _of_known_kind(file: Path, key: str) -> dict[str, Any]:
    folder = file.parent
    for needed in (file, folder / ADAPTER_FILE):
        if not needed.is_file():
            raise ConfigError.at(
                f"{key}adapter_path",
                f"there is no {needed}; give the folder of an adapter as peft saves it, for example "
                "weights/step_<N>/lora_adapters of a run with ckpt.weights.save_adapter_separately",
            )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError.at(f"{key}adapter_path", f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = found.get("peft_type") if isinstance(found, dict) else found
        raise ConfigError.at(f"{key}adapter_path", f"{file}: peft_type is {kind!r}; only LORA can be trained on")
    odd = {name for name, value in found.items() if value and name not in READ_OR_HARMLESS}
    odd |= {"bias"} if found.get("bias", "none") != "none" else set()
    # PiSSA and similar initialisations change the base model's weights too.
    odd |= {"init_lora_weights"} if found.get("init_lora_weights", True) not in (True, False, "gaussian") else set()
    for name in sorted(odd):
        raise ConfigError.at(f"{key}adapter_path", f"{file}: {name} is {found[name]!r}, which is not supported")
    return found


def tensor_bytes(folder: Path) -> Iterator[tuple[str, str, list[int], memoryview]]:
    """Name, dtype, shape and raw bytes of each tensor in the safetensors files of `folder`; the bytes are good until
    the next one is asked for. Raises ConfigError for a file that is not whole."""
    for _, name, dtype, shape, data in tensor_bytes_by_file(folder):
        yield name, dtype, shape, data


def tensor_bytes_by_file(folder: Path) -> Iterator[tuple[Path, str, str, list[int], memoryview]]:
    """As [`tensor_bytes`][primerl.train.adapters.files.tensor_bytes], each with its file."""
    for file in sorted(folder.glob("*.safetensors")):
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            for name, entry, start in _header(file, view):
                begin, end = (start + offset for offset in entry["data_offsets"])
                if end > len(view):
                    raise ConfigError(f"{file} is not a whole safetensors file; fetch or save it again")
                with view[begin:end] as data:
                    yield file, name, entry["dtype"], entry["shape"], data


def _header(file: Path, view: memoryview) -> Iterator[tuple[str, dict[str, Any], int]]:
    start = 8 + int.from_bytes(view[:8], "little")
    try:
        header = json.loads(bytes(view[8:start]))
    except ValueError as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}; fetch or save it again") from None
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry, start


def folder_digest(folder: Path) -> str:
    """Digest of a model folder's tensors as they are in its files (docs/architecture.md, "Weights")."""
    return digest_of((name, dtype, shape, hash_of(data)) for name, dtype, shape, data in tensor_bytes(folder))
