"""An engine of mixtures for tests: `transformers`' own model, computed anew for each token, behind primerl's server. It
reports the experts of every token, as vLLM does on GPUs. `inference.backend = "expert_engine:Backend"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from primerl.inference.backend import Engine
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch.backend import EmbeddedBackend, EmbeddedEngine, engine_settings
from primerl.inference.torch.step import DTYPES, TorchBackend
from primerl.train.model.routing import routers
from torch import Tensor
from transformers import AutoModelForCausalLM


class Recomputed:
    """In the place of the embedded engine's decoder. Instead of keys and values it keeps each slot's tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, slots: int, max_len: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.config, self.dtype, self.device = self.model.config, dtype, torch.device("cpu")
        self.slots, self.max_len = slots, max_len
        self.tensors = named(self.model)
        self._tokens = torch.zeros(slots, max_len, dtype=torch.int64)
        self._chosen: list[Tensor] = []  # of the last forward pass, [tokens, k] each router
        self.experts: list[Tensor] = []  # of the last step, [tokens, routers, k] each sequence
        for module, _ in routers(self.model):
            module.register_forward_hook(self._note)

    def _note(self, _router: Any, _given: Any, answer: Any) -> None:
        self._chosen += [part for part in answer if part.dtype == torch.int64]

    def forward(self, token_ids: Tensor, positions: Tensor, cache_rows: Tensor, _segments: Any) -> Tensor:
        of_slots = cache_rows // self.max_len
        self._tokens[of_slots, positions] = token_ids
        hidden, self.experts = [], []
        # The tokens of a sequence are side by side, in order.
        slots, counts = torch.unique_consecutive(of_slots, return_counts=True)
        end = 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            end += count
            self._chosen = []
            prefix = self._tokens[slot, : int(positions[end - 1]) + 1].unsqueeze(0)
            hidden.append(self.model.model(input_ids=prefix, use_cache=False).last_hidden_state[0, -count:])
            self.experts.append(torch.stack(self._chosen, 1)[-count:])
        return torch.cat(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden).float()

    def weights_changed(self) -> None:
        """They are computed with from memory."""


def named(model: Any) -> dict[str, Tensor]:
    """Views into the parameters of a Qwen3-MoE, by the names of its files."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.data
        if name.endswith("experts.gate_up_proj"):
            for index, (gate, up) in enumerate(part.chunk(2) for part in value):
                tensors[f"{name.removesuffix('gate_up_proj')}{index}.gate_proj.weight"] = gate
                tensors[f"{name.removesuffix('gate_up_proj')}{index}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for index, down in enumerate(value):
                tensors[f"{name.removesuffix('down_proj')}{index}.down_proj.weight"] = down
        else:
            tensors[name] = value
    return tensors


class Step(TorchBackend):
    def __init__(self, config: InferenceConfig) -> None:
        self.device, self.raw_logprobs = torch.device("cpu"), config.logprobs_mode == "raw_logprobs"
        assert config.max_model_len is not None
        folder = Path(config.model.path)
        self.decoder: Any = Recomputed(
            folder, DTYPES[config.dtype or "float32"], config.max_num_seqs, config.max_model_len
        )
        self.reports = config.enable_return_routed_experts
        self._adapter, self._hashes, self._groups = None, {}, 1

    def info(self) -> dict[str, Any]:
        config = self.decoder.config
        ends = config.eos_token_id
        return {
            "vocab_size": config.vocab_size,
            "max_model_len": self.decoder.max_len,
            "slots": self.decoder.slots,
            "eos_token_ids": ends if isinstance(ends, list) else [ends],
            "tensors": [(name, list(tensor.shape)) for name, tensor in self.decoder.tensors.items()],
            "dtypes": ["F32", "BF16"],
        }

    def forward(self, **columns: Any) -> Any:
        sampled, prompt = super().forward(**columns)
        if not self.reports:
            return sampled, prompt
        found = torch.cat(self.decoder.experts)
        every = torch.zeros(len(found), self.decoder.config.num_hidden_layers, found.shape[2], dtype=torch.uint8)
        mixtures = [index for index, layer in enumerate(self.decoder.model.model.layers) if hasattr(layer.mlp, "gate")]
        every[:, mixtures] = found.to(torch.uint8)
        return sampled, prompt, (every.numpy().tobytes(), every.shape[1], every.shape[2], 1)


class Backend(EmbeddedBackend):
    title = "the tests' engine"
    preload = ()

    def check_model(self, folder: Path, python: str | None) -> None:
        """Any."""

    def check_experts(self, folder: Path, python: str | None) -> None:
        """It reports them."""

    def start(self, config: InferenceConfig) -> Engine:
        from primerl import _core

        torch.set_num_threads(config.threads)
        step = Step(config)
        settings = engine_settings(config, step.decoder.max_len)
        return EmbeddedEngine(_core.InferenceEngine(settings, step, host=config.host, port=config.port))
