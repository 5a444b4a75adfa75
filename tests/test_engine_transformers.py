"""The embedded engine over `transformers`: every family that is trained, against `transformers` alone, in float32."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_helpers import Engine, start_many, step, wait_until, whole_vocabulary, write_checkpoint
from families import FAMILIES
from hub_folders import write_hub_folder
from primerl import _core
from primerl.evals.checkpoint import publish
from primerl.inference.backend import UnservableError
from primerl.inference.settings import InferenceConfig
from primerl.inference.torch.backend import engine_settings
from primerl.inference.transformers import kernels
from primerl.inference.transformers.backend import TransformersBackend
from primerl.inference.transformers.cache import Rows, RowsCache
from primerl.inference.transformers.kernels import OF_ONE_TOKEN
from primerl.inference.transformers.step import CachedBackend
from primerl.train.distributed.ranks import ALONE
from primerl.train.model import recurrent
from primerl.train.model.families import NOT_CACHED
from primerl.train.model.packed_model import load_model
from primerl.train.model.recurrent import TOLD
from primerl.train.weights.shards import by_file, plan, shares
from primerl.verify.weights import Weights
from safetensors.torch import load_file
from settings_helpers import filled
from transformers import AutoModelForCausalLM

Folders = Callable[..., Path]

SHORT = (
    # Each remembers, attends or scales in its own way.
    *("gemma2", "gemma3n_text", "gpt_oss", "kimi_linear", "lfm2", "llama4_text", "mamba2"),
    *("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "deepseek_v3"),
)
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name not in (*SHORT, *NOT_CACHED)]
STATED = "qwen3_5_text"
CLOSE = {"zamba2": 1e-3}
"""Largest difference of log-probabilities where a family's own scan rounds more than others."""


def backend_of(folder: Path, **changes: Any) -> CachedBackend:
    return CachedBackend(folder, **{"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, **changes})


class Reference:
    """`transformers` without a cache, one sequence at a time."""

    def __init__(self, folder: Path, tolerance: float = 1e-4) -> None:
        # Other implementations of attention leave out caps of scores.
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self.tolerance = tolerance

    def check(self, sampled: Any, prefixes: list[list[int]]) -> None:
        found = whole_vocabulary(sampled, len(prefixes))
        for row, prefix in zip(found, prefixes, strict=True):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([prefix]), use_cache=False).logits[0, -1].float()
            torch.testing.assert_close(row, logits.log_softmax(-1), rtol=0, atol=self.tolerance)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of GPT-BigCode
@pytest.mark.parametrize("family", [*SHORT, *OTHERS])
def test_logprobs_equal_transformers(family: str, folders: Folders) -> None:
    """Prompts of several lengths, one of them in parts, longer than any window or chunk; single tokens of sequences at
    several places; a slot that is used again."""
    folder = folders(family)
    backend, reference = backend_of(folder), Reference(folder, CLOSE.get(family, 1e-4))
    words = backend.decoder.vocab_size
    generator = torch.Generator().manual_seed(2)
    one, two, three, four = (torch.randint(words, (n,), generator=generator).tolist() for n in (5, 40, 17, 100))

    reference.check(step(backend, [(0, 0, one), (1, 0, two), (2, 0, three)], [3], words), [one, two, three])
    step(backend, [(3, 0, four[:60])], [1])
    parts = [(0, 5, [7]), (2, 17, [8]), (3, 60, four[60:])]
    reference.check(step(backend, parts, [2, 1], words), [[*one, 7], [*three, 8], four])
    parts = [(0, 6, [3]), (3, 100, [5])]
    reference.check(step(backend, parts, [2], words), [[*one, 7, 3], [*four, 5]])
    parts = [(0, 0, three), (1, 40, [9]), (2, 0, three)]
    reference.check(step(backend, parts, [1, 1, 1], words), [three, [*two, 9], three])


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "qwen3_5_moe_text"])
def test_new_weights_are_those_that_were_published(family: str, folders: Folders, tmp_path: Path) -> None:
    folder = folders(family)
    trained = load_model(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    (tensors,) = by_file(shares(trained, ALONE, plan(trained, ALONE))).values()
    backend = backend_of(folder)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == dict(backend.info()["tensors"])
    manifest = write_checkpoint(tmp_path / "step_1", tensors, 1)
    assert backend.digest() != manifest["digest"]
    for name, tensor in tensors.items():
        backend.load_tensor(name, "F32", bytearray(tensor.numpy().tobytes()))
    backend.weights_changed()
    assert backend.digest() == manifest["digest"]
    trained.save_pretrained(tmp_path / "model")
    words = backend.decoder.vocab_size
    Reference(tmp_path / "model").check(step(backend, [(0, 0, [5, 6, 7])], [1], words), [[5, 6, 7]])
    # The very memory that it computes with.
    with torch.no_grad():
        next(backend.decoder.model.parameters()).view(-1)[0] += 1
    assert backend.digest() != manifest["digest"]


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "gpt-oss-20b"])
def test_a_checkpoint_of_the_hub_is_evaluated(name: str, tmp_path: Path) -> None:
    """Vision tower, MTP layers, and experts in MXFP4 are in the folder, and not in the engine."""
    folder = write_hub_folder(tmp_path / "model", name)
    manifest = publish(folder, tmp_path, trained_only=TransformersBackend.holds_trained_only)
    published = json.loads(manifest.read_text())
    tensors = load_file(manifest.parent / "model.safetensors")
    backend = backend_of(folder)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == dict(backend.info()["tensors"])
    for name, tensor in tensors.items():
        backend.load_tensor(name, "F32", bytearray(tensor.numpy().tobytes()))
    assert backend.digest() == published["digest"]


