"""Prefixes in vLLM's cache are those of one policy version: asked through the orchestrator, over a weight update."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import Engine, model_tensors, need_vllm, running, vllm_command, wait_until, write_checkpoint
from primerl._core import Orchestrator
from test_orchestrator_in_process import PATIENCE_S, begin, post, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts vLLM"),
]
# Of a cache block on CPUs, tokens; a letter is one.
BLOCK = 128
QUESTION = "abcdefghij" * 30


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    need_vllm()
    folder = tmp_path_factory.mktemp("vllm")
    with running("vllm", vllm_command(model, folder, 'dtype = "float32"'), model, folder / "log") as engine:
        yield engine


class Rollouts:
    """Leases of a small run, and what their agents are told."""

    def __init__(self, url: str) -> None:
        self.url = url
        registration = {"environment": "task", "role": "train", "name": "w", "pid": os.getpid(), "examples": 10}
        self.worker = post(f"{url}/envs/register", registration)["worker"]

    def lease(self, count: int) -> list[dict[str, Any]]:
        leases: list[dict[str, Any]] = []
        while len(leases) < count:
            answer = post(f"{self.url}/envs/lease", {"worker": self.worker, "max": count - len(leases)})
            assert not answer["finished"], answer
            leases += answer["rollouts"]
        return leases

    def ask(self, lease: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}]}
        wanted = {"logprobs": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {lease['api_key']}"}
        url = f"{lease['base_url']}/chat/completions"
        answer = httpx.post(url, json=body | wanted, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def report(self, lease: dict[str, Any]) -> None:
        trace = {"session": "", "trainable": True, "ok": True, "reward": 1.0, "metrics": {}}
        outcome = {"ok": True, "traces": [{**trace, "stop_condition": None, "truncated": False}], "error": None}
        post(f"{self.url}/envs/result", {"worker": self.worker, "rollout": lease["rollout"], "outcome": outcome})


def is_of(model: Path, tensors: dict[str, Tensor], answer: dict[str, Any]) -> None:
    """The answer's log-probabilities are those of a fresh forward with these weights, prompt and all."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.load_state_dict(tensors, strict=False)
    (choice,) = answer["choices"]
    prompt, sampled = answer["prompt_token_ids"], choice["token_ids"]
    assert len(prompt) > 2 * BLOCK
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None]).squeeze(1)
    given = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
    torch.testing.assert_close(given, own, atol=1e-4, rtol=0)


def test_a_prefix_is_reused_within_a_version_and_never_after_an_update(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    began_with = model_tensors(model)
    generator = torch.Generator().manual_seed(1)
    weights = [
        began_with,
        {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in began_with.items()},
    ]
    output = tmp_path / "out"
    longer = {"long_poll_s": 1.0, "worker_s": 600.0}
    sizes = {"seq_len": 1024, "batch_size": 2, "sampling": {"max_tokens": 12}, "timeouts": longer}
    with Orchestrator(settings(model, output, engines=[engine.url], **sizes)) as orchestrator:
        begin(orchestrator, output)
        rollouts = Rollouts(orchestrator.url)

        def publish(version: int) -> None:
            folder = output / f"broadcasts/step_{version}"
            write_checkpoint(folder, weights[version], version)
            orchestrator.publish_weights(version, folder / "manifest.json")

        def ask(lease: dict[str, Any], version: int) -> int:
            """Asks the same question; returns how many tokens of the prompt were in the cache."""
            before = engine.metric("vllm:prefix_cache_hits_total")
            is_of(model, weights[version], rollouts.ask(lease))
            return int(engine.metric("vllm:prefix_cache_hits_total") - before)

        publish(0)
        leases = rollouts.lease(2)
        assert [ask(lease, 0) for lease in leases] == [0, 2 * BLOCK]
        for lease in leases:
            rollouts.report(lease)
        assert orchestrator.next_batch(1, 0) is not None
        publish(1)
        until_proved(orchestrator, 1)
        assert [ask(lease, 1) for lease in rollouts.lease(2)] == [0, 2 * BLOCK]


def until_proved(orchestrator: Orchestrator, version: int) -> None:
    wait_until(lambda: orchestrator.status()["engines"][0]["version"] == version, f"version {version}")


def prepared(engine: Engine, folder: Path) -> None:
    """As the orchestrator does it, before it pauses an engine."""

    def ask(method: str, *arguments: str) -> bool:
        answer = engine.post("/collective_rpc", {"method": method, "args": list(arguments)})
        assert answer.status_code == 200, answer.text
        return all(worker["ready"] for worker in answer.json()["results"])

    if not ask("primerl_prepare", str(folder)):
        wait_until(lambda: ask("primerl_is_prepared"), f"reading {folder}")


def test_what_was_read_ahead_is_what_is_loaded(model: Path, engine: Engine, tmp_path: Path) -> None:
    tensors = {name: tensor + 0.01 for name, tensor in model_tensors(model).items()}
    good, bad = tmp_path / "good", tmp_path / "bad"
    digest = write_checkpoint(good, tensors, 8)["digest"]
    write_checkpoint(bad, tensors, 9)
    (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:-100])
    prepared(engine, good)
    # What is loaded is what was read: another read would find no file.
    (good / "manifest.json").unlink()
    engine.update(good, "8")
    assert engine.digest() == digest
    assert engine.label() == "8"
    prepared(engine, bad)
    assert engine.post("/start_weight_update").status_code == 200
    refused = engine.post("/update_weights", {"update_info": {"path": str(bad)}})
    assert refused.status_code == 500
    assert "is not a whole safetensors file" in refused.text
    assert engine.digest() == digest
    assert engine.label() == "8"
    # Read anew: nothing of a load that failed is kept.
    write_checkpoint(bad, tensors, 9)
    engine.update(bad, "9")
    assert engine.label() == "9"
