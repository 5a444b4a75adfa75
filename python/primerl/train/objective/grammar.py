"""Structured outputs, replayed: the trainer's log-probabilities among the tokens that an answer's grammar allowed.

An engine that answers by a JSON schema samples each token from softmax(z) restricted to the set A of tokens that may
come next and renormalised; that is what its log-probabilities are of. A depends on the grammar, the vocabulary, the
tokens of the answer before, and on no weights, so the trainer finds the same set, whatever weights it has by then:

    log p(y) = z_y - logsumexp of z_j over j in A

Where only one token may come next, log p is 0 and has no gradient. Truncation (`primerl.train.objective.truncation`)
keeps the most likely of A. Unlike truncation this is exact at any staleness: both policies have the same support.

A batch names each grammar once, with the answers it holds for (docs/architecture.md, "Trainer"). The sets are computed
from the model's tokenizer by the library that the engine used; one of another version, or of another vocabulary, is
refused. A training loop of your own does the same:

    replay = Replay(model_folder)
    allowed = replay.allowed(micro_batch)             # None where nothing was structured
    hook = leaving_out(allowed[targets])              # for `primerl.train.objective.logprobs.token_logprobs`
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from primerl.train.data.batch import BatchError, MicroBatch, sequence_at
from primerl.train.objective.bitmasks import unpacked
from primerl.train.objective.logprobs import LogitsHook

if TYPE_CHECKING:
    from primerl._core import GrammarMasks


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tokens were allowed at each of N places."""

    bits: Tensor  # [M, bytes] uint8, the distinct sets, the lowest bit the lowest id; the first set is all tokens
    index: Tensor  # [N] int64, which set

    def __getitem__(self, index: Tensor | slice) -> Allowed:
        return Allowed(self.bits, self.index[index])

    def to(self, device: torch.device | str) -> Allowed:
        return Allowed(self.bits.to(device), self.index.to(device))

    def masks(self, vocabulary: int) -> Tensor:
        """[N, vocabulary] bool. An id behind the tokens of the model is in no set but the first."""
        different, places = torch.unique(self.index, return_inverse=True)
        masks = unpacked(self.bits[different], vocabulary)
        if masks.shape[1] < vocabulary:
            masks = torch.nn.functional.pad(masks, (0, vocabulary - masks.shape[1]))
            masks[different == 0] = True
        return masks[places]


def leaving_out(allowed: Allowed, then: LogitsHook | None = None) -> LogitsHook:
    """The hook that `primerl.train.objective.logprobs.token_logprobs` calls for each chunk of these N tokens; `then`
    gets what is left."""

    def leave_out(scaled: Tensor, rows: slice) -> Tensor:
        scaled = scaled.masked_fill(~allowed[rows].masks(scaled.shape[1]), -torch.inf)
        return scaled if then is None else then(scaled, rows)

    return leave_out


class Replay:
    """Replays the grammars of one model's answers. Its vocabulary is read for the first one."""

    def __init__(self, model: Path) -> None:
        """`model`: a folder with `config.json` and `tokenizer.json`."""
        self.model = model
        self._masks: GrammarMasks | None = None

    def allowed(self, micro_batch: MicroBatch) -> Allowed | None:
        """Allowed tokens for each of the micro-batch's T tokens; None if no answer in it was structured.

        Raises:
            BatchError: a recorded answer is not one of its grammar, or another library or vocabulary made its sets.
        """
        if not micro_batch.grammars:
            return None
        masks = self._vocabulary()
        index = torch.zeros(len(micro_batch.token_ids), dtype=torch.int64)
        sets: list[Tensor] = []
        count = 1
        for run in micro_batch.grammars:
            try:
                if run.masks != masks.identity:
                    raise ValueError(
                        f"its engine found the allowed tokens by {run.masks}, this process would by {masks.identity}: "
                        "use one version of primerl and one tokenizer.json for both"
                    )
                found, places = masks.replay(run.spec, micro_batch.token_ids[run.begin : run.end].tolist())
            except ValueError as error:
                rollout = micro_batch.rollouts[sequence_at(micro_batch.sequence_lengths, run.begin)]
                raise BatchError(f"rollout {rollout}: its structured output cannot be replayed: {error}") from error
            index[run.begin : run.end] = torch.tensor(places, dtype=torch.int64) + count
            own = torch.frombuffer(bytearray(found), dtype=torch.uint8)
            count += max(places) + 1
            sets.append(own.view(max(places) + 1, -1))
        everything = torch.full((1, sets[0].shape[1]), 255, dtype=torch.uint8)
        return Allowed(torch.cat([everything, *sets]), index)

    def _vocabulary(self) -> GrammarMasks:
        if self._masks is None:
            from primerl._core import GrammarMasks

            try:
                config = json.loads((self.model / "config.json").read_bytes())
                size = int(config.get("text_config", config)["vocab_size"])
                self._masks = GrammarMasks(self.model, size)
            except (OSError, KeyError, TypeError, ValueError) as error:
                problem = f"structured outputs are replayed with the tokenizer in {self.model}: {error}"
                raise BatchError(problem) from error
        return self._masks
