"""Reinforcement learning of an adapter: trained as a plain loop trains it, published alone, loaded and proved."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from end_to_end import column, launch, steps_of, until
from engine_helpers import PROMPT, Engine, running, torch_command
from primerl import verify
from primerl.config.errors.fail import ConfigError as CommandError
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.inference.vllm import installation
from primerl.launch.preflight import training
from primerl.models.tiny import TinyConfig, write_model
from primerl.train.adapters.lora import Adapter, AdapterPublisher, add_adapter
from primerl.train.model.packed_model import load_model
from primerl.train.settings import LoraConfig
from primerl.train.weights.shards import FILE
from pydantic import ValidationError
from rank_helpers import saved_tensors
from safetensors.torch import load_file
from settings_helpers import filled, run_trainer
from test_config import tree
from test_train_rl import reference_training, settings, timeless, whole_batch
from train_helpers import OrchestratorDouble, gone, randomise
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_logging")

RANK, ALPHA = 4, 8.0


def random_adapter(folder: Path, seed: int, targets: list[str] | None = None) -> tuple[Any, Adapter]:
    model = load_model(folder)
    config = filled(LoraConfig, rank=RANK, alpha=ALPHA, target_modules=targets or ["all-linear"])
    adapter = add_adapter(model, config, folder, seed=0)
    randomise(model, seed)
    return model, adapter


def adapted_settings(url: str, folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    lora = {"rank": RANK, "alpha": ALPHA, "broadcast": "adapter", **changes.pop("lora", {})}
    return settings(url, folder, output, model={"path": str(folder), "lora": lora}, **changes)


def published(output: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(output / "broadcasts" / f"step_{version}" / "adapter_model.safetensors")


def test_trains_as_a_plain_loop_does(folder: Path, tmp_path: Path) -> None:
    with OrchestratorDouble(whole_batch) as double:
        separately = {"weights": {"save_adapter_separately": True}}
        assert run_trainer(adapted_settings(double.url, folder, tmp_path, ckpt=separately)) == 0
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    begun = tmp_path / "broadcasts" / "step_0"
    expected = reference_training(peft.PeftModel.from_pretrained(plain, begun, is_trainable=True).train(), 3)
    initial, final, moved = published(tmp_path, 0), published(tmp_path, 3), 0.0
    for name, tensor in final.items():
        reference = expected[name.replace(".weight", ".default.weight")]
        assert (tensor - reference).abs().max().item() <= 2e-5, name
        moved = max(moved, (tensor - initial[name]).abs().max().item())
    assert moved > 5e-3
    saved = tmp_path / "weights" / "step_3"
    alone = load_file(saved / "lora_adapters" / "adapter_model.safetensors")
    assert all(torch.equal(alone[name], final[name]) for name in final)
    merged, base = load_file(saved / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (final[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    difference = merged[f"{name}.weight"] - base[f"{name}.weight"] - ALPHA / RANK * (b @ a)
    assert difference.abs().max() <= 1e-6


def test_an_adapter_of_a_mixture_is_trained_as_peft_trains_it(folders: Any, tmp_path: Path) -> None:
    """Of its experts and of linear attention, in steps of reinforcement learning, against a plain loop over peft."""
    base = folders("qwen3_5_moe_text")
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(adapted_settings(double.url, base, tmp_path)) == 0
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    begun = tmp_path / "broadcasts" / "step_0"
    expected = reference_training(peft.PeftModel.from_pretrained(plain, begun, is_trainable=True).train(), 3)
    initial, final = published(tmp_path, 0), published(tmp_path, 3)
    for part in (
        "experts.base_layer",
        "experts",
        "shared_expert.up_proj",
        "linear_attn.in_proj_qkv",
        "self_attn.q_proj",
    ):
        assert any(name.endswith(f".{part}.lora_B.weight") for name in final), part
    for name, tensor in final.items():
        reference = expected[name.replace(".weight", ".default.weight")]
        assert (tensor - reference).norm() <= 1e-3 * reference.norm(), name
        assert not torch.equal(tensor, initial[name]), name


def test_a_checkpoint_of_an_adapter_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(adapted_settings(double.url, folder, whole, max_steps=4)) == 0
    saves = {"interval": 2}
    with OrchestratorDouble(lambda step, rank: whole_batch(step) if step < 4 else gone()) as double:
        assert run_trainer(adapted_settings(double.url, folder, halves, max_steps=4, ckpt=saves)) == 0
    assert all("lora_" in name for name in saved_tensors(halves / "checkpoints" / "step_2"))
    digest = json.loads((halves / "broadcasts" / "step_2" / "manifest.json").read_text())["digest"]
    with OrchestratorDouble(whole_batch) as double:
        assert run_trainer(adapted_settings(double.url, folder, halves, max_steps=4, ckpt=saves)) == 0
        assert [fields["version"] for fields in double.called("/trainer/weights")] == [2, 3, 4]
    assert json.loads((halves / "broadcasts" / "step_2" / "manifest.json").read_text())["digest"] == digest
    for version in (3, 4):
        one, other = published(whole, version), published(halves, version)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert timeless(whole) == timeless(halves)


def test_a_warm_start_publishes_the_adapter_it_was_given(folder: Path, tmp_path: Path) -> None:
    _, adapter = random_adapter(folder, 1)
    adapter.save(tmp_path / "given")
    lora = {"adapter_path": str(tmp_path / "given")}
    with OrchestratorDouble(lambda _step, _rank: gone()) as double:
        assert run_trainer(adapted_settings(double.url, folder, tmp_path / "run", lora=lora)) == 0
    assert all(torch.equal(tensor, adapter.tensors()[name]) for name, tensor in published(tmp_path / "run", 0).items())


def test_what_does_not_fit_ends_the_trainer_before_it_trains(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OrchestratorDouble(whole_batch) as double:
        given = adapted_settings(double.url, folder, tmp_path, lora={"target_modules": ["embed_tokens"]})
        assert run_trainer(given) == 2
        assert not double.called("/trainer/weights")
    assert "model.lora.target_modules: model.embed_tokens is the embedding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "lora"),
    [
        ({}, {"rank": RANK, "target_modules": ["all-linear"], "max_adapters": 8}),
        ({"trainer__model__lora__broadcast": "merged"}, None),
        ({"orchestrator__engines": ["http://127.0.0.1:1"]}, None),
    ],
)
def test_engines_are_started_for_what_they_are_sent(changes: dict[str, Any], lora: dict[str, Any] | None) -> None:
    config = RLConfig.model_validate(tree(trainer__model__lora__rank=RANK, **changes))
    (engine,) = resolve.inference(config, "http://o:1")
    trainer = resolve.trainer(config, "http://o:1")
    sent = trainer.config.model_dump()["model"]["lora"]["broadcast"]
    assert (engine.config.model_dump()["lora"], sent) == (lora, "adapter" if lora else "merged")


@pytest.mark.parametrize(
    ("backend", "changes", "kept"),
    [
        ("vllm", {"orchestrator__max_off_policy_steps": 20, "orchestrator__max_async_level": 3}, 25),
        ("vllm", {"orchestrator__max_off_policy_steps": 4, "orchestrator__max_async_level": 3}, 9),
        ("vllm", {"orchestrator__max_off_policy_steps": 20, "trainer__weights__keep_last": 30}, 30),
        ("vllm", {"trainer__model__lora__broadcast": "merged", "orchestrator__max_async_level": 3}, 5),
        ("torch", {"orchestrator__max_off_policy_steps": 20, "orchestrator__max_async_level": 3}, 5),
    ],
)
def test_adapters_that_vllm_may_read_again_are_kept(backend: str, changes: dict[str, Any], kept: int) -> None:
    config = RLConfig.model_validate(tree(trainer__model__lora__rank=RANK, inference__backend=backend, **changes))
    trainer = resolve.trainer(config, "http://o:1").config
    assert trainer.model_dump()["weights"]["keep_last"] == kept


def test_too_few_kept_adapters_are_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the launcher asks vLLM, which is not needed to know.
    monkeypatch.setattr(installation, "find", lambda python: SimpleNamespace(device="cpu"))
    monkeypatch.setattr(installation, "check_model", lambda folder, device: None)
    given = {"model__path": str(folder), "trainer__model__lora__rank": RANK, "inference__backend": "vllm"}
    few = {"orchestrator__max_off_policy_steps": 20, "orchestrator__max_async_level": 1}
    few["trainer__weights__keep_last"] = 22
    with pytest.raises(CommandError, match=r"keep_last \(22\) must be at least .* \(23\) with adapters on vLLM"):
        training.check(RLConfig.model_validate(tree(**given, **few)))


def test_the_launcher_names_what_does_not_fit_before_it_starts(folder: Path, tmp_path: Path) -> None:
    _, adapter = random_adapter(folder, 1)
    adapter.save(tmp_path / "adapter")
    for lora, message in [
        ({"target_modules": ["query"]}, "trainer.model.lora.target_modules: no layer of the model in"),
        ({"adapter_path": str(tmp_path / "adapter"), "rank": 2}, "trainer.model.lora.rank is 2, but"),
        ({"adapter_path": "absent"}, "trainer.model.lora.adapter_path: there is no"),
    ]:
        values = tree(model__path=str(folder), trainer__model__lora=lora, output_dir=str(tmp_path / "run"))
        with pytest.raises(CommandError) as caught:
            training.check(RLConfig.model_validate(values))
        assert str(caught.value).startswith(message)
    with pytest.raises(ValidationError, match="the trainer's probabilities have to be the engine's"):
        RLConfig.model_validate(tree(trainer__model__lora__dropout=0.1))
    with pytest.raises(ValidationError, match=r"there is no `model\.lora`, so no adapter"):
        RLConfig.model_validate(tree(trainer__ckpt__weights__save_adapter_separately=True))


# The engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    place = tmp_path_factory.mktemp("engine")
    lora = f'lora = {{ rank = {RANK}, target_modules = ["all-linear"] }}'
    with running("torch", torch_command(folder, place, lora), folder, place / "log") as engine:
        yield engine


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.processes
def test_an_engine_serves_and_proves_each_adapter(engine: Engine, folder: Path, tmp_path: Path) -> None:
    publisher: AdapterPublisher | None = None
    for version, seed in ((0, 1), (1, 2), (2, 1)):
        model, adapter = random_adapter(folder, seed)
        publisher = AdapterPublisher(adapter, tmp_path, keep_last=5, keep_all=True)
        manifest = publisher.publish(model, version)
        engine.post("/pause", mode="keep", clear_cache="false")
        engine.update(manifest.parent, str(version))
        assert engine.digest() == json.loads(manifest.read_text())["digest"]
        assert engine.label() == str(version)
        engine.post("/resume")
        answer = engine.generate(max_tokens=20, ignore_eos=True, logprobs=0, seed=version)
        ids = answer["choices"][0]["token_ids"]
        base = AutoModelForCausalLM.from_pretrained(folder)
        reference = peft.PeftModel.from_pretrained(base, manifest.parent).eval()
        with torch.no_grad():
            rows = reference(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        assert (torch.tensor(logprobs(answer)) - expected).abs().max() <= 1e-5


@pytest.mark.processes
def test_an_engine_refuses_other_weights_and_goes_on(engine: Engine, folder: Path, tmp_path: Path) -> None:
    before = engine.digest()
    model, adapter = random_adapter(folder, 3, ["q_proj"])
    few = AdapterPublisher(adapter, tmp_path / "few", 2, False).publish(model, 3).parent
    engine.post("/start_weight_update")
    answer = engine.post("/update_weights", {"update_info": {"path": str(few)}})
    assert answer.status_code == 500
    assert "names and shapes must equal those of the model that is served" in answer.text
    engine.calm()
    assert engine.digest() == before
    # Of another base model: it is loaded, and not proved.
    other = tmp_path / "other"
    write_model(other, TinyConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, head_dim=16), seed=4)
    model, adapter = random_adapter(other, 3)
    manifest = AdapterPublisher(adapter, tmp_path / "strange", 2, False).publish(model, 3)
    engine.update(manifest.parent, "3")
    assert engine.digest() != json.loads(manifest.read_text())["digest"]


# A whole run --------------------------------------------------------------------------------------------------------


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")
def test_a_run_whose_trainer_is_killed_is_token_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights, which no reward moves: the entropy bonus does, and the adapter it begins with is none that is
    next to nothing."""
    model, output = tmp_path / "model", tmp_path / "run"
    write_model(model, TinyConfig(), seed=1)
    _, adapter = random_adapter(model, 5)
    adapter.save(tmp_path / "adapter")
    changes: dict[str, Any] = {
        "max-steps": 6,
        "orchestrator.eval.env": "[]",
        "orchestrator.batch-size": 16,
        "trainer.model.lora.rank": RANK,
        "trainer.model.lora.alpha": ALPHA,
        "trainer.model.lora.adapter-path": tmp_path / "adapter",
        "trainer.loss.entropy-weight": 1.0,
        "trainer.optim.lr": 1e-2,
        "ckpt.interval": 1,
    }
    arguments = [str(part) for key, value in changes.items() for part in (f"--{key}", value)]
    run = launch(model, output, *arguments, "--keep-broadcasts", "--ckpt.weights.save-adapter-separately")
    try:
        run.note_mark()
        until(lambda: run.steps() >= 2 or run.launcher.poll() is not None, 180, "two steps")
        trainer = run.pid_of("trainer")
        assert trainer is not None, run.ended(5)
        os.kill(trainer, signal.SIGKILL)
        code, said = run.ended(200)
    finally:
        run.kill()
    assert code == 0, said
    assert said.count("it is started again") == 1
    assert steps_of(output) == [1, 2, 3, 4, 5, 6]
    # Of the first step all samples are of the policy that is trained, as the adapter in peft's layers computes it.
    assert column(output, "mismatch_kl/all/max")[0] <= 1e-8
    versions = [output / "broadcasts" / f"step_{version}" for version in range(7)]
    assert len({json.loads((version / "manifest.json").read_text())["digest"] for version in versions}) == 7
    assert sum(file.stat().st_size for file in versions[6].iterdir()) < 0.5 * (model / FILE).stat().st_size
    assert verify.main(output) == 0
    assert "token-exact" in capsys.readouterr().out
    saved = output / "weights" / "step_6"
    alone = load_file(saved / "lora_adapters" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, published(output, 6)[name]) for name, tensor in alone.items())
    assert sorted(load_file(saved / FILE)) == sorted(load_file(model / FILE))
