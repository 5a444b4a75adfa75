"""vLLM with adapters of a mixture's attention: experts stay as they are, and each token is that of peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_helpers import need_vllm, running, vllm_command
from families import write_family
from test_vllm_lora import answered, digest, is_of, load, manifest, published

pytestmark = [pytest.mark.vllm, pytest.mark.long]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_attention_of_a_mixture_is_adapted(tmp_path: Path) -> None:
    need_vllm()
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    base = write_family(tmp_path / "base", "qwen3_moe", **sizes)
    folder = tmp_path / "engine"
    folder.mkdir()
    lora = f"[lora]\nrank = 6\ntarget_modules = {ATTENTION!r}\nmax_adapters = 2".replace("'", '"')
    with running("vllm", vllm_command(base, folder, lora), base, folder / "log") as engine:
        adapter = published(base, tmp_path, 1, target_modules=ATTENTION)
        assert load(engine, "m@1", adapter).status_code == 200
        assert digest(engine, "m@1")["digest"] == manifest(adapter)["digest"]
        assert is_of(answered(engine, "m@1"), base, adapter)
        assert not is_of(answered(engine, "m"), base, adapter)
