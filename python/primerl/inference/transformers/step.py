"""The engine over `transformers` as the torch side of the scheduler in Rust: a step's tokens in, hidden states out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from primerl.inference.backend import UnservableError
from primerl.inference.torch.step import CPU, ExpertColumn, Step, StepBackend, device_of, within_memory
from primerl.inference.transformers.model import CachedModel
from primerl.inference.transformers.proof import prove
from primerl.train.model.packed_model import ModelError


class CachedBackend(StepBackend):
    """A model folder, computed by `transformers` and proved."""

    decoder: CachedModel

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int | None,
        logprobs_mode: str = "raw_logprobs",
        device: str = CPU,
        reports_experts: bool = False,
    ) -> None:
        """Raises ValueError: a setting or the model cannot be served."""
        place = device_of(device)
        try:
            with within_memory(dtype, max_num_seqs, max_model_len or 0, place):
                model = CachedModel(folder, dtype=dtype, slots=max_num_seqs, max_len=max_model_len, device=place)
                prove(model)
                if reports_experts:
                    model.report_experts()
        except ModelError as error:
            raise UnservableError.at("model.path", f"{folder}: {error}") from error
        super().__init__(model, logprobs_mode=logprobs_mode)

    def _experts(self) -> ExpertColumn | None:
        chosen = self.decoder.chosen
        if chosen is None:
            return None
        size = self.decoder.expert_bytes  # the same in every step
        ids = chosen.to(torch.uint8 if size == 1 else torch.uint16)
        return ids.numpy().tobytes(), ids.shape[1], ids.shape[2], size

    def _hidden(self, step: Step) -> Tensor:
        return self.decoder.hidden(step.token_ids, step.slots, step.query_lens, step.context_lens)
