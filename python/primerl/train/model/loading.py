"""From a model folder to a model that can be trained, on one rank or divided among several.

    start_folder  the folder that supervised fine-tuning starts from: one that exists, or a tiny model made from scratch
    load          leading rank: whole, on the CPU, in fp32       others: its shape, without memory for it
                  a large one: its shape there, too, and where its tensors are (`streaming`)
    make_ready    proved (by the leading rank), also over a tree of samples; adapter, what is computed again, compiled,
                  divided; then each tensor from the leading rank to the others, who keep their share

So there is one whole model in memory at most, on one machine, and for a moment one whole tensor on each device. A rank
that is alone loads the model as it computes; where the files are more precise, it reads them again, in fp32, for the
optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from primerl.train.adapters.files import folder_digest
from primerl.train.adapters.lora import Adapter, add_adapter
from primerl.train.checkpoint.files import whole_folder
from primerl.train.checkpoint.step_folders import saving
from primerl.train.distributed.fsdp import shard
from primerl.train.distributed.ranks import Ranks
from primerl.train.model import streaming
from primerl.train.model.flops import Performance
from primerl.train.model.import_once import import_transformers
from primerl.train.model.layers import prepare
from primerl.train.model.packed_model import DTYPES, HALF, TRUSTED, ModelError, dtype_on, load_model, model_shape
from primerl.train.model.proof import check_same, prove, sample
from primerl.train.model.recurrent import slower_kernels
from primerl.train.model.tree_proof import kernel_refusal, tree_refusal
from primerl.train.optim import START
from primerl.train.settings import ComputationConfig, ConfigError, LoraConfig
from primerl.train.sft_settings import SFTConfig

if TYPE_CHECKING:
    from primerl.models.tiny import TinyConfig


log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

SAFETENSORS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
"""Floating-point types -> their names in safetensors files."""


def import_models() -> None:
    """To be called before a thread loads a model while another one reads rows: `datasets` looks for names in
    `transformers` as soon as that is in `sys.modules`, which it is long before its import is complete. With what
    `torch.manual_seed` and optimizers import, so that the caller can import all of it without collecting garbage.
    """
    import torch._dynamo  # noqa: F401

    import_transformers()
    from transformers import (  # noqa: F401 - each of them imports its own part of the library
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerBase,
    )


def model_folder(config: SFTConfig) -> Path:
    return Path(config.model.path or Path(config.output_dir) / "weights" / "step_0")


@contextmanager
def start_folder(config: SFTConfig, ranks: Ranks) -> Iterator[Path]:
    """The model to start from. One that the leading rank makes from scratch is kept only if the block succeeds, so that
    the same command can be repeated after a mistake in the settings or the data.

    Raises:
        ConfigError: there cannot be such a model, or the run was started with another one.
        SavingError: it cannot be written.
    """
    target, tiny = model_folder(config), config.model.tiny
    makes = tiny is not None and ranks.leads and not target.is_dir()
    try:
        if tiny is not None and not makes and target.is_dir():
            _check_tiny(config, tiny, target)
        if tiny is not None and makes:
            _make_tiny(target, tiny, config.seed)
        ranks.wait()
        yield target
    except BaseException:
        if makes:
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):
                target.parent.rmdir()  # where nothing else is in it
        raise


def _check_tiny(config: SFTConfig, tiny: TinyConfig, target: Path) -> None:
    from primerl.models.tiny import differences

    other = differences(target, tiny)
    if other:
        raise ConfigError(
            f"model.tiny is not what the run in {config.output_dir} was made with: {'; '.join(other)}; set it as it "
            "was, or give another output_dir",
            "model.tiny",
        )


def _make_tiny(target: Path, tiny: TinyConfig, seed: int) -> None:
    from primerl.models.tiny import write_model

    with saving(target), whole_folder(target) as folder:
        try:
            write_model(folder, tiny, seed=seed)
        except ValueError as error:
            raise ConfigError.at("model.tiny", str(error)) from error


def load(folder: Path, dtype: str, ranks: Ranks, trust_remote_code: bool = False, *, whole: bool = False) -> Any:
    """No rank waits for another, so a thread may call it. Pass it through `together` to raise the leading rank's error
    on all of them. `whole`: also where it is large, as an adapter needs it.

    Raises ModelError.
    """
    if ranks.size == 1:
        return load_model(folder, dtype, ranks.device, trust_remote_code=trust_remote_code)
    if not ranks.leads:
        return model_shape(folder, trust_remote_code=trust_remote_code)
    streams = not (whole or trust_remote_code) and streaming.is_large(folder)
    large = streaming.streamed(folder) if streams else None
    return load_model(folder, trust_remote_code=trust_remote_code) if large is None else large


def make_ready(
    model: Any,
    config: ComputationConfig,
    lora: LoraConfig | None,
    folder: Path,
    seed: int,
    ranks: Ranks,
    *,
    frozen: bool = False,
) -> tuple[Adapter | None, Performance, bool]:
    """Prepare the model that `load` has loaded from `folder` for training. All ranks have to call it. Also returns
    whether tokens that samples share can be computed once. `frozen`: its own weights are never trained.

    Raises:
        ModelError: packed, it does not compute what it computes alone; its layers cannot be run as configured.
        ConfigError: the adapter cannot be added.
    """
    dtype = DTYPES[dtype_on(ranks.device, config.dtype)]
    # Machines may have other packages.
    slower = ranks.union(slower_kernels(model, ranks.device, dtype))
    for why in slower if ranks.leads else ():
        log.warning("%s", why)
    tried = model
    if ranks.agree(getattr(model, streaming.SOURCE, None) is not None):
        tried = _prove_first_layers(model, folder, ranks)
    else:
        together(ranks, lambda: prove(model) if ranks.leads else None)
    shares = config.shared_prefixes == "auto" and _can_share(tried, dtype, lora, ranks)
    if tried is not model:
        _divide(tried, ranks, dtype)
    adapter = None
    if lora is not None:
        digest = ranks.agree(together(ranks, lambda: folder_digest(folder) if ranks.leads else ""))
        adapter = together(ranks, lambda: add_adapter(model, lora, folder, seed, digest))
    prepare(model, config.activation_checkpointing, config.compile)
    performance = Performance.of(model, dtype, ranks, config.peak_tflops)
    if ranks.size > 1:
        _divide(model, ranks, dtype)
    elif adapter is None and not frozen:
        keep_start(model, folder)
    return adapter, performance, shares


def _can_share(model: Any, dtype: torch.dtype, lora: LoraConfig | None, ranks: Ranks) -> bool:
    """Whether all ranks can compute shared tokens once; logs why not."""
    refused = ranks.agree(tree_refusal(model) if ranks.leads else None)
    if refused is None and lora is not None and lora.dropout:
        refused = "the adapter has dropout, which each sample draws for itself"
    if ranks.device.type == "cuda" and dtype in HALF:
        by_ranks = ranks.union([kernel_refusal(ranks.device, dtype) or ""])
        refused = refused or by_ranks[-1] or None
    if refused is not None:
        log.info("tokens that samples share are computed once for each sample (shared_prefixes): %s", refused)
    return refused is None


def keep_start(model: Any, folder: Path) -> None:
    """Give the parameters of a model that is loaded in less than fp32 their values in `folder`, for the optimizer, so
    that training starts from the same weights as with several ranks, which load them in fp32. They are on the CPU, and
    gone when the optimizer has its copies; adapters are updated in their place and need none.

    Raises ModelError.
    """
    rounded = {name: one for name, one in model.named_parameters() if one.dtype != torch.float32}
    if not rounded or not more_precise(folder, {one.dtype for one in rounded.values()}):
        return
    size_gb = sum(one.numel() for one in rounded.values()) * 4 / 1e9
    log.info("the model's files are more precise than what it computes in: they are read in fp32 (%.1f GB)", size_gb)
    trusted = TRUSTED in vars(model)
    for name, value in load_model(folder, trust_remote_code=trusted).named_parameters():
        weight = rounded.get(name)
        if weight is not None and not torch.equal(value.to(weight.dtype).float(), value):
            setattr(weight, START, value.detach())


def more_precise(folder: Path, dtypes: set[torch.dtype]) -> bool:
    """Whether files of the model hold floating-point values of another type than these. Files of a kind that says
    nothing of it without being loaded are taken for such."""
    files = sorted(folder.glob("*.safetensors"))
    names = {SAFETENSORS[dtype] for dtype in dtypes}
    for file in files:
        with safe_open(file, "pt") as content:
            kinds = {content.get_slice(name).get_dtype() for name in content.keys()}  # noqa: SIM118 (not a mapping)
        if any(kind in SAFETENSORS.values() and kind not in names for kind in kinds):
            return True
    return not files


def together(ranks: Ranks, action: Callable[[], Answer]) -> Answer:
    """Run `action` on each rank; a ModelError or ConfigError of one is raised on all."""
    answer, error = None, None
    try:
        answer = action()
    except (ModelError, ConfigError) as own:
        error = own
    said = ranks.union([] if error is None else [str(error)])
    if error is not None:
        raise error
    if said:
        raise ModelError(said[0])
    return answer  # type: ignore[return-value]


def _prove_first_layers(model: Any, folder: Path, ranks: Ranks) -> Any:
    """In place of a model that is too large to be in one memory; returns them."""
    source = getattr(model, streaming.SOURCE, None)
    small = together(ranks, lambda: streaming.first_layers(folder, source))
    together(ranks, lambda: prove(small) if ranks.leads else None)
    return small


def _divide(model: Any, ranks: Ranks, dtype: torch.dtype) -> None:
    source = getattr(model, streaming.SOURCE, None)
    in_files = {name: getattr(tensor, streaming.OF_FILE, None) for name, tensor, _ in _tensors(model)}
    is_streamed = ranks.agree(source is not None)
    # Detached, since `shard` moves each parameter to the device in place, which has no room for all of them.
    whole = {name: tensor.detach() for name, tensor, _ in _tensors(model)}
    together(ranks, partial(_check_shape, ranks.agree({name: tensor.shape for name, tensor in whole.items()}), whole))
    expected = sample(model) if ranks.leads and not is_streamed else []
    shard(model, ranks, dtype)
    if not ranks.leads or is_streamed:
        model.to_empty(device=ranks.device)
    fill(model, whole, ranks, lambda name, given: streaming.value_of(source, in_files[name], given))
    if not is_streamed:
        together(ranks, partial(check_same, model, ranks.agree(expected), dtype))
    # What stays whole until a backward pass: an optimizer would take it for the shares.
    model.reshard()


def _check_shape(leading: dict[str, torch.Size], own: dict[str, Tensor]) -> None:
    """Raises ModelError where the model is made otherwise by its config than by its files."""
    other = [name for name in leading.keys() | own.keys() if name not in own or leading.get(name) != own[name].shape]
    if other:
        raise ModelError(
            f"its config.json describes another model than its files hold ({min(other)}), so it cannot be divided "
            "among ranks; fix config.json (tie_word_embeddings, or sizes), or train it on one rank"
        )


@torch.no_grad()
def fill(
    model: Any,
    whole: dict[str, Tensor],
    ranks: Ranks,
    value: Callable[[str, Tensor], Tensor] = lambda _name, given: given,
) -> None:
    """Each tensor of a model that is divided among ranks takes the leading rank's value, of which each keeps its share.
    `whole`: by name, the leading rank's with values; used up. `value`: of one that has none there."""
    for name, tensor, put in _tensors(model):
        given = whole.pop(name)
        given = value(name, given).to(ranks.device) if ranks.leads else torch.empty_like(given, device=ranks.device)
        if isinstance(tensor, DTensor):
            # Scattered from the first rank of the mesh.
            tensor.copy_(distribute_tensor(given, tensor.device_mesh, tensor.placements))
        else:
            given = given.contiguous()
            torch.distributed.broadcast(given, src=0)
            put(given)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]:
    """Parameters, buffers and other tensors of modules, each once and in the same order on all ranks, with a function
    that replaces it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        own |= {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}", tensor, partial(setattr, module, name)
