"""What the server remembers of its clients: sessions, training clients, sampling clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from primerl.tinker.clients import LoraOptions, SavedAdapter, TrainingClient
from primerl.tinker.engines import Weights
from primerl.tinker.futures import Queue
from primerl.tinker.history import Curve
from primerl.tinker.losses import LossInputError


class UnknownError(Exception):
    """There is no such session, model, sampler or promise. The message names it."""


@dataclass
class Session:
    id: str
    heard: float
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Work that is in no queue, by the id of its promise."""


@dataclass
class Model:
    """A training client, with what the API knows of it."""

    id: str
    session: str
    base_model: str
    options: LoraOptions
    user_metadata: Any
    queue: Queue
    client: TrainingClient
    last_call: float
    calls: int = 0
    loss: float | None = None
    """Sum of the last forward_backward."""
    losses: Curve = field(default_factory=Curve)
    """Loss a token, by steps."""


@dataclass(frozen=True)
class Sampler:
    id: str
    base_model: str
    path: str | None
    origin: str
    """What its weights are of, for messages: a client at a step, a saved state."""
    weights: Weights
    adapter: Callable[[], SavedAdapter | None]
    """Reads it; None for the base model. Called by the thread that computes."""


@dataclass(frozen=True)
class Limits:
    names: tuple[str, ...]
    """By which clients may call the base model, its own first."""
    max_rank: int
    max_clients: int
    most_tokens: int
    """Tokens of a micro-batch, and so of a datum."""
    context: int
    """Tokens of a prompt and its sample."""
    most_samples: int
    """Samples of one request to an engine."""
    gap_s: float
    session_s: float


def number(body: Mapping[str, Any], name: str) -> int:
    """Raises ValueError: it becomes part of ids, and of paths."""
    value = body.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r}; it has to be a number")
    return value


def options_of(given: Mapping[str, Any] | None, max_rank: int) -> LoraOptions:
    """The options in `lora_config`, with the SDK's defaults. Raises LossInputError."""
    given = given or {}
    rank = given.get("rank", 32)
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise LossInputError(f"lora_config.rank is {rank!r}; this server takes 1 to {max_rank} (trainer.max_rank)")
    seed = given.get("seed")
    seed = 0 if seed is None else int(seed) % 2**63
    parts = [bool(given.get(name, True)) for name in ("train_mlp", "train_attn", "train_unembed")]
    return LoraOptions(rank, seed, *parts)
