"""The metrics of supervised fine-tuning, all by their names; those of a run are in test_end_to_end.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.distributed.ranks import ALONE, Ranks
from primerl.train.model import flops
from primerl.train.model.flops import ModelShape, Performance
from primerl.train.model.packed_model import load_model
from settings_helpers import run_sft
from sft_helpers import metrics, settings, write_rows
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")

EVERY_STEP = (
    "loss/mean optim/lr optim/grad_norm optim/zero_grad_ratio seq_len/all/mean seq_len/all/max "
    "progress/epoch progress/num_samples progress/num_tokens progress/a/ratio_samples progress/a/ratio_tokens "
    "progress/b/ratio_samples progress/b/ratio_tokens perf/throughput perf/throughput_per_gpu perf/peak_memory "
    "perf/mfu max_vio/mean routing_confidence/mean routing_entropy/mean time/step time/wait_for_batch "
    "time/forward_backward time/optimizer time/save_ckpt time/wait_for_ckpt time/metrics"
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with the small model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "experts"
    write_model(folder, TinyConfig(), seed=0)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_every_metric_of_supervised_fine_tuning(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "peak_flops", lambda device, dtype: 1e12)  # of a CPU nothing is known
    for name, count in (("a", 12), ("b", 4)):
        write_rows(tmp_path / f"{name}.jsonl", *({"prompt": name, "completion": "x" * n} for n in range(1, count)))
    subsets = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    values = settings(
        tmp_path,
        max_steps=4,
        model={"path": str(mixture)},
        data={"subsets": subsets},
        val={"interval": 2, "data": {"path": str(tmp_path / "b.jsonl")}},
        ckpt={"interval": 3},
    )
    assert run_sft(values) == 0
    first, *lines = metrics(tmp_path / "run")
    assert isinstance(first["val/loss"], float)
    for line in lines:
        for name in EVERY_STEP.split():
            assert isinstance(line[name], float), name
        assert ("val/loss" in line) == (line["step"] % 2 == 0)
        assert (line["time/save_ckpt"] > 0) == (line["step"] in (3, 4)), "its own save"
        assert line["seq_len/all/max"] >= line["seq_len/all/mean"] > 1
        assert line["perf/throughput_per_gpu"] == line["perf/throughput"]
        assert 0.0 < line["perf/mfu"] < 1.0
    assert lines[0]["seq_len/all/mean"] == lines[0]["progress/num_tokens"] / lines[0]["progress/num_samples"]


def test_mfu_is_by_the_formula_in_the_docs(mixture: Path) -> None:
    """FLOPs / seconds / (ranks x peak of the device)."""
    shape = ModelShape.of(load_model(mixture))
    two = Ranks(0, 2, torch.device("cpu"))
    found = Performance(shape, 5e9, two).metrics(tokens=1000.0, flops=4e9, seconds=2.0)
    assert found["perf/mfu"] == pytest.approx(4e9 / 2.0 / (2 * 5e9))
    assert (found["perf/throughput"], found["perf/throughput_per_gpu"]) == (500.0, 250.0)
    assert "perf/mfu" not in Performance(shape, None, ALONE).metrics(1.0, 1.0, 1.0)
    # 6 x matrix parameters x tokens + 6 x output layer x trained tokens + 12 x width x pairs, of two layers.
    lengths, trained = [5, 3], 4
    expected: Any = 6 * shape.matrix_parameters * 8 + 6 * 264 * 32 * trained + 12 * 2 * 16 * 2 * (15 + 6)
    assert shape.flops(lengths, trained) == pytest.approx(expected)