def test_a_state_that_is_not_kept_is_found(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowsCache, "keep", lambda self: None)
    with pytest.raises(
        UnservableError, match=r"model\.path: .*in parts differ from those computed at once.*serve this model with vLLM"
    ):
        backend_of(folders(STATED))


@pytest.fixture
def with_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """As where packages for GPUs are installed: `transformers` calls them for any tensor, and they fail here."""

    def install(family: str) -> None:
        home = import_module(f"transformers.models.{family}.modeling_{family}")
        replaced = 0
        for name in (*TOLD, *OF_ONE_TOKEN):
            if hasattr(home, name):
                in_torch = inspect.unwrap(getattr(home, name))

                @wraps(in_torch)
                def of_a_package(*_: Any, **__: Any) -> Any:
                    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

                monkeypatch.setattr(home, name, of_a_package)
                replaced += 1
        assert replaced >= 4

    return install


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next"])
def test_packages_for_gpus_are_left_alone_on_a_cpu_and_in_fp32(
    family: str,
    on_gpu: bool,
    folders: Folders,
    with_packages: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_packages(family)
    for module in (recurrent, kernels):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: on_gpu)
    folder = folders(family)
    words = (backend := backend_of(folder)).decoder.vocab_size
    found = [step(backend, [(0, 0, [5, 6, 7])], [1], words), step(backend, [(0, 3, [8])], [1], words)]
    monkeypatch.undo()
    for sampled, prefix in zip(found, ([5, 6, 7], [5, 6, 7, 8]), strict=True):
        Reference(folder).check(sampled, [prefix])


def test_verify_leaves_packages_for_gpus_alone(
    folders: Folders, tmp_path: Path, with_packages: Callable[[str], None]
) -> None:
    """It computes in fp32, on whatever there is."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "step_0").symlink_to(folders("qwen3_next"))
    publish(folders("qwen3_next"), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(folders("qwen3_next"), dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = expected(input_ids=ids).logits
        with_packages("qwen3_next")
        found = Weights(tmp_path).load(0)(input_ids=ids).logits
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)


def test_a_token_that_sees_too_much_is_found(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(self: Rows, keys: int, window: int | None, chunk: int | None) -> torch.Tensor | None:
        return None if self.begins else torch.ones(len(self.slots), 1, self.length, keys, dtype=torch.bool)

    monkeypatch.setattr(Rows, "mask", everything)
    with pytest.raises(UnservableError, match="in parts differ from those computed at once"):
        backend_of(folders("qwen3_moe"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 300}, "max_model_len: 300 is more than the model's 128 positions"),
        ({"device": "cuda:77"}, "device: "),
    ],
)
def test_settings_that_cannot_be_served_are_named(folders: Folders, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend_of(folders("qwen3_moe"), **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json does not exist; give the folder of a model"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"model_type": "falcon_mamba"}', "the scan of its Mamba-1 layers"),
        ('{"model_type": "hrm_text"}', "serve this model with vLLM"),
        ('{"model_type": "of_mine", "auto_map": {"AutoConfig": "c.C"}}', "run no code that comes with a model"),
        ('{"model_type": "qwen3_moe", "quantization_config": {}}', ""),
        ('{"model_type": "qwen3_moe", "quantization_config": {"bits": 4}}', "its weights are quantised"),
    ],
)
def test_models_are_judged_by_their_config(config: str | None, message: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    if not message:
        TransformersBackend().check_model(tmp_path, None)
        return
    with pytest.raises(UnservableError, match=message):
        TransformersBackend().check_model(tmp_path, None)


@pytest.fixture
def engine(folders: Folders) -> Iterator[Engine]:
    """In this process: a model whose layers carry a state, with 2 slots."""
    folder = folders(STATED, max_position_embeddings=1024)
    settings = filled(InferenceConfig, model={"path": str(folder), "name": "m"}, max_model_len=1024, max_num_seqs=2)
    backend = backend_of(folder, max_model_len=1024, max_num_seqs=2)
    server = _core.InferenceEngine(engine_settings(settings, 1024), backend, host="127.0.0.1", port=0)
    found = Engine.__new__(Engine)
    found.kind, found.url, found.model = "transformers", server.url, folder
    found.client = httpx.Client(base_url=server.url, timeout=60.0)
    yield found
    found.client.close()
    server.stop()


def test_cancelled_requests_leave_their_slots_to_others(engine: Engine) -> None:
    sampling = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "seed": 4}
    alone = engine.generate([3, 4, 5], **sampling)["choices"][0]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            cancelled = start_many(engine, pool, 2)
            assert engine.post("/abort_requests").json() == {"status": "aborted", "aborted": 2}
            ends = {answer.result()["choices"][0]["finish_reason"] for answer in cancelled}
            assert ends == {"abort"}
            wait_until(lambda: engine.running() == 0, "no running requests")
            assert engine.metric("vllm:kv_cache_usage_perc") == 0
            again = engine.generate([3, 4, 5], **sampling)["choices"][0]
            assert again["token_ids"] == alone["token_ids"]
            assert json.dumps(again["logprobs"]) == json.dumps(alone["logprobs"])
