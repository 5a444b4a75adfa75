"""A `transformers` causal language model over packed sequences: no padding token is ever computed on outside
attention, and no sequence attends to another.

A packed micro-batch is one row of T tokens, the sequences one after another. Everything but attention works on
single tokens, so only attention has to know where sequences begin; it learns that through `transformers`' own
attention interface, by the keyword argument `packed`.

Axes in names: T tokens of the micro-batch, S sequences, L longest sequence of a bucket, H heads, D head size,
V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from primerl.train.adapters.merging import NAME as ADAPTER
from primerl.train.model import experts, norms, support
from primerl.train.model.architectures import (
    annotate,
    decoder,
    limit_of_positions,
    note_of,
    query_scale,
    without_dropout,
)
from primerl.train.model.import_once import import_transformers
from primerl.train.model.packed import Bucket, by_rows, to_rows, written_out
from primerl.train.model.packed import ModelError as ModelError
from primerl.train.model.packed import PackedSequences as PackedSequences
from primerl.train.model.quantised import ask_for_numbers, check_parts, forget_quantisation
from primerl.train.model.sinks import flash_kernel, with_sinks
from primerl.train.model.tree_attention import by_kernel, by_unit
from primerl.train.objective.logprobs import LowRank, OutputHead
from primerl.train.weights.frozen import names_in, note_frozen

ATTENTION = "primerl_packed"
"""Name of the attention below in `transformers`' registry."""

IMPLEMENTATIONS = {"attn_implementation": ATTENTION, "experts_implementation": experts.EXPERTS}
TRUSTED = "primerl_trusted"
"""Attribute of models that were loaded by their own code."""

MOST_FLASH = 256
"""Largest head of flash attention."""

HALF = (torch.bfloat16, torch.float16)
"""What flash attention computes in."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def takes_gqa(kernel: Callable[..., Any]) -> bool:
    """Whether torch's flash attention needs an argument for fewer key heads than query heads; that of torch 2.11 has no
    such argument."""
    return "enable_gqa" in signature(kernel).parameters


FLASH_TAKES_GQA = takes_gqa(varlen.varlen_attn)
"""For the installed torch; at import, since compiled code cannot look at signatures."""


def dtype_on(device: torch.device, wanted: str | None) -> str:
    """The model's dtype on this device: `wanted` if given, else bfloat16 on a GPU that has it, since the fast attention
    kernels over packed rows need half precision, and float32 on a CPU."""
    if wanted is not None:
        return wanted
    half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if half else "float32"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H_kv, T, D]
    value: Tensor,  # [1, H_kv, T, D]
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    packed: PackedSequences | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; returns [1, T, H, D], as `transformers` expects it."""
    note = note_of(module)
    if note is not None and packed is None:
        packed = note.packed
    packed = _checked(module, packed, dropout, attention_mask)
    if note is not None and note.scale is not None:
        query = (query * query_scale(note, packed.position_ids).unsqueeze(-1)).to(query.dtype)
    if note is not None and note.chunk is not None:
        packed = packed.in_chunks(note.chunk)
    if sliding_window is not None and packed.longest <= sliding_window:
        sliding_window = None
    q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    flash, tree = softcap is None and _takes_flash(query, value), packed.tree
    if tree is not None and flash and s_aux is None:
        grouped = _grouped(q_THD, k_THD)
        out_THD = by_kernel(varlen.varlen_attn, q_THD, k_THD, v_THD, tree, scaling, sliding_window, **grouped)
    elif tree is not None:
        out_THD = by_unit(q_THD, k_THD, v_THD, tree, scaling, sliding_window, softcap, s_aux)
    elif flash and s_aux is None:
        out_THD = _varlen(q_THD, k_THD, v_THD, packed, scaling, sliding_window)
    elif flash and s_aux is not None:
        out_THD = with_sinks(q_THD, k_THD, v_THD, s_aux, flash_kernel(packed, scaling, sliding_window))
    else:
        out_THD = _by_bucket(q_THD, k_THD, v_THD, packed, scaling, sliding_window, softcap, s_aux)
    return out_THD.unsqueeze(0), None


def flash_sizes(query: int, value: int) -> bool:
    """Whether flash attention has a kernel for heads of these sizes: not for those of latent attention (DeepSeek), with
    larger queries than values, nor for very large ones (Gemma 4)."""
    return query == value and query <= MOST_FLASH and query % 8 == 0


