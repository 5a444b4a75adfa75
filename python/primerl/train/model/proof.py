"""Proves before training, on a few random tokens, that a model computes the same packed as it computes alone.

Packing is exact only if everything that looks at other tokens knows where sequences begin, and log-probabilities are
right only if the output layer is understood. Both differ between architectures, and a model for which one does not
hold would silently be trained on something else. So each model is tried, and refused with the reason. If layers carry
a state from token to token, gradients are compared too: their kernels have backward passes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from primerl.train.distributed.fsdp import packed_logprobs
from primerl.train.model.architectures import reached
from primerl.train.model.families import WITH_STATE
from primerl.train.model.packed_model import ATTENTION, ModelError, PackedSequences, output_head, predicted_hidden
from primerl.train.model.recurrent import longest_chunk, mixers, untold
from primerl.train.model.support import SUPPORTED

LENGTHS = (7, 9, 5)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest norm of the difference, as a share of the values' norm: sums run in another order, and in bf16 a router may
then choose another of two nearly equal experts. What is not exact is off by the size of the values themselves."""


DRAWS = 5
"""How often a model that draws random numbers has to compute the same."""
EXACT_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}
"""Values of `layer_types` whose tokens are mixed by attention, which knows where sequences begin, or not at all."""


def prove(model: Any) -> None:
    """Raises ModelError."""
    name = type(model).__name__
    _check_config(model, name)
    sequences = _random_sequences(model)
    first, second = len(sequences[0]), len(sequences[1])
    device = sequences[0].device
    with torch.no_grad(), _naming(model):
        before = _random_state(device)
        alone = _states(model, [sequences[1]])
        # Some draw numbers even for a dropout of 0.
        draws = not torch.equal(before, _random_state(device))
        noisy = draws and any(not torch.equal(alone, _states(model, [sequences[1]])) for _ in range(DRAWS))
        packed = _states(model, sequences)[first - 1 : first + second - 2]
        logits = _own_logits(model, sequences[1])
        ours = output_head(model).logits(alone)
    if noisy:
        raise ModelError(
            f"{name} computes with random numbers while it is trained (dropout, or noise in its routers): its "
            "probabilities would not be the engine's. If a key of its config.json sets how much, set it to 0; "
            f"{SUPPORTED}"
        )
    tolerance = TOLERANCE[alone.dtype]
    if not near(packed, alone, tolerance):
        own = "" if reached(model, ATTENTION) is not None else " (transformers has it with attention of its own)"
        raise ModelError(
            f"{name}: a sequence's hidden states depend on the sequences it is packed with; something besides its "
            f"attention looks at other tokens{own}, so packing is not exact and the architecture is not supported; "
            f"{SUPPORTED}"
        )
    if mixers(model):
        _prove_gradients(model, sequences, tolerance)
    if logits.shape != ours.shape or not near(ours, logits, tolerance):
        raise ModelError(
            f"{name}: its logits are not those of its output layer (with a bias, a scale and a soft cap, as its config "
            f"names them); the architecture is not supported; {SUPPORTED}"
        )


def _prove_gradients(model: Any, sequences: list[Tensor], tolerance: float) -> None:
    """Gradients of the second sequence's hidden states equal those it has alone, and none reaches other sequences."""
    with _naming(model):
        alone = _gradients(model, [sequences[1]], len(sequences[1]))
        packed = _gradients(model, sequences, len(sequences[0]) + len(sequences[1]))
    first, second = len(sequences[0]), len(sequences[1])
    of_tokens = packed.pop("tokens")
    packed["tokens"] = of_tokens[first : first + second]
    others = torch.cat([of_tokens[:first], of_tokens[first + second :]])
    wrong = [name for name, gradient in alone.items() if not near(packed[name], gradient, tolerance)]
    if not wrong and bool((others.float().norm() <= tolerance * packed["tokens"].float().norm()).item()):
        return
    where = wrong[0] if wrong else "other sequences' tokens"
    raise ModelError(
        f"{type(model).__name__}: gradients of a sequence depend on the sequences it is packed with ({where}), so "
        f"packing is not exact and the architecture, or this version of its kernels, is not supported; {SUPPORTED}"
    )


