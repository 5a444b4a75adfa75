"""The torch half of the embedded engine against transformers, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import (
    EOS,
    PROMPT,
    Engine,
    model_tensors,
    new_model,
    request,
    running,
    step,
    torch_command,
    wait_until,
    whole_vocabulary,
    write_checkpoint,
)
from primerl.inference.backend import UnservableError
from primerl.inference.torch.sampling import Rows, sample, score
from primerl.inference.torch.shape import Shape
from primerl.inference.torch.step import TorchBackend
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, attention_bias=True)),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    cls, config = FAMILIES[request.param]
    torch.manual_seed(1)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights are ones and biases zeros at first, which would hide that they are used.
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_logprobs_equal_transformers(family: tuple[PreTrainedModel, Path]) -> None:
    """Prompts of several lengths in one padded block, one of them in chunks, then decoding beside a new prompt."""
    model, folder = family
    backend = TorchBackend(folder, dtype="float32", max_num_seqs=5, max_model_len=128)
    vocabulary = int(model.config.vocab_size)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (5, 40, 17, 100, 9)]

    def check(sampled: Any, prefixes: list[list[int]]) -> None:
        found = whole_vocabulary(sampled, len(prefixes))
        for row, prefix in zip(found, prefixes, strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([prefix])).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)

    first = [(slot, 0, ids) for slot, ids in enumerate(texts[:3])]
    check(step(backend, first, [3], vocabulary), texts[:3])
    step(backend, [(3, 0, texts[3][:60])], [1])
    # Slots apart, one token each; the rest of a prompt in chunks; a new prompt.
    parts = [(0, 5, [7]), (2, 17, [8]), (3, 60, texts[3][60:]), (4, 0, texts[4])]
    prefixes = [[*texts[0], 7], [*texts[2], 8], texts[3], texts[4]]
    check(step(backend, parts, [2, 1, 1], vocabulary), prefixes)
    check(step(backend, [(1, 40, [9])], [1], vocabulary), [[*texts[1], 9]])


def test_bfloat16_is_close_and_converts_exactly(family: tuple[PreTrainedModel, Path]) -> None:
    model, folder = family
    backend = TorchBackend(folder, dtype="bfloat16", max_num_seqs=1, max_model_len=64)
    vocabulary = int(model.config.vocab_size)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    found = whole_vocabulary(step(backend, [(0, 0, prompt)], [1], vocabulary), 1)[0]
    with torch.no_grad():
        expected = model.to(torch.bfloat16)(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert (found - expected).abs().mean() < 0.1


def test_digest_is_that_of_the_manifest(tmp_path: Path) -> None:
    folder = new_model(tmp_path / "m", 0)
    tensors = {name: tensor + 0.25 for name, tensor in model_tensors(folder).items()}
    contents = write_checkpoint(tmp_path / "w", tensors, version=1)
    for dtype in ("float32", "bfloat16"):
        backend = TorchBackend(folder, dtype=dtype, max_num_seqs=1, max_model_len=64)
        assert backend.digest() != contents["digest"]
        for name, tensor in tensors.items():
            backend.load_tensor(name, "F32", bytearray(tensor.numpy().tobytes()))
        backend.weights_changed()
        assert backend.digest() == contents["digest"]
        assert torch.equal(backend.decoder.tensors["model.norm.weight"].float(), tensors["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "serve this model with vLLM"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"num_hidden_layers": 3}, "lacks 11 tensors"),
        ({"intermediate_size": 100}, "has shape"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = new_model(tmp_path / "m", 0)
    config = json.loads((folder / "config.json").read_text()) | change
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnservableError, match=words):
        TorchBackend(folder, dtype="float32", max_num_seqs=1, max_model_len=64)


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    folder = new_model(tmp_path / "m", 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 257]}))
    assert Shape.read(folder).eos_token_ids == (EOS, 257)


# Sampling -----------------------------------------------------------------------------------------------------------


def rows(count: int, **settings: Any) -> Rows:
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
    off = dict.fromkeys(["temperatures", "top_p", "top_k", "min_p", "banned"])
    return Rows(uniforms=uniforms, **{**off, **settings})


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])


@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_frequencies_follow_the_distribution(temperature: float | None) -> None:
    count = 20_000
    temperatures = None if temperature is None else torch.full((count,), temperature)
    ids, raw, processed = sample(LOGITS.repeat(count, 1), rows(count, temperatures=temperatures))
    expected = (LOGITS / (temperature or 1.0)).softmax(-1)
    frequencies = torch.bincount(ids, minlength=6) / count
    # Five standard deviations of a frequency.
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    torch.testing.assert_close(raw[0], LOGITS.log_softmax(-1))
    torch.testing.assert_close(processed[0].exp(), expected)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": torch.tensor([2])}, [0, 1]),
        ({"top_k": torch.tensor([0])}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": torch.tensor([0.8])}, [0, 1, 2]),
        ({"top_p": torch.tensor([0.01])}, [0]),
        ({"min_p": torch.tensor([0.2])}, [0, 1, 2]),
        ({"banned": (torch.tensor([0, 0]), torch.tensor([0, 2]))}, [1, 3, 4, 5]),
        ({"top_k": torch.tensor([3]), "top_p": torch.tensor([0.6])}, [0]),
        ({"temperatures": torch.tensor([0.0]), "banned": (torch.tensor([0]), torch.tensor([0]))}, [1, 2, 3, 4, 5]),
    ],
)
def test_truncation_keeps_and_renormalises(settings: dict[str, Any], kept: list[int]) -> None:
    ids, raw, processed = sample(LOGITS.unsqueeze(0), rows(1, **settings))
    assert processed[0].isfinite().nonzero().flatten().tolist() == kept
    assert int(ids) in kept
    torch.testing.assert_close(processed[0, kept], LOGITS[kept].log_softmax(-1))
    torch.testing.assert_close(raw[0], LOGITS.log_softmax(-1))


def test_rows_do_not_mix() -> None:
    temperatures, top_k = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1, 0])
    ids, _, processed = sample(LOGITS.repeat(3, 1), rows(3, temperatures=temperatures, top_k=top_k))
    assert ids[:2].tolist() == [0, 0]
    torch.testing.assert_close(processed[2], LOGITS.log_softmax(-1))


def test_uniform_limits_never_sample_the_impossible() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]] * 2)
    uniforms = torch.tensor([0.5 / 2**48, 1 - 0.5 / 2**48], dtype=torch.float64)
    ids, _, _ = sample(logits, Rows(uniforms, None, None, None, None, None))
    assert ids.tolist() == [1, 3]


def test_ranks_and_top() -> None:
    scores = score(LOGITS.log_softmax(-1).unsqueeze(0), torch.tensor([2]), top=2)
    assert scores.ranks.tolist() == [3]
    assert scores.top_ids is not None
    assert scores.top_ids.tolist() == [[0, 1]]


# The whole engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    model = new_model(folder / "model", 0)
    with running("torch", torch_command(model, folder), model, folder / "log") as engine:
        yield engine


@pytest.fixture(scope="module")
def versions(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedModel]:
    """The served model and two that differ from it in every tensor, also as checkpoints."""
    folder = tmp_path_factory.mktemp("versions")
    assert engine.model is not None
    models = {"default": AutoModelForCausalLM.from_pretrained(engine.model)}
    for version in (1, 2):
        source = new_model(folder / f"model_{version}", version)
        write_checkpoint(folder / f"step_{version}", model_tensors(source), version)
        models[str(version)] = AutoModelForCausalLM.from_pretrained(source)
        models[str(version)].checkpoint = folder / f"step_{version}"
    return models


@pytest.mark.processes
def test_greedy_tokens_equal_generate(engine: Engine, versions: dict[str, PreTrainedModel]) -> None:
    model = versions[engine.label()]
    generator = torch.Generator().manual_seed(5)
    for length in (1, 7, 30):
        prompt = torch.randint(256, (length,), generator=generator)
        expected = model.generate(
            prompt.unsqueeze(0), attention_mask=torch.ones(1, length), do_sample=False, max_new_tokens=60
        )[0, length:]
        assert engine.tokens(prompt.tolist(), temperature=0, max_tokens=60) == expected.tolist()


def reference(
    versions: dict[str, PreTrainedModel], prompt: list[int], choice: dict[str, Any], recompute: bool
) -> list[float]:
    """Log-probabilities segment by segment: the input of a token is computed by the version that sampled the token, and
    earlier KV stays as it was, or (`recompute`) is computed again by each new version."""
    sampled = choice["token_ids"]
    inputs = prompt + sampled[:-1]
    logprobs: list[float] = []
    cache = None
    done = 0
    for span in choice["weight_versions"]:
        start, end = (0 if recompute else done), len(prompt) - 1 + span["end"]
        past = None if recompute else cache
        with torch.no_grad():
            out = versions[span["version"]](torch.tensor([inputs[start:end]]), past_key_values=past, use_cache=True)
        cache = out.past_key_values
        count = span["end"] - span["start"]
        targets = torch.tensor(sampled[span["start"] : span["end"]])
        rows = out.logits[0, -count:].log_softmax(-1)
        logprobs += rows.gather(1, targets.unsqueeze(1)).squeeze(1).tolist()
        done = end
    return logprobs


@pytest.mark.processes
@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_over_updates(
    engine: Engine, versions: dict[str, PreTrainedModel], clear_cache: bool, temperature: float
) -> None:
    """Requests in flight over two updates; every log-probability recomputed by transformers with the weights of the
    version the engine names for it."""
    from concurrent.futures import ThreadPoolExecutor

    sampling = {"max_tokens": 400, "ignore_eos": True, "logprobs": 0, "temperature": temperature}
    prompts = [PROMPT[: 3 + index] for index in range(6)]
    with ThreadPoolExecutor(8) as pool:
        before = engine.metric("vllm:generation_tokens_total")
        answers = [pool.submit(engine.generate, prompt, seed=3, **sampling) for prompt in prompts]
        for index, label in enumerate(("1", "2")):
            target = before + 6 * 100 * (index + 1)
            wait_until(lambda at=target: engine.metric("vllm:generation_tokens_total") > at, "some tokens")
            engine.post("/pause", mode="keep", clear_cache=clear_cache)
            engine.update(versions[label].checkpoint, label)
            engine.post("/resume")
        choices = [answer.result()["choices"][0] for answer in answers]
    worst = 0.0
    for prompt, choice in zip(prompts, choices, strict=True):
        assert [span["version"] for span in choice["weight_versions"]][-2:] == ["1", "2"]
        found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        expected = reference(versions, prompt, choice, recompute=clear_cache)
        assert len(found) == len(expected) == 400
        worst = max(worst, *(abs(a - b) for a, b in zip(found, expected, strict=True)))
        other = reference(versions, prompt, choice, recompute=not clear_cache)
        assert max(abs(a - b) for a, b in zip(found, other, strict=True)) > 0.01, "the reference tells them apart"
    assert worst <= 1e-4


@pytest.mark.processes
def test_prompt_logprobs_equal_transformers(engine: Engine, versions: dict[str, PreTrainedModel]) -> None:
    answer = engine.post("/inference/v1/generate", request(PROMPT, max_tokens=1, prompt_logprobs=0)).json()
    with torch.no_grad():
        logits = versions[engine.label()](torch.tensor([PROMPT])).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    found = [next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"][1:]]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-5)


@pytest.mark.processes
def test_a_prompt_longer_than_a_step_is_computed_in_chunks(tmp_path: Path) -> None:
    model = new_model(tmp_path / "model", 0)
    file = tmp_path / "inference.toml"
    command = torch_command(model, tmp_path)
    file.write_text(file.read_text().replace("max_model_len = 1024", "max_model_len = 2048"))
    prompt = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    hf = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        expected = hf(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with running("torch", command, model, tmp_path / "log") as engine:
        # Three prompts of 2,000 tokens do not fit one step of 2,048.
        answers = engine.generate(prompt, n=3, temperature=0, max_tokens=1, logprobs=0)["choices"]
    for choice in answers:
        (entry,) = choice["logprobs"]["content"]
        assert entry["token_id"] == int(expected.argmax())
        assert abs(entry["logprob"] - float(expected.max())) < 1e-4


@pytest.mark.processes
def test_processed_logprobs(tmp_path: Path) -> None:
    model = new_model(tmp_path / "model", 0)
    hf = AutoModelForCausalLM.from_pretrained(model)
    command = torch_command(model, tmp_path, 'logprobs_mode = "processed_logprobs"')
    with running("torch", command, model, tmp_path / "log") as engine:
        choice = engine.generate(PROMPT, temperature=0.7, max_tokens=20, logprobs=0, seed=1)["choices"][0]
    tokens = choice["token_ids"]
    with torch.no_grad():
        logits = hf(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :] / 0.7
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    found = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
