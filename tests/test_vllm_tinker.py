"""The Tinker API with vLLM's engines: the SDK's scenarios, and proofs of what each engine holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import VLLM_PYTHON, need_vllm
from primerl.net.requests import open_url
from test_tinker_server import KEY, SCENARIOS, Server, scenarios, start
from tinker_calls import ROWS, Client

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.end_to_end,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc"),
]


@pytest.fixture(scope="module")
def server(imitator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    need_vllm()
    options = ["--inference.backend", "vllm", "--inference.python", str(VLLM_PYTHON)]
    one = start(imitator, tmp_path_factory.mktemp("served") / "tinker", *options)
    yield one
    one.kill()


def test_the_base_model_and_two_saved_adapters_are_sampled_from_at_once(server: Server) -> None:
    """There are two engines: each loads what it is asked for and proves it, for three samplers in turn."""
    client = Client(server.url, "tiny", KEY)
    model, row = client.trained_model(), ROWS[2]
    expected, samplers = {}, {"base": client.sampler(0, base_model="tiny")}
    for number, name in enumerate(("first", "second"), 1):
        expected["base" if number == 1 else "first"] = _logprobs(client, model, row)
        for _ in range(2):
            client.step(model)
        saved = client.called("save_weights_for_sampler", model, path=name)["path"]
        samplers[name] = client.sampler(number, model_path=saved)
    expected["second"] = _logprobs(client, model, row)
    with ThreadPoolExecutor(6) as pool:
        asked = {
            (name, round_): pool.submit(client.sample, sampler, round_, row, 1)
            for round_ in range(2)
            for name, sampler in samplers.items()
        }
    for (name, _), answer in asked.items():
        found = np.frombuffer(answer.result().prompt_logprobs, np.float32)[1:]
        assert np.abs(found - expected[name]).max() <= 1e-4, name
    with open_url(_with_key(f"{server.url}/status"), timeout=30) as answer:
        engines = json.loads(answer.read())["engines"]
    digests = {one["sampler"]: one["digest"] for one in engines}
    assert len(digests) == 2
    assert len(set(digests.values())) == 2
    log = (server.output / "logs" / "engine_0.log").read_text()
    assert "loaded policy" in log


def _with_key(url: str) -> object:
    import urllib.request

    return urllib.request.Request(url, headers={"X-API-Key": KEY})


def _logprobs(client: Client, model: str, row: list[int]) -> np.ndarray:
    output = client.losses(model, [row], forward_only=True)
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32)


@pytest.fixture(scope="module")
def results(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return scenarios(server, tmp_path_factory.mktemp("home"), *SCENARIOS)


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_sdk(name: str, results: dict[str, str | None]) -> None:
    """`tinker_scenarios.py` says what each asserts."""
    assert results[name] is None, results[name]
