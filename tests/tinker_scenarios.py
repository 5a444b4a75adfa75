"""What `test_tinker_server.py` has the Tinker SDK do, in a process of its own: the SDK leaves connections open, which
pytest would take for mistakes of the tests.

    python tinker_scenarios.py URL OUTPUT MODEL NAME..      prints, for each name, null or why it failed, as JSON
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

KEY = "tml-test"


@dataclass
class Served:
    url: str
    output: Path
    model: Path


def datum(token_ids: list[int], **columns: Any) -> types.Datum:
    given = columns or {"weights": [1.0] * (len(token_ids) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(token_ids[:-1]),
        loss_fn_inputs={"target_tokens": token_ids[1:], **given},
    )


ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]]
ADAM = types.AdamParams(learning_rate=5e-3)


def trained(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Loss a token, step by step."""
    found = []
    for _ in range(steps):
        backward = client.forward_backward([datum(row) for row in ROWS], "cross_entropy")
        step = client.optim_step(ADAM)
        found.append(backward.result().metrics["loss:sum"] / sum(len(row) - 1 for row in ROWS))
        assert (step.result().metrics or {})["grad_norm:mean"] >= 0.0
    return found


def recomputed(server: Served, path: str, token_ids: list[int]) -> torch.Tensor:
    """By peft on a model of transformers, from what the server has saved: nothing of primerl computes here."""
    folder = server.output / "states" / path.removeprefix("tinker://")
    weights = load_file(folder / "adapter_model.safetensors")
    assert weights["base_model.model.lm_head.lora_B.weight"].abs().max() > 0  # `train_unembed` is the SDK's default
    return _by_peft(server, str(folder), token_ids)


def _by_peft(server: Served, folder: str, token_ids: list[int], merged_into: Path | None = None) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(merged_into or server.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder).eval()
    if merged_into is not None:
        model = model.merge_and_unload()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None]).squeeze(-1)


