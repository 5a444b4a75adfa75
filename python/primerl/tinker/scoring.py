"""Scores of a prompt that engines do not give: log-probabilities of tokens that the client names
(`target_prompt_logprobs`), and tokens drawn at each place of the prompt (`prompt_alt_tokens_k`). The trainer's model
computes them, with the sampler's adapter. Log-probabilities are at temperature 1, as all of them here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from primerl.tinker.losses import LossInputError
from primerl.train.model.packed_model import PackedSequences, output_head, predicted_hidden
from primerl.train.objective.logprobs import token_logprobs

TARGETS, ALTERNATIVES = "target_prompt_logprobs", "prompt_alt_tokens_k"
MOST_ALTERNATIVES = 256
ROWS_AT_ONCE = 256
"""Places of a prompt whose whole distributions are in memory."""
NOTHING = -1
"""In place of a token: nothing is asked for."""


@dataclass(frozen=True)
class Targets:
    """Tokens to score in a table of `[len(prompt) - 1, K]`: row i is about the prompt's token i + 1."""

    shape: tuple[int, int]
    rows: np.ndarray[Any, Any]
    """[cells] int64; cells are in the order of the request's data."""
    ids: np.ndarray[Any, Any]
    """[cells] int64; `NOTHING` or a token."""
    sparse: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None
    """Indices of rows and columns (CSR), where the request has them."""

    def message(self, logprobs: np.ndarray[Any, Any]) -> Any:
        """In the layout of the request; `logprobs`: [cells] fp32."""
        message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=self.shape)
        if self.sparse is None:
            message.dense = logprobs.tobytes()
        else:
            rows, columns = self.sparse
            csr = pb.SparseCsr(values=logprobs.tobytes(), crow_indices=rows.tobytes(), col_indices=columns.tobytes())
            message.sparse_csr.CopyFrom(csr)
        return message


def targets_of(body: Mapping[str, Any], tokens: int, vocabulary: int) -> Targets | None:
    """Raises LossInputError. `tokens`: of the prompt."""
    given = body.get(TARGETS)
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("dtype") != "int64":
        raise LossInputError(f"{TARGETS} has to be a tensor of int64")
    shape = given.get("shape")
    is_table = isinstance(shape, list) and len(shape) == 2 and all(isinstance(one, int) for one in shape)
    if shape is None or not is_table or shape[0] != tokens - 1 or shape[1] < 1:
        raise LossInputError(
            f"{TARGETS} has the shape {shape}; the prompt has {tokens} tokens, so it has to be [{tokens - 1}, K]"
        )
    try:
        ids = np.asarray(given.get("data"), np.int64)
        if given.get("sparse_crow_indices") is None:
            counts, sparse = np.full(tokens - 1, shape[1]), None
        else:
            starts, columns = (np.asarray(given[f"sparse_{name}_indices"], np.int64) for name in ("crow", "col"))
            counts, sparse = np.diff(starts), (starts, columns)
        if ids.ndim != 1 or int(counts.sum()) != ids.size or (sparse is not None and sparse[1].shape != ids.shape):
            raise LossInputError(f"{TARGETS} has {ids.size} values, which are not those of its shape {shape}")
        rows = np.repeat(np.arange(tokens - 1), counts)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        if isinstance(error, LossInputError):
            raise
        raise LossInputError(f"{TARGETS} cannot be read: {error}") from None
    if ids.size and not (int(ids.min()) >= NOTHING and int(ids.max()) < vocabulary):
        raise LossInputError(f"{TARGETS} has ids that are not the model's, which are 0 to {vocabulary - 1} (-1: none)")
    return Targets((tokens - 1, shape[1]), rows, ids, sparse)


def alternatives_of(body: Mapping[str, Any]) -> int:
    """Raises LossInputError."""
    count = body.get(ALTERNATIVES) or 0
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_ALTERNATIVES:
        raise LossInputError(f"{ALTERNATIVES} is {count!r}; it has to be a count of at most {MOST_ALTERNATIVES}")
    return count


@dataclass(frozen=True)
class Scores:
    """To be added to an answer."""

    targets: Any | None = None
    alternatives: tuple[Any, Any] | None = None
    """Tokens and log-probabilities."""

    def add_to(self, message: Any) -> None:
        if self.targets is not None:
            message.target_prompt_logprobs.CopyFrom(self.targets)
        if self.alternatives is not None:
            message.prompt_alt_tokens.tokens.CopyFrom(self.alternatives[0])
            message.prompt_alt_tokens.logprobs.CopyFrom(self.alternatives[1])


@torch.no_grad()
def scored(
    model: Any, prompt: Sequence[int], targets: Targets | None, alternatives: int, temperature: float, seed: int | None
) -> Scores:
    """`alternatives`: drawn at each place, at this temperature, with replacement; the same ones for the same seed."""
    device = next(model.parameters()).device
    token_ids = torch.tensor(prompt, device=device)
    packed = PackedSequences.from_lengths([len(prompt)], device)
    hidden = predicted_hidden(model, token_ids, packed, torch.arange(1, len(prompt), device=device))
    head = output_head(model)
    found = None
    if targets is not None:
        asked = np.flatnonzero(targets.ids != NOTHING)
        rows, ids = (torch.from_numpy(one[asked]).to(device) for one in (targets.rows, targets.ids))
        logprobs = np.zeros(targets.ids.shape, np.float32)
        logprobs[asked] = token_logprobs(hidden[rows], head, ids, entropy=False)[0].float().cpu().numpy()
        found = targets.message(logprobs)
    return Scores(found, _drawn(hidden, head, alternatives, temperature, seed) if alternatives else None)


def _drawn(hidden: Tensor, head: Any, count: int, temperature: float, seed: int | None) -> tuple[Any, Any]:
    generator = torch.Generator(hidden.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed % 2**63)
    tokens, logprobs = [], []
    for start in range(0, len(hidden), ROWS_AT_ONCE):
        logits = head.logits(hidden[start : start + ROWS_AT_ONCE])
        if temperature > 0:
            drawn = torch.multinomial((logits / temperature).softmax(-1), count, replacement=True, generator=generator)
        else:
            drawn = logits.argmax(-1, keepdim=True).expand(-1, count)
        tokens.append(drawn)
        logprobs.append(logits.log_softmax(-1).gather(1, drawn))
    shape = (len(hidden), count)
    parts = []
    for kind, dtype, rows in ((pb.DTYPE_INT64, np.int64, tokens), (pb.DTYPE_FLOAT32, np.float32, logprobs)):
        table = torch.cat(rows).cpu().numpy() if rows else np.zeros(shape)
        parts.append(pb.Tensor(dense=table.astype(dtype).tobytes(), dtype=kind, shape=shape))
    return parts[0], parts[1]