def _gradients(model: Any, sequences: list[Tensor], end: int) -> dict[str, Tensor]:
    """Gradients of a random projection of the hidden states of the sequence that ends before the packed index `end`,
    with respect to each token's embedding ("tokens") and to the small parameters of layers with a state."""
    given: list[Tensor] = []

    def keep(_module: Any, _given: Any, output: Tensor) -> Tensor:
        given.append(output.detach().requires_grad_())
        return given[0]

    small = {
        f"{type(mixer).__name__}.{name}": parameter
        for mixer in mixers(model)[:1]
        for name, parameter in mixer.named_parameters()
        if parameter.requires_grad and parameter.dim() != 2
    }
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        states = _states(model, sequences, all_tokens=True)
    finally:
        hook.remove()
    length = len(sequences[0]) if len(sequences) == 1 else len(sequences[1])
    own = states[end - length : end].float()
    weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(own.device)
    found = torch.autograd.grad((own * weights).sum(), [given[0], *small.values()])
    return {"tokens": found[0].squeeze(0), **dict(zip(small, found[1:], strict=True))}


def sample(model: Any) -> list[float]:
    """Log-probabilities of a few random tokens."""
    token_ids, packed = _random_tokens(model)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    with torch.no_grad():
        logprobs, *_ = packed_logprobs(model, token_ids, packed, targets)
    found: list[float] = logprobs.tolist()
    return found


def check_same(model: Any, expected: list[float], dtype: torch.dtype) -> None:
    """Compares a model that was divided among ranks, computing in `dtype`, with what it computed before. All ranks have
    to call it. Raises ModelError."""
    found = sample(model)
    if not near(torch.tensor(found), torch.tensor(expected), TOLERANCE[dtype]):
        raise ModelError(
            f"{type(model).__name__}: divided among ranks it computes something else than whole; the architecture is "
            "not supported on several ranks: train it on one"
        )


def _random_tokens(model: Any) -> tuple[Tensor, PackedSequences]:
    device = next(model.parameters()).device
    lengths = _lengths(model)
    most = min(model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size)
    token_ids = torch.randint(0, most, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(device)
    return token_ids, PackedSequences.from_lengths(lengths, device)


def _random_sequences(model: Any) -> list[Tensor]:
    return list(torch.split(_random_tokens(model)[0], list(_lengths(model))))


def _lengths(model: Any) -> tuple[int, ...]:
    """The second sequence is longer than the chunks that a scan computes at once, and begins within one."""
    first, second, third = LENGTHS
    return first, second + longest_chunk(model), third


@contextmanager
def _naming(model: Any) -> Iterator[None]:
    """Turns any error of the forward pass into a ModelError that names the architecture."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        kind = model.config.get_text_config().model_type
        raise ModelError(
            f"{type(model).__name__} ({kind}): its forward pass over packed sequences fails: {type(error).__name__}: "
            f"{error}. Where it fails in transformers alone too (AutoModelForCausalLM.from_pretrained), config.json or "
            f"this version of transformers is at fault; else the architecture is not supported; {SUPPORTED}"
        ) from error


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _check_config(model: Any, name: str) -> None:
    config = model.config.get_text_config()
    of_layers = [kind for kind in getattr(config, "layer_types", None) or () if kind not in EXACT_LAYERS]
    with_state = [kind for kind in of_layers if kind in WITH_STATE]
    known = untold(model) is None and len(with_state) <= len(mixers(model))
    kinds = sorted(set(of_layers) - (WITH_STATE if known else set()))
    if kinds:
        raise ModelError(
            f"{name} has layers of type {', '.join(kinds)}, which cannot be given the starts of packed sequences; "
            "exact are full, sliding and chunked attention, the gated delta rule, Mamba-2 and short convolutions; "
            f"{SUPPORTED}"
        )
    for where, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise ModelError(
                f"{name} has dropout ({where}, {module.p}): the trainer's probabilities would not be the engine's; set "
                "it to 0 in config.json"
            )


def _states(model: Any, sequences: list[Tensor], *, all_tokens: bool = False) -> Tensor:
    """Hidden states of all tokens but the last one of each sequence, or of all tokens."""
    token_ids = torch.cat(sequences)
    packed = PackedSequences.from_lengths([len(sequence) for sequence in sequences], token_ids.device)
    targets = (packed.position_ids.squeeze(0) > 0).nonzero().squeeze(1)
    if all_tokens:
        targets = torch.arange(1, len(token_ids) + 1, device=token_ids.device)
    return predicted_hidden(model, token_ids, packed, targets)


def _own_logits(model: Any, token_ids: Tensor) -> Tensor:
    packed = PackedSequences.from_lengths([len(token_ids)], token_ids.device)
    output = model(input_ids=token_ids.unsqueeze(0), position_ids=packed.position_ids, use_cache=False, packed=packed)
    logits: Tensor = output.logits[0, :-1].float()
    return logits


def near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not (bool(one.isfinite().all()) and bool(other.isfinite().all())):
        return True  # The loss will say so, and name what it was computed from.
    return bool((one.float() - other.float()).norm() <= tolerance * other.float().norm())
