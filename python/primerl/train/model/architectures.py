"""Adapts some of `transformers`' architectures so that packed rows are computed exactly, and as engines compute them.
`load_model` applies it.

dropout                  is set to 0, as engines compute without it: the trained policy has to be the one that samples
passing `packed` on      layers of StableLM and Nemotron drop it: it is left where their attention finds it
chunked attention        Llama 4: a token sees only its own chunk of its sequence
position scaling         Llama 4 scales queries by the token's position in the row: here by that in its sequence
states and convolutions  of linear attention and Mamba-2 restart with each sequence: see `recurrent`
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primerl.train.model import recurrent
from primerl.train.model.packed import PackedSequences

log = logging.getLogger(__name__)

NOTE = "primerl_note"
"""Attribute of attention modules that holds their `Note`."""


@dataclass(slots=True)
class Note:
    """What an attention module needs besides the arguments it is called with."""

    packed: Any = None
    """What its layer was called with, for layers that do not pass it on."""
    chunk: int | None = None
    """Tokens of a sequence that attend only to each other."""
    scale: tuple[float, float] | None = None
    """(a, n): the query at position p is multiplied by 1 + a * log(1 + floor((p + 1) / n))."""


def note_of(module: torch.nn.Module) -> Note | None:
    return getattr(module, NOTE, None)


def decoder(model: Any) -> Any:
    """The model without its output layer."""
    base = model.base_model
    # `base_model` looks up a name that the class gives, under which Llama 4 has nothing.
    return getattr(model, "model", model) if base is model else base


def text_decoder(model: Any) -> Any:
    """The part of `decoder` that computes tokens; another one only in a model that reads pictures or sounds too."""
    found = model.get_decoder()
    return decoder(model) if found is model else found


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The decoder's layers in order; empty if they are unknown."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    text = text_decoder(model)
    for part in [getattr(text, "layers", None), *text.modules()]:
        if isinstance(part, torch.nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in part):
            return list(part)
    return []


def without_dropout(config: Any) -> Any:
    """The model's config with every dropout set to 0; logs which were not."""
    found = {}
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value > 0 and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                setattr(part, name, 0.0)
                found[name] = value
    if found:
        asked = ", ".join(f"{name} {value:g}" for name, value in found.items())
        log.info("the model's config.json asks for dropout (%s): set to 0, since engines compute without", asked)
    return config


def query_scale(note: Note, positions: Tensor) -> Tensor:
    """fp32, one for each of the positions, which are counted within their sequences."""
    assert note.scale is not None
    strength, every = note.scale
    return torch.log1p(torch.floor((positions.float() + 1.0) / every)) * strength + 1.0


def limit_of_positions(config: Any, lengths: Sequence[int]) -> int | None:
    """With rotary positions of type `longrope` and `dynamic` (Phi 3.5), the longest sequence of a row decides the
    rotation of all its tokens. Returns the longest allowed length if sequences of these lengths need different ones."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):  # of all layers, or of each type of them
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("longrope", "dynamic"):
            continue
        limit = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        if max(lengths) > limit and not (kind == "longrope" and min(lengths) > limit):
            return limit
    return None


def annotate(model: Any, attention: str) -> None:
    """Leave notes for the attention modules that need one, and pass sequence boundaries to layers with a state.
    `attention`: the name our attention is registered under."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    for module in _attentions(model):
        if module.layer_idx < len(kinds) and kinds[module.layer_idx] == "chunked_attention":
            _note(module).chunk = config.attention_chunk_size
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False
            # Layers with rotary positions are not scaled.
            if not getattr(module, "use_rope", False):
                _note(module).scale = (module.attn_scale, float(module.floor_scale))
    recurrent.install(model)
    for layer in decoder_layers(model):
        if any(recurrent.needs_sequence_ids(mixer) for mixer in recurrent.mixers(layer)):
            layer.register_forward_pre_hook(_as_sequence_ids, with_kwargs=True)
    if reached(model, attention) is False:
        _hand_on(model)


def _as_sequence_ids(_module: Any, given: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Convolutions of LFM2 receive only `seq_idx`."""
    return given, keywords | {"seq_idx": keywords.get("packed")}


def _attentions(module: torch.nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if hasattr(part, "is_causal") and isinstance(getattr(part, "layer_idx", None), int):
            yield part


def _note(module: torch.nn.Module) -> Note:
    note = note_of(module)
    if note is None:
        note = Note()
        setattr(module, NOTE, note)
    return note


class _Reached(Exception):  # noqa: N818 (not an error: ends the forward pass)
    """The first attention was called, with `packed` or without."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told


def reached(model: Any, attention: str) -> bool | None:
    """Whether the keyword `packed` reaches the model's attention; None if no registered attention is called.

    The forward pass ends at the first attention, so this costs next to nothing."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def first(*_: Any, packed: Any = None, **__: Any) -> None:
        raise _Reached(packed is not None)

    own = ALL_ATTENTION_FUNCTIONS[attention]
    device = next(model.parameters()).device
    packed = PackedSequences.from_lengths([2], device)
    token_ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    AttentionInterface.register(attention, first)
    try:
        with torch.no_grad():
            decoder(model)(input_ids=token_ids, position_ids=packed.position_ids, use_cache=False, packed=packed)
    except _Reached as found:
        return found.told
    except Exception as error:  # noqa: BLE001 (whatever it is, `prove` runs into it too and says so)
        log.debug("the forward pass failed before any attention: %s", error)
    finally:
        AttentionInterface.register(attention, own)
    return None


def _hand_on(model: Any) -> None:
    """Note `packed` for the attention of layers that are called with it and drop it."""
    for layer in decoder_layers(model):
        notes = [_note(module) for module in _attentions(layer)]

        def noted(_module: Any, _given: Any, keywords: dict[str, Any], notes: list[Note] = notes) -> None:
            for note in notes:
                note.packed = keywords.get("packed")

        layer.register_forward_pre_hook(noted, with_kwargs=True)