def _takes_flash(query: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and flash_sizes(query.shape[-1], value.shape[-1])


def _checked(
    module: torch.nn.Module, packed: PackedSequences | None, dropout: float, mask: Tensor | None
) -> PackedSequences:
    """Raises ModelError for a request that this attention does not compute."""
    name = type(module).__name__
    if packed is None:
        raise ModelError(
            f"{name} does not get the sequence boundaries, because the model does not pass keyword arguments to its "
            "attention, so its sequences cannot be packed, and the architecture is not supported"
        )
    if dropout:
        raise ModelError(
            f"{name} asks for dropout ({dropout:g}), which engines do not compute, from a key that is not known as one "
            "of dropout; set it to 0 in the model's config.json"
        )
    if mask is not None:
        raise ModelError(
            f"{name} computes its own attention mask, which packed sequences do not have; the architecture is not "
            "supported"
        )
    if not getattr(module, "is_causal", True):
        raise ModelError(
            f"{name} lets tokens see later ones (it is not causal), so it gives no probabilities of the next token; "
            "train a decoder (an encoder may be one with `is_decoder` true in its config.json)"
        )
    return packed


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, scale: float, window: int | None) -> Tensor:
    """Flash attention over the packed row itself (GPU, half precision)."""
    rows = (packed.boundaries, packed.boundaries, packed.longest, packed.longest)
    return by_rows(varlen.varlen_attn, q, k, v, rows, scale, window, **_grouped(q, k))


def _grouped(q: Tensor, k: Tensor) -> dict[str, Any]:
    """The argument by which `varlen_attn` takes fewer key heads than query heads, where it has one."""
    return {"enable_gqa": q.shape[1] != k.shape[1]} if FLASH_TAKES_GQA else {}


def _by_bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention bucket by bucket. Empty slots are at the end of their row, where causality hides them from every
    real token, so no mask is needed and the result is exact; what is computed for them is dropped."""
    how = (scale, window, softcap, sinks)
    if len(packed.buckets) == 1:
        (bucket,) = packed.buckets
        return _attend(_to_slots(q, bucket), _to_slots(k, bucket), _to_slots(v, bucket), bucket, *how)
    parts, tokens = [], []
    for bucket in packed.buckets:
        q_rows, k_rows, v_rows = (_to_slots(x.index_select(0, bucket.tokens), bucket) for x in (q, k, v))
        parts.append(_attend(q_rows, k_rows, v_rows, bucket, *how))
        tokens.append(bucket.tokens)
    # As many heads as queries, as wide as values.
    return v.new_empty(*q.shape[:2], v.shape[2]).index_copy(0, torch.cat(tokens), torch.cat(parts))


def _to_slots(x: Tensor, bucket: Bucket) -> Tensor:
    """[t, H, D] -> [S, H, L, D]; empty slots are 0."""
    return to_rows(x, bucket).transpose(1, 2)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[S, H, L, D] -> [t, H, D]"""
    if softcap is not None or sinks is not None or (window is not None and _on_gpu(q)):
        # A window, too: on a GPU each layer would keep its mask of all pairs, as numbers, for the backward pass.
        out = written_out(q, k, v, scale, window, softcap, sinks)
    else:
        mask = None
        if window is not None:
            mask = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        grouped, causal = q.shape[1] != k.shape[1], mask is None
        if grouped and _on_gpu(q):
            # The kernel of what flash attention does not take has no GQA; without it the scores of all pairs are kept.
            group, grouped = q.shape[1] // k.shape[1], False
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if out.shape[0] == bucket.slots.shape[0] else out.index_select(0, bucket.slots)


