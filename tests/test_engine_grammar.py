"""Structured outputs of the embedded engine, in this process: what is sampled, and what log-probabilities are of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import EOS, GENERATE, PROMPT, VOCABULARY, request
from primerl import _core
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch.backend import engine_settings
from primerl.inference.torch.step import TorchBackend
from primerl.render import Renderer
from primerl.train.objective.bitmasks import unpacked
from settings_helpers import filled
from transformers import AutoModelForCausalLM

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
SEEDS = 40


class Local:
    def __init__(self, model: Path) -> None:
        self.model = model
        config = filled(InferenceConfig, model={"path": str(model), "name": "m"}, max_num_seqs=16, max_model_len=1024)
        backend = TorchBackend(
            model, dtype="float32", max_num_seqs=16, max_model_len=1024, logprobs_mode="processed_logprobs"
        )
        self.engine = _core.InferenceEngine(engine_settings(config, 1024), backend, host="127.0.0.1", port=0)
        self.client = httpx.Client(base_url=self.engine.url, timeout=60.0)

    def post(self, structured: Any, path: str = GENERATE, **sampling: Any) -> httpx.Response:
        options = {"max_tokens": 900, "logprobs": 0, "structured_outputs": structured, **sampling}
        return self.client.post(path, json=request(PROMPT, **options))

    def choice(self, structured: Any, **sampling: Any) -> dict[str, Any]:
        answer = self.post(structured, **sampling)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[Local]:
    local = Local(model)
    yield local
    local.client.close()
    local.engine.stop()


@pytest.fixture(scope="module")
def renderer(model: Path) -> Renderer:
    return Renderer(model)


def masked(model: Path, choice: dict[str, Any]) -> torch.Tensor:
    """The logits [N, V] of transformers before each token, -inf where the grammar does not allow one."""
    tokens = choice["token_ids"]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = whole(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    masks = _core.GrammarMasks(model, VOCABULARY)
    assert masks.identity == choice["grammar"]["masks"]
    bits, places = masks.replay(json.dumps(choice["grammar"]["spec"]), tokens)
    sets = torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(max(places) + 1, -1)
    return logits.masked_fill(~unpacked(sets, VOCABULARY)[places], -torch.inf)


def test_every_answer_obeys_its_schema(local: Local, renderer: Renderer) -> None:
    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(lambda seed: local.choice({"json": SCHEMA}, seed=seed), range(SEEDS)))
    texts = set()
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        text = renderer.decode(choice["token_ids"], skip_special=True)
        value = json.loads(text)
        assert list(value) == list(SCHEMA["properties"])
        assert len(value["name"]) <= 6
        assert 0 <= value["age"] <= 120
        assert value["kind"] in ("a", "b")
        assert len(value["tags"]) <= 2
        assert all(isinstance(tag, bool) for tag in value["tags"])
        texts.add(text)
    assert len(texts) > SEEDS // 2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_masked_softmax(local: Local, model: Path, temperature: float) -> None:
    for seed in range(3):
        choice = local.choice({"json": SCHEMA}, seed=seed, temperature=temperature)
        scaled = masked(model, choice) / temperature
        tokens = torch.tensor(choice["token_ids"])
        expected = scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        found = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_truncation_keeps_the_most_likely_of_what_is_allowed(local: Local, model: Path) -> None:
    for seed in range(3):
        choice = local.choice({"json": SCHEMA}, seed=seed, top_k=3)
        logits = masked(model, choice)
        floor = logits.topk(3, dim=-1).values[:, -1:]
        tokens = torch.tensor(choice["token_ids"])
        expected = logits.masked_fill(logits < floor, -torch.inf).log_softmax(-1)
        expected = expected.gather(1, tokens.unsqueeze(1)).squeeze(1)
        found = torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_seed_gives_the_same_answer_whoever_shares_its_batch(local: Local) -> None:
    alone = local.choice({"json": SCHEMA}, seed=7)
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(local.client.post, GENERATE, json=request(PROMPT, max_tokens=30)) for _ in range(4)]
        beside = [pool.submit(local.choice, {"json": SCHEMA}, seed=seed) for seed in range(4, 10)]
        assert all(answer.result().status_code == 200 for answer in plain)
        same = beside[3].result()
    assert same["token_ids"] == alone["token_ids"]


def test_other_kinds_and_several_choices(local: Local, renderer: Renderer) -> None:
    for seed in range(5):
        chosen = local.choice({"choice": ["yes", "no"]}, seed=seed)
        assert renderer.decode(chosen["token_ids"], skip_special=True) in ("yes", "no")
        assert chosen["token_ids"][-1] == EOS
        number = local.choice({"regex": "[0-9]{2,4}"}, seed=seed)
        assert renderer.decode(number["token_ids"], skip_special=True).isdigit()
    answer = local.post({"json": SCHEMA}, n=3, seed=1).json()
    texts = [renderer.decode(choice["token_ids"], skip_special=True) for choice in answer["choices"]]
    assert all(json.loads(text) for text in texts)
    assert len(set(texts)) > 1
    greedy = local.choice({"json": {"type": "boolean"}}, temperature=0.0)
    assert renderer.decode(greedy["token_ids"], skip_special=True) in ("true", "false")


def test_a_stream_says_what_it_was_sampled_by(local: Local) -> None:
    body = request(PROMPT, max_tokens=900, logprobs=0, seed=3, structured_outputs={"json": SCHEMA}) | {"stream": True}
    tokens: list[int] = []
    said = []
    with local.client.stream("POST", GENERATE, json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                tokens += choice["token_ids"]
                said.append(choice.get("grammar"))
    whole = local.choice({"json": SCHEMA}, seed=3)
    assert tokens == whole["token_ids"]
    assert said[:-1] == [None] * (len(said) - 1)
    assert said[-1] == whole["grammar"]


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "format": "shoe"}}, "shoe"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({}, "must have one of json"),
        ("json", "must be an object"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(local: Local, structured: Any, words: str) -> None:
    answer = local.post(structured)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == "structured_outputs"


def test_no_end_before_the_grammars(local: Local) -> None:
    for options in ({"min_tokens": 3}, {"ignore_eos": True}):
        answer = local.post({"json": SCHEMA}, **options)
        assert answer.status_code == 400
        assert "min_tokens" in answer.json()["error"]["message"]
    short = local.choice({"json": SCHEMA}, max_tokens=3)
    assert short["finish_reason"] == "length"
    assert len(short["token_ids"]) == 3


def test_the_chat_route_takes_openais_words(local: Local, renderer: Renderer) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hm"}],
        "max_completion_tokens": 900,
        "seed": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    }
    answer = local.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert list(json.loads(choice["message"]["content"])) == list(SCHEMA["properties"])
    assert choice["grammar"]["spec"]["structured_outputs"] == {"json": SCHEMA}
    refused = local.client.post("/v1/chat/completions", json=body | {"response_format": {"type": "shoe"}})
    assert refused.status_code == 400
