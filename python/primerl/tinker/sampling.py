"""A request for samples: from the SDK's JSON to an engine's body, and back.

Log-probabilities are the model's own, at temperature 1 and of all tokens, whatever is sampled at: what a training loss
compares them with is at temperature 1 too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from primerl.tinker.losses import LossInputError
from primerl.tinker.scoring import Targets, alternatives_of, targets_of
from primerl.tinker.wire import Sampled, samples_of

NOT_SUPPORTED = {
    "record_stability_info": "stability_info, which only the loss stable_reinforce reads",
}
MOST_TOP = 19
"""Engines return 20 of the most likely tokens, of which the sampled one is the first."""
MOST_SAMPLES = 4096


@dataclass(frozen=True)
class SampleRequest:
    prompt: list[int]
    samples: int
    sampling: dict[str, Any]
    """As engines take them, without `n` and the seed."""
    seed: int | None
    stop_texts: list[str]
    top: int
    prompt_logprobs: bool
    prompt_top: int
    prompt_last: int | None
    """Only so many of the prompt's last tokens are wanted."""
    targets: Targets | None = None
    alternatives: int = 0
    """Tokens to draw at each place of the prompt."""


def request_of(body: Mapping[str, Any], vocabulary: int, most_tokens: int) -> SampleRequest:
    """Raises LossInputError."""
    for key, what in NOT_SUPPORTED.items():
        if body.get(key):
            raise LossInputError(f"{key}: this server does not give {what}; omit it")
    prompt = _prompt(body, vocabulary)
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise LossInputError(f"sampling_params is {given!r}; it has to be a table")
    texts, sampling = _stops(given.get("stop"), vocabulary)
    room = most_tokens - len(prompt)
    if room < 1:
        raise LossInputError(f"the prompt has {len(prompt)} tokens; this server's longest sequence is {most_tokens}")
    wanted = given.get("max_tokens")
    if wanted is not None and (not _is_count(wanted) or wanted < 1):
        raise LossInputError(f"sampling_params.max_tokens is {wanted!r}; it has to be at least 1")
    sampling["max_tokens"] = min(wanted or room, room)
    for name, default, least in (("temperature", 1.0, 0.0), ("top_p", 1.0, 0.0)):
        value = given.get(name, default)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not is_number or value < least or (name == "top_p" and not 0 < value <= 1):
            raise LossInputError(f"sampling_params.{name} is {value!r}, which is out of range")
        sampling[name] = float(value)
    top_k = given.get("top_k", -1)
    if not _is_count(top_k) or top_k < -1:
        raise LossInputError(f"sampling_params.top_k is {top_k!r}; give a count, or -1 for all tokens")
    sampling["top_k"] = max(top_k, 0)
    samples = body.get("num_samples", 1)
    if not _is_count(samples) or not 1 <= samples <= MOST_SAMPLES:
        raise LossInputError(f"num_samples is {samples!r}; it has to be from 1 to {MOST_SAMPLES}")
    top, prompt_top = _top(body, "topk_sample_logprobs"), _top(body, "topk_prompt_logprobs")
    # The sampled token comes first.
    sampling["logprobs"] = top + 1 if top else 0
    scored = bool(body.get("prompt_logprobs")) or prompt_top > 0
    if scored:
        sampling["prompt_logprobs"] = prompt_top
    seed = given.get("seed")
    if seed is not None and not _is_count(seed):
        raise LossInputError(f"sampling_params.seed is {seed!r}; it has to be a whole number")
    last = body.get("prompt_logprobs_last_n")
    if last is not None and (not _is_count(last) or last < 0):
        raise LossInputError(f"prompt_logprobs_last_n is {last!r}; it has to be a count")
    targets = targets_of(body, len(prompt), vocabulary)
    return SampleRequest(
        prompt, samples, sampling, seed, texts, top, scored, prompt_top, last or None, targets, alternatives_of(body)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _top(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name) or 0
    if not _is_count(value) or not 0 <= value <= MOST_TOP:
        raise LossInputError(f"{name} is {value!r}; it has to be a count of at most {MOST_TOP}")
    return int(value)


def _prompt(body: Mapping[str, Any], vocabulary: int) -> list[int]:
    prompt: list[int] = []
    given = body.get("prompt") or {}
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list) or not all(isinstance(chunk, dict) for chunk in chunks):
        raise LossInputError("the prompt has no list of chunks")
    for number, chunk in enumerate(chunks):
        kind = chunk.get("type", "encoded_text")
        if kind != "encoded_text":
            said = "an image" if "image" in str(kind) else f"of the type {kind!r}"
            raise LossInputError(f"prompt: chunk {number} is {said}; this server reads text only, so omit it")
        prompt += chunk.get("tokens", [])
    if not prompt:
        raise LossInputError("the prompt is empty; give at least one token")
    for token in prompt:
        if not _is_count(token) or not 0 <= token < vocabulary:
            raise LossInputError(f"the prompt has the id {token!r}; the model's are 0 to {vocabulary - 1}")
    return prompt


def _stops(stop: Any, vocabulary: int) -> tuple[list[str], dict[str, Any]]:
    """Texts that end a sample, and an engine's settings. Unset: the model's own end; otherwise only what is given."""
    if stop is None:
        return [], {"ignore_eos": False}
    given = [stop] if isinstance(stop, str | int) else list(stop)
    texts = [one for one in given if isinstance(one, str)]
    ids = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
    if len(texts) + len(ids) != len(given) or "" in texts or any(not 0 <= one < vocabulary for one in ids):
        raise LossInputError(f"sampling_params.stop is {stop!r}; give texts, or ids of tokens of the model")
    return texts, {"ignore_eos": True, "stop_token_ids": ids}


def answer_of(request: SampleRequest, choices: Sequence[Mapping[str, Any]], prompt_scores: Sequence[Any] | None) -> Any:
    """The message; `choices` and `prompt_scores` as engines give them."""
    samples = [_sampled(request, choice) for choice in choices]
    logprobs: list[float] | None = None
    tops: list[list[tuple[int, float]]] | None = None
    if request.prompt_logprobs and prompt_scores is not None:
        begin = 1 if request.prompt_last is None else max(1, len(request.prompt) - request.prompt_last)
        logprobs, tops = [float("nan")] * len(request.prompt), [[] for _ in request.prompt]
        for place in range(begin, len(request.prompt)):
            entries = {int(token): float(entry["logprob"]) for token, entry in prompt_scores[place].items()}
            logprobs[place] = entries[request.prompt[place]]
            tops[place] = sorted(entries.items(), key=lambda entry: -entry[1])[: request.prompt_top]
    return samples_of(samples, request.top, logprobs, tops, request.prompt_top)


def _sampled(request: SampleRequest, choice: Mapping[str, Any]) -> Sampled:
    content = choice["logprobs"]["content"]
    top = None
    if request.top:
        top = [
            sorted({one["token_id"]: one["logprob"] for one in token["top_logprobs"]}.items(), key=lambda one: -one[1])[
                : request.top
            ]
            for token in content
        ]
    stopped = choice["finish_reason"] == "stop"
    return Sampled(list(choice["token_ids"]), [token["logprob"] for token in content], stopped, top)
