"""What a model's `config.json` alone says about it: whether it can be trained, adapted, served and divided, or why not.

Preflight, dry runs, `primerl run models`, `primerl models check` and the trainer all ask here, so they agree; tests
compare the answers with what loading and proving a model finds. Imports no torch and reads no weights, so a model can
be judged before its weights are downloaded. `primerl.train.model.footprint` estimates its size.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from primerl.train.model.families import (
    ALIASES,
    EMBEDDED_TYPES,
    ENCODERS,
    EXPERT_COUNTS,
    GPU_PACKAGES,
    IN_MXFP4,
    MXFP4,
    NOT_CACHED,
    OF_EXPERTS,
    OWN_EXPERTS,
    PROJECTIONS,
    REFUSED,
    WITH_STATE,
    WITHOUT_LAYERS,
)
from primerl.train.settings import ALL_LINEAR

OLDEST_TRANSFORMERS = (5, 17)
"""That was tried."""

Config = Mapping[str, Any]
"""The content of a `config.json`."""

SUPPORTED = "docs/models.md lists what is supported"

GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Endings of the names in `architectures` that generate text."""


def read(folder: Path) -> Config:
    """The folder's `config.json`; empty where it is missing or cannot be read, which others report."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


CONFIG_OF_TYPE = re.compile(r"""["']([\w.-]+)["']\s*[,:]\s*["']\w*Config["']""")
"""An entry of the tables of `transformers`."""
OWN_CODE = (
    "transformers has no models of type {kind!r}, and its config.json names code of its own (auto_map), which could do "
    "whatever you can; read that code, and then set model.trust_remote_code = true"
)


def text_config(config: Config) -> Config:
    """The part that describes the text model; another one only in models that read images or sound too."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def model_type(config: Config) -> str:
    """Type of the text model, which is what is trained."""
    return str(text_config(config).get("model_type") or config.get("model_type"))


@cache
def known_types() -> frozenset[str]:
    """Types that the installed `transformers` has a config for, from its source: importing it takes a second. Empty
    where that cannot be read."""
    spec = find_spec("transformers")
    found: set[str] = set()
    for folder in (spec and spec.submodule_search_locations) or ():
        for name in ("auto_mappings.py", "configuration_auto.py"):
            with contextlib.suppress(OSError):
                text = (Path(folder) / "models" / "auto" / name).read_text(encoding="utf-8")
                found.update(CONFIG_OF_TYPE.findall(text))
    return frozenset(found)


def has_own_code(config: Config) -> bool:
    """Whether the model's folder has code that loads it, which `transformers` needs, since it has none."""
    named, kind = config.get("auto_map"), config.get("model_type")
    return isinstance(named, Mapping) and "AutoConfig" in named and kind not in known_types()


def type_refusal(config: Config, *, trusted: bool = False) -> str | None:
    """Why nothing is known of a model's type. `trusted`: code of the model may be run (`model.trust_remote_code`)."""
    kind, known = config.get("model_type"), known_types()
    if has_own_code(config):
        return None if trusted else OWN_CODE.format(kind=kind)
    if not isinstance(kind, str) or not kind:
        return "its config.json has no model_type; fetch or save the model again"
    if known and kind not in known:
        return (
            f"transformers {version('transformers')} has no models of type {kind!r}; correct model_type in "
            "config.json, or install a version that has them"
        )
    return None


SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
OF_LAYERS = ("num_attention_heads", "num_key_value_heads")
"""Sizes that may be a list, with a value for each layer."""
MOST_LAYERS = 10_000
"""More than any model has, and few enough to go through."""


def size_problem(config: Config) -> str | None:
    """Which size in the config no model can have."""
    given = text_config(config)
    for size in (*SIZES, *OF_LAYERS):
        for name in (size, *ALIASES.get(size, ())):
            value = given.get(name)
            if value is None or (size in OF_LAYERS and isinstance(value, list)):
                continue
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < 1
            if wrong or (size == "num_hidden_layers" and value > MOST_LAYERS):
                most = f" and at most {MOST_LAYERS:,}" if size == "num_hidden_layers" else ""
                return (
                    f"its config.json has {name} = {json.dumps(value)}, which has to be a whole number of at least "
                    f"1{most}; fetch or save the model again"
                )
    return None