def load_model(
    path: str | Path,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    attention: str = ATTENTION,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """The checkpoint in folder `path` as a `transformers` model with packed attention, in training mode. `attention`:
    another one, by the name that it is registered under.

    `trust_remote_code`: code of the folder may be run, where its config names some.

    Raises:
        ModelError: no such folder, no `config.json`, or `transformers` cannot load it.
    """
    import_transformers()
    with reading(path, trust_remote_code) as (folder, config):
        how: dict[str, Any] = {"dtype": DTYPES[dtype], **IMPLEMENTATIONS, "local_files_only": True}
        how["attn_implementation"] = attention
        kind, own = kind_of(config)
        # Else it says only that there are some.
        how["ignore_mismatched_sizes"] = True
        model, loaded = kind.from_pretrained(folder, config=config, **how, **own, output_loading_info=True)
    other = sorted(loaded["mismatched_keys"])
    if other:
        name, there, implied = other[0]
        raise ModelError(
            f"model folder {folder}: {name} has shape {list(there)}, config.json implies {list(implied)}; give weights "
            "and a config.json that belong together"
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        # Else transformers trains on random numbers in their place.
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(
            f"model folder {folder} lacks tensors that its config.json asks for: {listed}; fetch or save it again"
        )
    forget_quantisation(model, DTYPES[dtype])
    note_frozen(model, folder)
    if own:
        setattr(model, TRUSTED, True)
    model = model.to(device).train()
    annotate(model, attention)
    experts.install(model)
    norms.install(model)
    return model


def model_shape(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The same model in fp32, on torch's meta device: its tensors have shapes, and no memory. Raises ModelError."""
    import_transformers()
    with reading(path, trust_remote_code) as (folder, config), torch.device("meta"):
        # Some are made of tensors that say themselves where they are.
        kind, own = kind_of(config)
        made = kind.from_config(config, dtype=torch.float32, **IMPLEMENTATIONS, **own)
        forget_quantisation(made, torch.float32)
        model = made.to("meta").train()
        note_frozen(model, folder)
    annotate(model, ATTENTION)
    experts.install(model)
    norms.install(model)
    return model


def kind_of(config: Any) -> tuple[Any, dict[str, Any]]:
    """The class of `transformers` that loads models with this config: of text, or, where there is none, of text and
    images, whose text model is trained then; and what it needs to run the model's own code. Raises ModelError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for kind in kinds:
        if type(config) in kind._model_mapping:
            return kind, {}
        if kind.__name__ in (getattr(config, "auto_map", None) or {}):
            return kind, {"trust_remote_code": True}
    raise ModelError(
        f"transformers has no model of type {config.model_type!r} that continues a text; give the folder of a causal "
        "language model (docs/models.md)"
    )


def checked_folder(path: str | Path) -> Path:
    """The folder, if it can be one of a model. Raises ModelError."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"model folder: {support.no_config(folder)}")
        raise ModelError(f"model folder {folder} has no config.json; give the folder of a Hugging Face checkpoint")
    return folder


@contextmanager
def reading(path: str | Path, trust_remote_code: bool = False) -> Iterator[tuple[Path, Any]]:
    """A checkpoint's folder and its config without dropout, for `transformers`, which knows our attention then."""
    from transformers import AttentionInterface, AutoConfig
    from transformers.utils import logging

    folder, refused = checked_folder(path), support.too_old()
    if refused is not None:
        raise ModelError(refused)
    AttentionInterface.register(ATTENTION, packed_attention)
    experts.register()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = ""
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        refused = support.refusal(given, trusted=trust_remote_code)
        if refused is not None:
            raise ModelError(refused)
        own = {"trust_remote_code": True} if support.has_own_code(given) else {}
        config = without_dropout(AutoConfig.from_pretrained(folder, local_files_only=True, **own))
        kind = config.model_type
        if ask_for_numbers(config):
            check_parts(names_in(folder))
        yield folder, config
    except ModelError as error:
        raise ModelError(f"model folder {folder}: {error}") from None
    except Exception as error:  # a broken config or file may raise anything
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise ModelError(
                f"model folder {folder}: transformers has this architecture ({kind}) with attention of its own, which "
                "cannot be given the starts of packed sequences; it is not supported"
            ) from error
        raise ModelError(f"model folder {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def predicted_hidden(model: Any, token_ids: Tensor, packed: PackedSequences, targets: Tensor) -> Tensor:
    """The last hidden states that the tokens at packed indices `targets` are predicted from, [len(targets), H]: those
    of the tokens before them. No target may be the first token of its sequence. `token_ids` are the T tokens of all
    sequences, also where those that are shared are computed once.

    Raises ModelError where sequences of these lengths cannot be in one row."""
    limit = limit_of_positions(model.config.get_text_config(), packed.lengths)
    if limit is not None:
        raise ModelError(
            f"{type(model).__name__}: the model computes positions differently above {limit} tokens, so longer and "
            f"shorter sequences cannot be packed together; let no sequence be longer than {limit} (`seq_len`)"
        )
    predictors = targets - 1
    if packed.tree is not None:
        # The token before a branch predicts the first token of each branch: not its neighbour in the row.
        predictors = packed.tree.row_of.index_select(0, predictors)
        token_ids = token_ids.index_select(0, packed.tree.kept)
    output = decoder(model)(
        input_ids=token_ids.unsqueeze(0), position_ids=packed.position_ids, use_cache=False, packed=packed
    )
    hidden: Tensor = output.last_hidden_state.squeeze(0)
    return hidden.index_select(0, predictors)


def predicted_logits(model: Any, token_ids: Tensor, packed: PackedSequences, targets: Tensor) -> Tensor:
    """Logits of the tokens at packed indices `targets`: [len(targets), V], in fp32, all at once.

    The logits of a token are those the model gives at the token before it, and only these are computed.
    """
    return output_head(model).logits(predicted_hidden(model, token_ids, packed, targets))


def output_head(model: Any) -> OutputHead:
    """What the model makes of its last hidden states. Raises ModelError where that is not known; `prove` compares it
    with what the model computes itself."""
    layer, config = model.get_output_embeddings(), model.config.get_text_config()
    adapter = None
    if hasattr(layer, "lora_A"):
        adapter = LowRank(layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, float(layer.scaling[ADAPTER]))
        layer = layer.get_base_layer()
    if not isinstance(layer, torch.nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output layer; not supported")
    scale = 1.0
    # Under these names transformers has models that multiply (Cohere) and that divide (Granite).
    if getattr(config, "logit_scale", None) is not None:
        scale = float(config.logit_scale)
    elif getattr(config, "logits_scaling", None) is not None:
        scale = 1.0 / float(config.logits_scaling)
    softcap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(layer.weight, layer.bias, scale, None if softcap is None else float(softcap), adapter)
