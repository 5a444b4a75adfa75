"""A store in tests: folders as runs save them, and the process that uploads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from primerl.config.schema.services import StoreWorkerConfig
from primerl.stores.store import Store
from primerl.stores.worker import Uploader

RUN = "abcd1234"


def saved(folder: Path, content: str = "weights") -> Path:
    (folder / "trainer").mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "trainer" / "state.pt").write_text("state")
    return folder


def uploader(store: Store, output: Path, model: Path, **more: Any) -> Uploader:
    settings: dict[str, Any] = {"run": RUN, "output_dir": str(output), "model": str(model), "keep": 2, "give_up_s": 0.0}
    (output / "run").mkdir(parents=True, exist_ok=True)
    return Uploader(StoreWorkerConfig(**{**settings, **more}), store)


def finish(uploader: Uploader) -> int:
    uploader.ending = True
    return uploader.run()


def adapter(folder: Path, rank: int = 2, alpha: float = 4, base: str | None = None) -> Path:
    """`base`: digest of the weights that it was trained on."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha}))
    metadata = {} if base is None else {"__metadata__": {"base_model_digest": base}}
    header = json.dumps(metadata).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def with_orchestrator(checkpoint: Path) -> Path:
    """The checkpoint, with what the orchestrator adds to it."""
    (checkpoint / "orchestrator" / "step_5").mkdir(parents=True)
    (checkpoint / "orchestrator" / "step_5" / "rank_0.msgpack").write_text("batch")
    (checkpoint / "orchestrator" / "000000000120.snapshot").write_text("core")
    return checkpoint