def training_refusal(config: Config, *, trusted: bool = False) -> str | None:
    """Why a model of this architecture cannot be trained; None where nothing in its config forbids that."""
    of_type = type_refusal(config, trusted=trusted)
    if of_type is not None:
        return of_type
    of_size = size_problem(config)
    if of_size is not None:
        return of_size
    kind = model_type(config)
    if kind in REFUSED:
        return f"{REFUSED[kind]}, so this architecture ({kind}) is not supported; {SUPPORTED}"
    names = _architectures(config)
    if names and not any(name.endswith(GENERATES) for name in names):
        return f"it is a {', '.join(names)}, which does not generate text; give a model ..ForCausalLM"
    if kind in ENCODERS and not text_config(config).get("is_decoder"):
        return (
            f"its attention lets tokens see later ones ({kind} is an encoder), so it gives no probabilities of the "
            "next token; train a decoder (an encoder may be one with `is_decoder` true in its config.json)"
        )
    return None


def quantisation(config: Config) -> str | None:
    """In what the weights are quantised; None where they are numbers."""
    given = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not given:
        return None
    return str(given.get("quant_method") or "an unnamed way") if isinstance(given, Mapping) else str(given)


def dequantises(config: Config) -> bool:
    """Whether the weights are quantised in a way that they are read from as numbers: MXFP4 of gpt-oss, whose values
    bfloat16 has all."""
    return quantisation(config) == MXFP4 and model_type(config) in IN_MXFP4


def weights_refusal(config: Config) -> str | None:
    """Why the weights that belong to this `config.json` cannot be trained, as the end of `weights are ...`."""
    method = quantisation(config)
    if method is None or dequantises(config):
        return None
    return (
        f"quantised ({method}: config.json has a quantization_config), which cannot be trained; give the model in "
        "bfloat16 or float32"
    )


def refusal(config: Config, *, trusted: bool = False) -> str | None:
    """Why the trainer refuses a model with this `config.json`, on whatever device."""
    of_weights = weights_refusal(config)
    if of_weights is not None:
        return f"its weights are {of_weights}"
    return training_refusal(config, trusted=trusted)


SLOWER = "this model's layers of linear attention are computed by torch's own operators on a GPU, which is slower"


def slower_on_gpu(config: Config) -> str | None:
    """Why a model with this `config.json` is trained more slowly than it could be on a GPU of this machine."""
    needed = GPU_PACKAGES.get(model_type(config))
    if needed is None or not has_state(config) or find_spec(needed[1]) is not None:
        return None
    return slower_without(needed[0], f"no module {needed[1]}")


def slower_without(package: str, problem: str) -> str:
    return f"{SLOWER}: {package} is missing ({problem}); install it (`pip install {package}`)"


def layout_refusal(config: Config, ranks: int, *, compiles: bool = False) -> str | None:
    """Why the model cannot be divided among `ranks`, or compiled layer by layer."""
    kind = model_type(config)
    if kind in WITHOUT_LAYERS and (ranks > 1 or compiles):
        return (
            f"this architecture ({kind}) has no list of layers, which compile and several ranks need; leave compile "
            "out, and train on one rank"
        )
    return None


def has_state(config: Config) -> bool:
    """Whether layers carry a state from token to token, or mix neighbours by a convolution."""
    text = text_config(config)
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list):
        return not WITH_STATE.isdisjoint(map(str, kinds))  # Granite 4 also comes without Mamba
    return model_type(config) in GPU_PACKAGES


def experts(config: Config) -> int:
    """Experts of a layer; 0 for a dense model."""
    text = text_config(config)
    counts = (text.get(name) for name in EXPERT_COUNTS)
    return next((int(count) for count in counts if isinstance(count, int) and count > 1), 0)


def adapts_experts(config: Config, targets: Sequence[str]) -> bool:
    """Whether adapters of these `target_modules` reach experts of a mixture."""
    if not experts(config) or model_type(config) in OWN_EXPERTS:
        return False
    return any(target == ALL_LINEAR or target.rsplit(".", 1)[-1] in OF_EXPERTS for target in targets)


def embedded_engine_merges(config: Config, targets: Sequence[str]) -> str | None:
    """Why the embedded engine is sent merged weights in place of adapters of these `target_modules`."""
    kind = model_type(config)
    if config and (kind not in EMBEDDED_TYPES or adapts_experts(config, targets)):
        return f"the embedded engine takes adapters of {', '.join(EMBEDDED_TYPES)}, not of {kind}"
    return None


