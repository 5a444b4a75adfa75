"""One suite for every engine with vLLM's surface: the seeded mock, the embedded engines and vLLM itself, as real
processes. vLLM where there is an environment with it (`make vllm`)."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import (
    EOS,
    GENERATE,
    KINDS,
    LONG,
    PROMPT,
    VLLM,
    VOCABULARY,
    Engine,
    any_tensors,
    mock_command,
    need_vllm,
    request,
    running,
    start_many,
    torch_command,
    vllm_command,
    wait_until,
    write_checkpoint,
)
from primerl.render import Renderer

pytestmark = pytest.mark.processes


TRANSFORMERS = pytest.param("transformers", marks=pytest.mark.long)


@pytest.fixture(scope="session", params=[*KINDS, TRANSFORMERS, VLLM])
def shared_engine(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "vllm":
        need_vllm()
    commands = {
        "mock": lambda: mock_command(request.getfixturevalue("mock_binary")),
        "torch": lambda: torch_command(model, folder),
        "transformers": lambda: torch_command(model, folder, 'backend = "transformers"'),
        "vllm": lambda: vllm_command(model, folder),
    }
    is_mock = request.param == "mock"
    with running(request.param, commands[request.param](), None if is_mock else model, folder / "log") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    shared_engine.calm()


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield "[DONE]" if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))


# Generation ---------------------------------------------------------------------------------------------------------


def test_answer_has_every_field(engine: Engine) -> None:
    body = {**request(id_="shape", max_tokens=3, ignore_eos=True, logprobs=3), "return_token_ids": True}
    answer = engine.post(GENERATE, body).json()
    (choice,) = answer["choices"]
    assert answer["request_id"] == "generate-tokens-shape"
    assert (answer["model"], answer["output_mode"], answer["prompt_token_ids"]) == ("m", "tokens", PROMPT)
    assert answer["prompt_logprobs"] is None
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["weight_versions"] == [{"version": engine.label(), "start": 0, "end": 3}]
    assert len(choice["token_ids"]) == 3
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token_id"] == token
        assert entry["logprob"] <= 0
        assert entry["rank"] >= 1
        top = entry["top_logprobs"]
        assert len(top) == 3
        assert top[0] == {name: entry[name] for name in ("token_id", "logprob", "rank")}
        assert len({other["token_id"] for other in top}) == 3
        ranks = [other["rank"] for other in top[1:]]
        assert ranks == [rank for rank in (1, 2, 3) if rank != entry["rank"]][: len(ranks)]


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    assert engine.generate(max_tokens=1)["choices"][0]["logprobs"] is None
    for asked in (0, 1):
        (entry,) = engine.generate(max_tokens=1, logprobs=asked)["choices"][0]["logprobs"]["content"]
        assert [top["token_id"] for top in entry["top_logprobs"]] == [entry["token_id"]]


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "right": {"type": "boolean"}},
    "required": ["kind", "right"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("wanted", "obeys"),
    [
        ({"json": SCHEMA}, r'\{\s*"kind"\s*:\s*"[ab]"\s*,\s*"right"\s*:\s*(true|false)\s*\}'),
        ({"regex": "[0-9]{3}-[xy]"}, r"[0-9]{3}-[xy]"),
        ({"choice": ["left", "right"]}, r"left|right"),
    ],
    ids=["json", "regex", "choice"],
)
def test_structured_outputs_are_obeyed(engine: Engine, wanted: dict[str, Any], obeys: str) -> None:
    if engine.model is None:
        pytest.skip("the mock has no model, and knows no grammar")
    renderer = Renderer(engine.model)
    for seed in range(3):
        sampling = {"seed": seed, "max_tokens": 400, "structured_outputs": wanted}
        (choice,) = engine.generate(**sampling)["choices"]
        text = renderer.decode(choice["token_ids"], skip_special=True)
        assert choice["finish_reason"] == "stop", text
        assert re.fullmatch(obeys, text), text


def test_seed_decides_whoever_else_is_in_the_batch(engine: Engine, pool: ThreadPoolExecutor) -> None:
    alone = engine.tokens(seed=7, max_tokens=40, ignore_eos=True)
    others = [pool.submit(engine.tokens, [index + 1] * (index + 3), max_tokens=60) for index in range(20)]
    crowded = pool.submit(engine.tokens, seed=7, max_tokens=40, ignore_eos=True)
    assert crowded.result() == alone
    assert len({tuple(other.result()) for other in others}) > 1
    assert engine.tokens(seed=8, max_tokens=40, ignore_eos=True) != alone
    unseeded = [engine.tokens(max_tokens=40, ignore_eos=True) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_max_tokens_fills_and_clamps(engine: Engine) -> None:
    room = 1024 - 1000
    for sampling in ({}, {"max_tokens": 5000}):
        answer = engine.generate([5] * 1000, ignore_eos=True, **sampling)
        assert answer["usage"]["completion_tokens"] == room
        assert answer["choices"][0]["finish_reason"] == "length"


def test_end_of_sequence_is_included_and_ends(engine: Engine, pool: ThreadPoolExecutor) -> None:
    # At the highest temperature that vLLM takes all tokens are about equally likely, so that some sequences end.
    sampling = {"temperature": 2.0, "max_tokens": 300}
    answers = [pool.submit(engine.generate, seed=seed, **sampling) for seed in range(24)]
    choices = [answer.result()["choices"][0] for answer in answers]
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        assert choice["stop_reason"] is None
        assert choice["token_ids"].index(EOS) == len(choice["token_ids"]) - 1
    ignoring = engine.generate(seed=0, ignore_eos=True, **sampling)["choices"][0]
    assert (ignoring["finish_reason"], len(ignoring["token_ids"])) == ("length", 300)
    patient = [pool.submit(engine.tokens, seed=seed, min_tokens=50, **sampling) for seed in range(8)]
    assert all(EOS not in answer.result()[:50] for answer in patient)


def test_stop_token_is_included_and_ignore_eos_does_not_disable_it(engine: Engine) -> None:
    free = engine.tokens(seed=3, max_tokens=30, ignore_eos=True)
    stop = free[9]
    choice = engine.generate(seed=3, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == free[: free.index(stop) + 1]


def test_several_choices(engine: Engine) -> None:
    answer = engine.generate(n=3, seed=1, max_tokens=20, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    assert answer["choices"][0]["token_ids"] == engine.tokens(seed=1, max_tokens=20, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 60


def test_stream_equals_the_plain_answer(engine: Engine) -> None:
    plain = engine.generate(id_="s", seed=5, max_tokens=12, ignore_eos=True, logprobs=0)["choices"][0]
    body = request(id_="s", seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with engine.client.stream("POST", GENERATE, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in chunk and "model" not in chunk for chunk in chunks[1:])
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == plain["token_ids"]
    assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == plain["logprobs"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert [choice["weight_versions"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == plain["weight_versions"]


def test_prompt_is_scored(engine: Engine) -> None:
    answer = engine.generate(max_tokens=1, prompt_logprobs=2)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    for token, entry in zip(PROMPT[1:], rest, strict=True):
        assert next(iter(entry)) == str(token)
        assert 2 <= len(entry) <= 3
    deterministic = engine.generate(max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert [list(entry) for entry in deterministic[1:]] == [[str(token)] for token in PROMPT[1:]]


# Where vLLM answers otherwise: another envelope, or (None) it serves what the embedded engine cannot.
VLLM_ANSWERS: dict[str, tuple[str, str | None, str] | None] = {
    "negative": ("Bad Request", "body.token_ids", "negative"),
    "hot": ("Bad Request", "body.sampling_params", ""),
    "salt": ("BadRequestError", "cache_salt", "non-empty"),
    "n": ("BadRequestError", None, "max_num_seqs"),
    "stop": None,
    "penalty": None,
}
# What vLLM's engine process finds, after its server has begun the stream: the error is the stream's only event.
VLLM_REFUSES_IN_THE_STREAM = {"vocabulary", "too long", "full", "stop ids", "logprobs"}


@pytest.mark.parametrize(
    ("case", "body", "status", "kind", "param", "words"),
    [
        ("empty", request([]), 400, "Bad Request", "body.token_ids", "too_short"),
        ("negative", request([-1]), 400, "Bad Request", "body.token_ids", "greater_than"),
        ("text", {"token_ids": "x", "sampling_params": {}}, 400, "Bad Request", "body.token_ids", ""),
        ("no sampling", {"token_ids": [1]}, 400, "Bad Request", "body.sampling_params", "missing"),
        ("hot", request(temperature="hot"), 400, "Bad Request", "body.sampling_params.temperature", ""),
        ("list", [1], 400, "Bad Request", "body", ""),
        ("salt", {**request(), "cache_salt": ""}, 400, "Bad Request", "body.cache_salt", ""),
        (
            "vocabulary",
            request([VOCABULARY]),
            400,
            "BadRequestError",
            None,
            f"Token id {VOCABULARY} is out of vocabulary",
        ),
        (
            "too long",
            request([1] * 1200, max_tokens=5),
            400,
            "BadRequestError",
            None,
            "longer than the maximum model length",
        ),
        ("longer", request([1] * 1200), 400, "BadRequestError", None, "exceeds model's maximum context length (1024)"),
        ("full", request([1] * 1024), 400, "BadRequestError", None, "at least 1"),
        (
            "no tokens",
            request(max_tokens=0),
            400,
            "BadRequestError",
            "max_tokens",
            "max_tokens must be at least 1, got 0.",
        ),
        ("cold", request(temperature=-1), 400, "BadRequestError", "temperature", "temperature"),
        ("top_p", request(top_p=0), 400, "BadRequestError", "top_p", "top_p"),
        ("stop ids", request(stop_token_ids=[9999]), 400, "BadRequestError", "stop_token_ids", "9999"),
        ("logprobs", request(logprobs=50), 400, "BadRequestError", "logprobs", "greater than max allowed: 20"),
        ("n", request(n=1000), 400, "BadRequestError", "n", "max_num_seqs"),
        ("stop", request(stop=["x"]), 400, "BadRequestError", "stop", "not supported"),
        ("penalty", request(repetition_penalty=1.2), 400, "BadRequestError", "repetition_penalty", "not supported"),
        ("model", {**request(), "model": "nope"}, 404, "NotFoundError", "model", "The model `nope` does not exist."),
    ],
)
def test_bad_requests(
    engine: Engine, case: str, body: Any, status: int, kind: str, param: str | None, words: str
) -> None:
    if engine.kind == "vllm":
        answers = VLLM_ANSWERS.get(case, (kind, param, words))
        if answers is None:
            assert engine.post(GENERATE, body).status_code == 200
            return
        kind, param, words = answers
    answer = engine.post(GENERATE, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert words in error["message"]
    stream = engine.post(GENERATE, body if isinstance(body, list) else {**body, "stream": True})
    if engine.kind == "vllm" and case in VLLM_REFUSES_IN_THE_STREAM:
        event, done = events(stream)
        assert (stream.status_code, event["error"], done) == (200, error, "[DONE]")
    else:
        assert stream.status_code == status, "a stream fails before it begins"


def test_unknown_keys_are_ignored_and_broken_bodies_are_not(engine: Engine) -> None:
    body = request(max_tokens=1, made_up=3) | {"also_made_up": {}}
    assert engine.post(GENERATE, body).status_code == 200
    broken = engine.client.post(GENERATE, content=b'{"token_ids": [1', headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "Bad Request")
    text = engine.client.post(GENERATE, content=json.dumps(body), headers={"content-type": "text/plain"})
    assert (text.status_code, text.json()["error"]["type"]) == (400, "Bad Request")
    assert engine.client.get("/nope").json() == {"detail": "Not Found"}
    assert engine.client.get(GENERATE).status_code == 405


# Abort --------------------------------------------------------------------------------------------------------------


def test_abort_by_id_returns_what_there_is(engine: Engine, pool: ThreadPoolExecutor) -> None:
    one, two = start_many(engine, pool, 2)
    ids = "/inference/v1/abort_requests"
    assert engine.post(ids, {"request_ids": ["r0", "generate-tokens-unknown"]}).status_code == 200
    assert engine.running() == 2, "ids without the prefix have no effect"
    answer = engine.post(ids, {"request_ids": ["generate-tokens-r0"]})
    assert (answer.status_code, answer.content) == (200, b"")
    choice = one.result()["choices"][0]
    count = len(choice["token_ids"])
    assert choice["finish_reason"] == "abort"
    assert 0 < count < LONG
    assert len(choice["logprobs"]["content"]) == count
    assert choice["weight_versions"][-1]["end"] == count
    assert two.result()["choices"][0]["finish_reason"] == "length"
    assert engine.post(ids, {}).json()["error"]["type"] == "Bad Request"


def test_abort_all(engine: Engine, pool: ThreadPoolExecutor) -> None:
    answers = start_many(engine, pool, 3)
    assert engine.post("/abort_requests").json() == {"status": "aborted", "aborted": 3}
    assert [answer.result()["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_disconnect_aborts(engine: Engine, streamed: bool, paused: bool) -> None:
    body = request(max_tokens=LONG, ignore_eos=True) | {"stream": streamed}
    client = HTTPConnection(engine.client.base_url.host, engine.client.base_url.port, timeout=60)
    sampled = engine.metric("vllm:generation_tokens_total")

    def has_come() -> bool:
        return engine.load() == 1 or engine.metric("vllm:generation_tokens_total") > sampled

    with contextlib.closing(client):
        if paused and not streamed:
            engine.post("/pause", mode="keep", clear_cache=False)
        client.request("POST", GENERATE, json.dumps(body), {"content-type": "application/json"})
        if streamed:
            assert client.getresponse().readline().startswith(b"data: ")
            if paused:
                engine.post("/pause", mode="keep", clear_cache=False)
        else:
            wait_until(has_come, "the request")
    wait_until(lambda: engine.load() == 0, "the request's end")
    wait_until(lambda: engine.running() + engine.metric("vllm:num_requests_waiting") == 0, "the abort")


def test_abort_while_paused(engine: Engine, pool: ThreadPoolExecutor) -> None:
    (frozen,) = start_many(engine, pool, 1)
    engine.post("/pause", mode="keep", clear_cache=False)
    queued = pool.submit(engine.generate, id_="queued", max_tokens=5)
    # Its server has it; vLLM's engine process says what waits only when it steps, and a pause keeps it from that.
    wait_until(lambda: engine.load() == 2, "the queued request")
    both = {"request_ids": ["generate-tokens-queued", "generate-tokens-r0"]}

    def aborted() -> bool:
        assert engine.post("/abort_requests", both).json()["status"] == "aborted"
        return queued.done() and frozen.done()

    wait_until(aborted, "the end of both")
    assert len(frozen.result()["choices"][0]["token_ids"]) > 0
    choice = queued.result()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])


# Pause and weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_keep_freezes_and_goes_on(
    engine: Engine, pool: ThreadPoolExecutor, tmp_path: Path, clear_cache: bool
) -> None:
    preempted, before = engine.metric("vllm:num_preemptions_total"), engine.label()
    answers = start_many(engine, pool, 4)
    assert engine.post("/pause", mode="keep", clear_cache=clear_cache).json() == {"status": "paused"}
    assert engine.post("/pause", mode="keep", clear_cache=clear_cache).json() == {"status": "paused"}
    assert engine.client.get("/is_paused").json() == {"is_paused": True}
    assert engine.client.get("/health").status_code == 200
    sampled = engine.metric("vllm:generation_tokens_total")
    queued = pool.submit(engine.generate, max_tokens=5, ignore_eos=True)
    wait_until(lambda: engine.load() == 5, "the queued request")
    assert engine.metric("vllm:generation_tokens_total") == sampled, "nothing is sampled while paused"
    assert engine.post("/reset_prefix_cache").json() == {"success": clear_cache}
    manifest = write_checkpoint(tmp_path / "w", any_tensors(engine, 1), version=4)
    engine.update(tmp_path / "w", f"keep-{clear_cache}")
    assert engine.digest() == manifest["digest"]
    assert engine.post("/resume").json() == {"status": "resumed"}
    assert engine.post("/resume").json() == {"status": "resumed"}
    for answer in answers:
        choice = answer.result()["choices"][0]
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"]) == (before, 0)
        assert (second["version"], second["start"], second["end"]) == (f"keep-{clear_cache}", first["end"], LONG)
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == LONG
    assert queued.result()["choices"][0]["weight_versions"] == [
        {"version": f"keep-{clear_cache}", "start": 0, "end": 5}
    ]
    assert engine.metric("vllm:num_preemptions_total") - preempted == (4 if clear_cache else 0)


def test_pause_abort_returns_at_once(engine: Engine, pool: ThreadPoolExecutor) -> None:
    answers = start_many(engine, pool, 3)
    assert engine.post("/pause").json() == {"status": "paused"}
    assert [answer.result()["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 3
    assert engine.post("/reset_prefix_cache").json() == {"success": True}


def test_pause_wait_drains(engine: Engine, pool: ThreadPoolExecutor) -> None:
    answers = start_many(engine, pool, 3)
    pausing = pool.submit(engine.post, "/pause", mode="wait")
    wait_until(lambda: engine.client.get("/is_paused").json()["is_paused"], "the pause")
    late = pool.submit(engine.generate, max_tokens=3, ignore_eos=True)
    assert pausing.result().json() == {"status": "paused"}
    assert [answer.result()["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 3
    assert not late.done()
    engine.post("/resume")
    assert late.result()["usage"]["completion_tokens"] == 3


def test_pause_wait_that_is_resumed_is_no_pause(engine: Engine, pool: ThreadPoolExecutor) -> None:
    start_many(engine, pool, 1)
    pausing = pool.submit(engine.post, "/pause", mode="wait")
    wait_until(lambda: engine.client.get("/is_paused").json()["is_paused"], "the pause")
    engine.post("/resume")
    answer = pausing.result()
    if engine.kind == "vllm":
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert not engine.client.get("/is_paused").json()["is_paused"], "though it said so"
        return
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("Failed to pause generation: ")


def test_bad_pause_mode(engine: Engine) -> None:
    answer = engine.post("/pause", mode="nope")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query.mode")
    assert not engine.client.get("/is_paused").json()["is_paused"]


def test_update_out_of_order(engine: Engine, tmp_path: Path) -> None:
    before = engine.label()
    body = {"update_info": {"path": str(tmp_path)}}
    for path, call in [("/update_weights", body), ("/finish_weight_update", {"weight_version": "x"})]:
        answer = engine.post(path, call)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "InternalServerError"
        assert error["message"].startswith("Call to collective_rpc method failed: ")
    assert engine.post("/start_weight_update").status_code == 200
    assert "already active" in engine.post("/start_weight_update").json()["error"]["message"]
    assert engine.post("/update_weights", {}).json()["error"]["type"] == "Bad Request"
    assert engine.label() == before
    assert engine.post("/finish_weight_update", {}).json() == {"message": "Weight update finished"}
    assert engine.label() == before, "no label was given"
    assert engine.post("/update_weight_version", {"new_version": "B"}).json() == {"success": True, "new_version": "B"}
    assert engine.label() == "B"
    assert "not implemented" in engine.post("/collective_rpc", {"method": "nope"}).json()["error"]["message"]


@pytest.mark.parametrize(
    "fault", ["no_folder", "no_manifest", "truncated", "hash", "digest", "shape", "missing", "dtype"]
)
def test_bad_checkpoint_changes_nothing(engine: Engine, tmp_path: Path, fault: str) -> None:
    if engine.kind == "mock" and fault in ("missing", "shape", "dtype"):
        pytest.skip("the mock has no model to compare with")
    folder = tmp_path / "w"
    tensors = any_tensors(engine, 3)
    name = sorted(tensors)[0]
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif fault == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    contents = write_checkpoint(folder, tensors, version=9)
    file = folder / "model.safetensors"
    if fault == "no_folder":
        folder = tmp_path / "nowhere"
    elif fault == "no_manifest":
        (folder / "manifest.json").unlink()
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    elif fault == "hash":
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    elif fault == "digest":
        (folder / "manifest.json").write_text(json.dumps({**contents, "digest": "0" * 32}))
    label, digest, tokens = engine.label(), engine.digest(), engine.generate(seed=1, max_tokens=20, logprobs=0)
    assert engine.post("/start_weight_update").status_code == 200
    answer = engine.post("/update_weights", {"update_info": {"path": str(folder)}})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert engine.post("/finish_weight_update", {"weight_version": "9"}).status_code == 500
    assert (engine.label(), engine.digest()) == (label, digest)
    assert engine.generate(seed=1, max_tokens=20, logprobs=0)["choices"] == tokens["choices"]
    assert engine.client.get("/health").status_code == 200


def test_new_weights_answer_otherwise(engine: Engine, tmp_path: Path) -> None:
    answers = []
    for version in (11, 12):
        write_checkpoint(tmp_path / "w", any_tensors(engine, version), version=version)
        engine.update(tmp_path / "w", str(version))
        choice = engine.generate(seed=1, max_tokens=20, ignore_eos=True, logprobs=0)["choices"][0]
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 20}]
        answers.append(choice["logprobs"])
    assert answers[0] != answers[1]


# The rest of the surface --------------------------------------------------------------------------------------------


def test_models_version_metrics(engine: Engine) -> None:
    (card,) = engine.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["parent"]) == ("m", 1024, None)
    assert engine.client.get("/version").json()["version"]
    assert engine.client.get("/load").json() == {"server_load": 0}
    names = ["prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count"]
    before = [engine.metric(f"vllm:{name}") for name in names]
    busy_names = [] if engine.kind == "vllm" else ["primerl:engine_busy_seconds_total"]
    busy = [engine.metric(name) for name in busy_names]
    engine.generate(max_tokens=10, ignore_eos=True)
    after = [engine.metric(f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(PROMPT), 10, 1]
    assert all(engine.metric(name) > value for name, value in zip(busy_names, busy, strict=True))
    for name in ["kv_cache_usage_perc", "num_requests_waiting", "num_preemptions_total", "cache_config_info"]:
        engine.metric(f"vllm:{name}")


def test_idle_engine_does_not_spin(engine: Engine) -> None:
    before = engine.metric("process_cpu_seconds_total")
    time.sleep(1.0)
    assert engine.metric("process_cpu_seconds_total") - before < 0.1