def supervised_training_reaches_the_datas_floor(server: Served, service: tinker.ServiceClient) -> None:
    """Each prompt is followed by one of three tokens, equally often: no model gets below their entropy."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(server.model / "tokenizer.json"))
    client = service.create_lora_training_client(base_model="tiny", rank=8, seed=1).result()
    data = []
    for text, answers in (("Reverse: abc", "cba"), ("Reverse: dehi", "ihg"), ("Reverse: gfaja", "aje")):
        row = tokenizer.encode(text).ids
        columns = {
            "target_tokens": [[0, 0, 0]] * (len(row) - 1) + [tokenizer.encode(answers).ids],
            "weights": [[0.0, 0.0, 0.0]] * (len(row) - 1) + [[1 / 3, 1 / 3, 1 / 3]],
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(row), loss_fn_inputs=columns))
    for _ in range(80):
        backward = client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM).result()
    loss = backward.result().metrics["loss:sum"] / len(data)
    assert math.log(3) - 1e-4 <= loss <= 1.02 * math.log(3)


def samples_are_those_of_the_trained_weights(server: Served, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(base_model="owner/alias", rank=4, seed=2).result()
    info = client.get_info()
    assert (info.lora_rank, info.model_data.model_name) == (4, "owner/alias")
    base = service.create_sampling_client(base_model="tiny").result()
    before = base.compute_logprobs(types.ModelInput.from_ints(ROWS[0])).result()
    trained(client, 5)
    sampler = client.save_weights_and_get_sampling_client().result()
    path = client.save_state("five").result().path
    trained(client, 3)  # what was saved for the sampler stays as it was
    prompt = types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=[])
    answer = sampler.sample(
        prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
    ).result()
    assert len({tuple(one.tokens) for one in answer.sequences}) > 1
    for one in answer.sequences:
        assert (len(one.tokens), one.stop_reason) == (12, "length")
        expected = recomputed(server, path, [*ROWS[0], *one.tokens])
        assert torch.allclose(torch.tensor(one.logprobs), expected[len(ROWS[0]) - 1 :], atol=1e-4)
        assert all(len(row) == 2 and row[0][1] >= row[1][1] for row in one.topk_logprobs)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert torch.allclose(torch.tensor(answer.prompt_logprobs[1:]), expected[: len(ROWS[0]) - 1], atol=1e-4)
    # Of tokens that the client names, and of some that are drawn, at each place of the prompt.
    wanted = [[row, 7] for row in ROWS[0][1:]]
    named = types.TensorData(data=[one for pair in wanted for one in pair], dtype="int64", shape=[len(wanted), 2])
    more = sampler.sample(prompt, 1, params, target_prompt_logprobs=named, prompt_alt_tokens_k=3).result()
    assert more.target_prompt_logprobs is not None
    assert more.prompt_alt_tokens is not None
    table = torch.tensor(more.target_prompt_logprobs.data).view(len(wanted), 2)
    assert torch.allclose(table[:, 0], torch.tensor(answer.prompt_logprobs[1:]), atol=1e-4)
    last = recomputed(server, path, [*ROWS[0][:-1], 7])[-1]
    assert abs(float(table[-1, 1] - last)) <= 1e-4
    assert more.prompt_alt_tokens.tokens.shape == [len(wanted), 3]
    # Both samplers are answered, in any order, each by its own weights.
    again = base.compute_logprobs(prompt).result()
    assert again == pytest.approx(before, abs=1e-6)
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(answer.prompt_logprobs[1:], abs=1e-6)
    assert before[1:] != pytest.approx(answer.prompt_logprobs[1:], abs=1e-2)
    # The log-probabilities that the trainer compares with are the same.
    sequence = answer.sequences[0]
    whole = [*ROWS[0], *sequence.tokens]
    resumed = service.create_training_client_from_state(path).result()
    masked = [0.0] * (len(ROWS[0]) - 1)
    data = [datum(whole, logprobs=masked + sequence.logprobs, advantages=masked + [1.0] * 12)]
    ratio = resumed.forward(data, "importance_sampling").result().metrics["loss:sum"]
    assert ratio == pytest.approx(-12.0, abs=1e-3)


def texts_and_tokens_end_samples(server: Served, service: tinker.ServiceClient) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(server.model / "tokenizer.json"))
    sampler = service.create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(ROWS[0])
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5, stop=[])
    (plain,) = sampler.sample(prompt, 1, params).result().sequences
    assert len(plain.tokens) == 24
    stop = plain.tokens[9]
    first = plain.tokens.index(stop)
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5, stop=[stop])
    (ended,) = sampler.sample(prompt, 1, params).result().sequences
    assert (ended.tokens, ended.stop_reason) == (plain.tokens[: first + 1], "stop")
    text = tokenizer.decode(plain.tokens[6:8], skip_special_tokens=False)
    lengths = [end for end in range(1, 25) if text in tokenizer.decode(plain.tokens[:end], skip_special_tokens=False)]
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5, stop=[text])
    (ended,) = sampler.sample(prompt, 1, params).result().sequences
    assert (ended.tokens, ended.stop_reason) == (plain.tokens[: lengths[0]], "stop")
    assert len(ended.logprobs) == len(ended.tokens)


def adapters_are_exported_for_peft(server: Served, service: tinker.ServiceClient) -> None:
    """By the calls of the SDK, and by its command, which loads a saved state to export it."""
    client = service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    trained(client, 2)
    path = client.save_state("two").result().path
    exported = client.save_weights_external("out", ttl_seconds=7200).result().path
    assert exported == path.replace("weights/two", "external_weights/out")
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    answer = rest.get_external_weights_urls(exported).result()
    assert set(answer.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    with tempfile.TemporaryDirectory() as folder:
        for name, url in answer.urls.items():
            urllib.request.urlretrieve(url, f"{folder}/{name}")  # without a key
            for wrong in (url[:-1] + ("0" if url[-1] != "0" else "1"), url.replace("expires=", "expires=9")):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(wrong)
        expected = recomputed(server, path, ROWS[0])
        assert torch.equal(_by_peft(server, folder, ROWS[0]), expected)
        # Merged, the output layer has weights of its own: that is the model that engines have.
        merged = _by_peft(server, folder, ROWS[0], merged_into=server.output / "engines_model")
        assert torch.allclose(merged, expected, atol=1e-4)
        command = [f"{sys.prefix}/bin/tinker", "checkpoint", "download", path, "--output", folder]
        environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (downloaded,) = [one for one in Path(folder).iterdir() if one.is_dir()]
        assert torch.equal(_by_peft(server, str(downloaded), ROWS[0]), recomputed(server, path, ROWS[0]))
    # What the command had exported is gone.
    listed = [one for one in rest.list_user_checkpoints().result().checkpoints if "external" in one.tinker_path]
    assert [(one.tinker_path, one.checkpoint_type) for one in listed] == [(exported, "external")]
    assert listed[0].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(exported, None).result()
    assert rest.list_checkpoints(exported.split("/")[2]).result().checkpoints[0].expires_at is None
    rest.delete_checkpoint_from_tinker_path(exported).result()
    with pytest.raises(Exception, match="there is no saved state"):
        rest.get_external_weights_urls(exported).result()
    with pytest.raises(Exception, match="does not encrypt"):
        client.save_weights_external("sealed", age_encryption_recipients=["age1x"]).result()


KEPT = "kept.json"
"""What is remembered from the first server to the second."""


def states_are_saved(server: Served, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    trained(client, 3)
    path = client.save_state("three", ttl_seconds=3600).result().path
    expected = trained(client, 2)
    sampler = client.save_weights_for_sampler("five").result().path
    kept = {"path": path, "losses": expected, "sampler": sampler, "tokens": _sampled(service, sampler)}
    (server.output / KEPT).write_text(json.dumps(kept), encoding="utf-8")


def states_are_there(server: Served, service: tinker.ServiceClient) -> None:
    """Of a server that was killed since."""
    kept = json.loads((server.output / KEPT).read_text(encoding="utf-8"))
    path, sampler = kept["path"], kept["sampler"]
    with pytest.raises(Exception, match="there is no saved state"):
        service.create_training_client_from_state(path.replace("three", "four")).result()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert trained(resumed, 2) == pytest.approx(kept["losses"], rel=1e-5)
    assert _sampled(service, sampler) == kept["tokens"]
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    assert {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints} == {path, sampler}
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    assert {one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints} == {path}
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    runs = rest.list_training_runs().result().training_runs
    assert path.split("/")[2] in {one.training_run_id for one in runs}


PENDING = "pending"
"""File that says that a call of each kind is at the server, and unanswered."""
TRAINING = {"create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "save_sampler_weights"}
KINDS = TRAINING | {"asample"}


def calls_of_a_killed_server_fail(server: Served, service: tinker.ServiceClient) -> None:
    """The server is killed and started again by the test once a call of each kind waits, behind a long one."""
    clients = [service.create_lora_training_client(base_model="tiny", rank=2, seed=seed).result() for seed in range(5)]
    trained(clients[0], 2)
    path = clients[0].save_state("before").result().path
    expected = trained(clients[0], 1)
    (server.output / KEPT).write_text(json.dumps({"path": path, "losses": expected}), encoding="utf-8")
    sampler = service.create_sampling_client(model_path=path).result()
    long = clients[0].forward_backward([datum([5 + place % 90 for place in range(500)])] * 1500, "cross_entropy")
    while "forward_backward" not in [one["running"] for one in _status(server)["models"]]:
        time.sleep(0.02)
    prompt, params = types.ModelInput.from_ints(ROWS[0]), types.SamplingParams(max_tokens=6)
    calls = {
        "forward_backward": long,
        "optim_step": clients[1].optim_step(ADAM),
        "save_weights": clients[2].save_state("never"),
        "save_sampler_weights": clients[3].save_weights_for_sampler("never"),
        "snapshot": clients[4].save_weights_and_get_sampling_client(),
        "create_model": service.create_lora_training_client(base_model="tiny", rank=2),
        "load_weights": service.create_training_client_from_state(path),
        "asample": sampler.sample(prompt, 1, params),
    }
    while set(_status(server)["queue"]) != KINDS:
        assert not long.future().done(), "it was too short"
        time.sleep(0.02)
    (server.output / PENDING).touch()
    for name, call in calls.items():
        with pytest.raises(Exception, match=r"Promise expired|not known"):
            call.result(timeout=150)
        print(f"{name} failed {time.time() - (server.output / PENDING).stat().st_mtime:.1f} s after the kill")


def what_was_saved_before_the_kill_is_there(server: Served, service: tinker.ServiceClient) -> None:
    kept = json.loads((server.output / KEPT).read_text(encoding="utf-8"))
    resumed = service.create_training_client_from_state_with_optimizer(kept["path"]).result()
    assert trained(resumed, 1) == pytest.approx(kept["losses"], rel=1e-5)
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    assert [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints] == [kept["path"]]


def a_full_disk_is_named(server: Served, service: tinker.ServiceClient) -> None:
    """`output` is a small disk of its own."""
    client = service.create_lora_training_client(base_model="tiny", rank=4).result()
    trained(client, 1)
    path = client.save_state("one").result().path
    filled = server.output / "filled"
    with filled.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(Exception, match=r"/two cannot be written: .*make room on the server's disk"):
            save("two").result()
    with pytest.raises(Exception, match=r"cannot be written: .*make room"):
        client.save_weights_and_get_sampling_client().result()
    losses = trained(client, 1)  # it trains on, and what was saved loads
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert trained(resumed, 1) == pytest.approx(losses, rel=1e-5)
    filled.unlink()
    assert client.save_state("two").result().path.endswith("/two")
    assert len(_sampled(service, client.save_weights_for_sampler("two").result().path)) == 6


def _status(server: Served) -> dict[str, Any]:
    request = urllib.request.Request(f"{server.url}/status", headers={"X-API-Key": KEY})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.loads(answer.read()))


def _sampled(service: tinker.ServiceClient, path: str) -> list[int]:
    sampler = service.create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints(ROWS[0]), 1, params).result().sequences
    return list(sequence.tokens)


def what_users_get_wrong_is_a_result_and_the_client_goes_on(server: Served, service: tinker.ServiceClient) -> None:
    for arguments, words in (
        ({"base_model": "gpt-9"}, "base_model 'gpt-9' is not served here; served: tiny, owner/alias,"),
        ({"base_model": "tiny", "rank": 4096}, "rank is 4096; this server takes 1 to 128"),
    ):
        with pytest.raises(Exception, match=words):
            service.create_lora_training_client(**arguments).result()
    client = service.create_lora_training_client(base_model="tiny", rank=2).result()
    for data, loss, words in (
        ([datum([5, 6])], "stable_reinforce", "formula is not public"),
        ([datum([5, 6])], "ppo", "lacks"),
        ([datum([5, 100_000])], "cross_entropy", "the id 100000"),
        ([datum([5] * 600)], "cross_entropy", "at most 512"),
    ):
        with pytest.raises(Exception, match=words):
            client.forward_backward(data, loss).result()
        with pytest.raises(Exception, match="gradients are not those of all its data"):
            client.optim_step(ADAM).result()
    assert trained(client, 1)[0] > 0.0
    with pytest.raises(Exception, match="cannot be used"):
        client.save_state("a b").result()


def weights_that_overflow_are_left_as_the_message_says(server: Served, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(base_model="tiny", rank=2).result()
    trained(client, 2)
    path = client.save_state("sound").result().path
    expected = trained(client, 1)
    client.forward_backward([datum(ROWS[0])], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e30)).result()
    with pytest.raises(Exception, match="not finite") as refused:
        client.forward_backward([datum(ROWS[0])], "cross_entropy").result()
    said = re.search(r"\(service_client\.(\w+)\(path\)\)", str(refused.value))
    assert said is not None
    continued = getattr(service, said[1])(path).result()
    assert trained(continued, 1) == pytest.approx(expected, rel=1e-5)


def a_killed_engine_is_started_again(server: Served, service: tinker.ServiceClient) -> None:
    before = _sampled_by_name(service)
    for name in ("engine_0", "engine_1"):
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs(pid, server.output / "configs", name)]
        assert len(pids) == 1
        os.kill(int(pids[0]), signal.SIGKILL)
    assert _sampled_by_name(service) == before


def _runs(pid: str, configs: Path, name: str) -> bool:
    try:
        return f"{configs / name}.toml".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _sampled_by_name(service: tinker.ServiceClient) -> list[int]:
    sampler = service.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    (sequence,) = sampler.sample(types.ModelInput.from_ints(ROWS[0]), 1, params).result().sequences
    return list(sequence.tokens)


def run(name: str, server: Served) -> str | None:
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY, user_metadata={"who": "test"}) as service:
            globals()[name](server, service)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 (reported)
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    url, output, model, *names = sys.argv[1:]
    one = Served(url, Path(output), Path(model))
    print(json.dumps({name: run(name, one) for name in names}))
    # Without waiting for the SDK's threads.
    sys.stdout.flush()
    os._exit(0)