def vllm_merges(config: Config) -> str | None:
    """Why vLLM is sent merged weights in place of adapters."""
    if experts(config):
        return (
            "with adapters vLLM computes a mixture's experts by Triton, which ends it on a CPU; on GPUs adapters of "
            "mixtures are not proved"
        )
    if has_state(config):
        return "adapters of layers with a state are not proved on vLLM"
    if "text_config" in config:
        return "vLLM has this model with images too, under other names than the adapter's"
    return None


def embedded_engine_refusal(config: Config) -> str | None:
    """Why the embedded engine's own decoder cannot compute this model exactly."""
    problem = _own_decoder_problem(config)
    if problem is None:
        return size_problem(config)
    other = "serve this model with vLLM"
    if transformers_engine_refusal(config) is None:
        other = 'set inference.backend to "transformers" (slower), or serve this model with vLLM'
    return f"{problem}; {other}"


def _own_decoder_problem(config: Config) -> str | None:
    kind = config.get("model_type")
    if kind not in EMBEDDED_TYPES:
        return f"the embedded engine serves {', '.join(EMBEDDED_TYPES)}, not {kind!r}"
    neutral: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, 1.0, None),
    }
    for name, values in neutral.items():
        if config.get(name) not in values:
            return f"the embedded engine cannot serve {name} = {config[name]!r}"
    if others := set(config.get("layer_types") or []) - {"full_attention"}:
        return f"the embedded engine has no layers of type {', '.join(sorted(others))}"
    rope = rope_parameters(config)
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return "the embedded engine has no partial rotary embeddings"
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in ("default", "llama3"):
        return f"rope type {scaling!r} is not served by the embedded engine"
    return None


def transformers_engine_refusal(config: Config) -> str | None:
    """Why the embedded engine over `transformers` cannot compute this model: what it serves is what is trained."""
    kind = model_type(config)
    if has_own_code(config):
        return "the embedded engines run no code that comes with a model; serve this model with vLLM"
    refused = refusal(config)
    if refused is None and kind in NOT_CACHED:
        refused = f"{NOT_CACHED[kind]} ({kind}); serve this model with vLLM"
    return refused


def rope_parameters(config: Config) -> Config:
    """Settings of rotary positions: transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


@dataclass(frozen=True, slots=True)
class Support:
    """All of the answers about one model."""

    model_type: str
    training: str | None
    """Why it cannot be trained; None where nothing in its config forbids that."""
    slower_on_gpu: str | None
    """Why it is trained more slowly than it could be on a GPU of this machine."""
    dequantised: str | None
    """What the weights are quantised in, where they are read from that as bfloat16."""
    state: bool
    experts: int
    embedded_engine: str | None
    """Why the embedded engine's own decoder cannot serve it."""
    transformers_engine: str | None
    """Why the embedded engine over `transformers` cannot either; vLLM may."""
    several_ranks: str | None
    """Why it can be trained on one rank only."""
    projections: tuple[str, ...] | None
    """Last names of the linear layers that an adapter of `all-linear` reaches; None where only its weights tell."""
    adapts_experts: bool
    """Whether it reaches the experts, too."""
    vllm_merges: str | None
    """Why vLLM is sent merged weights where an adapter is trained."""


def support(config: Config) -> Support:
    return Support(
        model_type=model_type(config),
        training=refusal(config),
        slower_on_gpu=slower_on_gpu(config),
        dequantised=quantisation(config) if dequantises(config) else None,
        state=has_state(config),
        experts=experts(config),
        embedded_engine=embedded_engine_refusal(config),
        transformers_engine=transformers_engine_refusal(config),
        several_ranks=layout_refusal(config, 2),
        projections=PROJECTIONS.get(model_type(config)),
        adapts_experts=adapts_experts(config, [ALL_LINEAR]),
        vllm_merges=vllm_merges(config),
    )


def _architectures(config: Config) -> list[str]:
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def no_config(folder: Path) -> str:
    """What is wrong with a folder of a model without `config.json`, and what to do."""
    try:
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{folder / 'config.json'} does not exist; give the folder of a model"
    base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    return (
        f"{folder} is an adapter of {base or 'another model'}, not a model; merge the two (peft: "
        "`PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(..)`), copy the tokenizer's "
        "files, and give that folder"
    )


def too_old() -> str | None:
    """Why the installed `transformers` cannot be used, as after another package has asked for an old one."""
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) >= OLDEST_TRANSFORMERS:
        return None
    return (
        f"transformers {found} is installed, and primerl needs {'.'.join(map(str, OLDEST_TRANSFORMERS))} or later; "
        "where another package needs the old one (`pip check` says which), give it an environment of its own"
    )
