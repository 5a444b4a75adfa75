"""Settings are read strictly: what is not understood is named, never ignored."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import primerl.train
import pytest
from primerl.config.process_files.files import resolved
from primerl.config.schema import trainer as schema
from primerl.models.tiny import TinyConfig
from primerl.process.setting_checks import from_mapping
from primerl.train.settings import TrainerConfig
from primerl.train.sft_settings import SFTConfig
from settings_helpers import filled, refusal
from test_train_loss import LOSSES

TRAINER: dict[str, Any] = {
    "output_dir": "out",
    "orchestrator_url": "http://127.0.0.1:1",
    "max_steps": 3,
    "model": {"path": "m"},
}
SFT: dict[str, Any] = {"output_dir": "out", "max_steps": 3, "model": {"tiny": {}}, "data": {"path": "d"}}


def test_defaults_and_values() -> None:
    optim = {"lr": 1, "betas": [0.8, 0.9]}
    config = filled(TrainerConfig, **TRAINER, optim=optim, weights={"keep_all": True})
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.optim.betas == (0.8, 0.9)
    assert config.weights.keep_all
    assert config.loss.type == "dppo"


def test_tiny_model_from_a_table() -> None:
    assert filled(SFTConfig, **SFT).model.tiny == TinyConfig()
    assert filled(SFTConfig, **SFT | {"model": {"tiny": {"hidden_size": 32}}}).model.tiny == TinyConfig(hidden_size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"learning_rate": 1e-3}}, "optim.learning_rate: unknown key"),
        ({"wandb": {}}, "wandb: unknown key"),
        ({"max_steps": "x"}, "max_steps: Input should be a valid integer"),
        ({"max_steps": True}, "max_steps is true or false, where a number is expected"),
        ({"max_steps": 0}, "max_steps: Input should be greater than 0 (it is 0)"),
        ({"peak_tflops": 0}, "peak_tflops: Input should be greater than 0 (it is 0)"),
        ({"dtype": "float16"}, "dtype: Input should be 'float32' or 'bfloat16' (it is 'float16')"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas"),
        ({"optim": {"lr": 0}}, "optim.lr: Input should be greater than 0 (it is 0)"),
        ({"weights": {"keep_last": 1}}, "weights.keep_last: Input should be greater than or equal to 2 (it is 1)"),
        ({"loss": {"type": "ppo"}}, f"type is 'ppo'; it must be one of {LOSSES}"),
        ({"loss": {"args": {"mask_lo": 0.1}}}, "unknown setting `args.mask_lo`; known here: kl_tau, mask_high"),
        ({"loss": {"args": {"mask_low": -0.1}}}, "args.mask_low is -0.1"),
        ({"loss": {"args": {"kl_tau": float("nan")}}}, "args.kl_tau is nan"),
        ({"loss": {"args": {"kl_tau": "x"}}}, "args.kl_tau: must be a number, not 'x'"),
        ({"loss": {"type": "clip", "args": {"dual_clip": 0.5}}}, "args.dual_clip is 0.5; it must be above 1"),
        ({"loss": {"type": "clip", "args": {"clip_low": 1.5}}}, "args.clip_low is 1.5"),
        ({"loss": {"type": "icepop", "args": {"min_ratio": 2.0}}}, "args.min_ratio is 2.0"),
        ({"loss": {"type": "importance", "args": {"max_ratio": -1}}}, "args.max_ratio is -1.0"),
        ({"loss": {"type": "clip", "custom": "a:b"}}, "custom and type are both set"),
        ({"loss": {"custom": "no function"}}, "loss.custom: String should match pattern"),
        ({"loss": {"rl_weight": 0}}, "nothing is trained"),
        ({"loss": {"rl_weight": 0, "ce_weight": 1, "entropy_weight": 0.1}}, "entropy_weight is set"),
        ({"loss": {"ref_kl_weight": float("nan")}}, "loss.ref_kl_weight: Input should be a finite number (it is nan)"),
        ({"optim": {"type": "adam"}}, "type is 'adam'; it must be one of 'adamw', 'muon', 'sgd'"),
        ({"optim": {"type": "sgd", "args": {"nesterov": True}}}, "args.nesterov is true, but momentum is 0"),
        ({"optim": {"type": "muon", "args": {"momentum": 1}}}, "args.momentum is 1.0"),
        (
            {"optim": {"weight_decay_by_name": {"*": -1}}},
            "optim.weight_decay_by_name.*: Input should be greater than or equal to 0",
        ),
        ({"optim": {"weight_decay_by_name": 1}}, "optim.weight_decay_by_name: a table is expected"),
        (
            {"optim": {"schedule": "wsd", "decay_steps": 0}},
            "optim.decay_steps: Input should be greater than 0 (it is 0)",
        ),
        ({"dist_timeout_s": 1e30}, "dist_timeout_s: Input should be less than or equal to 31536000 (it is 1e+30)"),
        ({"dist_timeout_s": 1e-9}, "dist_timeout_s: Input should be greater than or equal to 1 (it is 1e-09)"),
        ({"dist_timeout_s": float("nan")}, "dist_timeout_s: Input should be a finite number (it is nan)"),
        ({"environments": "a"}, 'environments: a list is expected; write ["a"]'),
        ({"model": "m"}, "model: a table is expected; write its keys below [model]"),
    ],
)
def test_trainer_refuses(change: dict[str, Any], message: str) -> None:
    assert message in refusal(TrainerConfig, {**TRAINER, **change})


@pytest.mark.parametrize("model", [{}, {"path": "m", "tiny": {}}])
def test_sft_wants_exactly_one_model(model: dict[str, Any]) -> None:
    assert "model: give either `path`" in refusal(SFTConfig, {**SFT, "model": model})


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("", {"steps": 1}, "unknown setting `steps`; known here: activation_checkpointing, batch_timeout_s, ckpt"),
        ("", {"max_steps": None}, "missing setting `max_steps`"),
        ("", {"max_steps": "3"}, "max_steps: must be a whole number, not '3'"),
        ("", {"max_steps": True}, "max_steps: must be a whole number, not True"),
        ("", {"dtype": "float16"}, "dtype: must be one of 'float32', 'bfloat16', not 'float16'"),
        ("", {"model": "m"}, "model: must be a table, not 'm'"),
        ("model", {"path": None}, "missing setting `model.path`"),
        ("optim", {"learning_rate": 1e-3}, "unknown setting `optim.learning_rate`; known here: args, betas"),
        ("optim", {"lr": None}, "missing setting `optim.lr`"),
        ("optim", {"betas": [0.9]}, "optim.betas: must be a list of 2 values, not [0.9]"),
        ("optim", {"weight_decay_by_name": {"*": "x"}}, "optim.weight_decay_by_name.*: must be a number, not 'x'"),
        ("log", {"level": "loud"}, "log.level: must be one of 'debug', 'info'"),
    ],
)
def test_a_resolved_file_has_every_key_of_the_right_kind(section: str, change: dict[str, Any], message: str) -> None:
    """Without the config library, on a machine that only trains. None: the key is left out."""
    values = resolved(schema.TrainerConfig, TRAINER)
    from_mapping(TrainerConfig, values)
    table = values[section] if section else values
    table.update(change)
    for name in [name for name, value in change.items() if value is None]:
        del table[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(TrainerConfig, values)


def test_what_may_be_none_is_none_where_it_is_left_out() -> None:
    config = filled(TrainerConfig, **TRAINER)
    assert (config.ckpt, config.dtype, config.metrics_port, config.optim.decay_steps) == (None, None, None, None)


def test_the_package_names_all_its_modules() -> None:
    """For a newcomer, who reads it from there."""
    (folder,) = map(Path, primerl.train.__path__)
    named = re.findall(r"`(\w+)/?`", primerl.train.__doc__ or "")
    there = {path.stem for path in folder.iterdir() if path.name != "__init__.py" and not path.name.startswith("__")}
    assert there <= {*named}, there - {*named}


def test_training_imports_little() -> None:
    """A machine that only trains has torch, transformers and these; the one exception is imported where it is used."""
    own = (
        "run_key",
        "net.prometheus",
        "net.addresses",
        "process.cuda",
        "process.extras",
        "process.import_path",
        "process.imports",
        "process.plugins",
        "process.problems",
        "process.rank_variables",
        "process.setting_checks",
        "process.signals",
        "process.user_cache",
    )
    allowed = {*sys.stdlib_module_names, "torch", "transformers", "safetensors", "msgpack", "xxhash"}
    allowed |= {"primerl.train", "primerl.models", "primerl.forking"}
    modules = {f"primerl.{name}" for name in own}
    found = set()
    folder = Path(primerl.train.__file__).parent
    files = [*sorted(folder.rglob("*.py")), *(folder.parent / f"{name.replace('.', '/')}.py" for name in own)]
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {(file.name, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                named = {f"{node.module}.{alias.name}" for alias in node.names} & modules
                found |= {(file.name, module) for module in named or {node.module or ""}}
    others = {
        (file, module)
        for file, module in found
        if module not in modules
        and module.split(".")[0] not in allowed
        and ".".join(module.split(".")[:2]) not in allowed
    }
    # Where they are used: the renderer, grammars, tables of rows, a bar on a terminal, adapters, Prometheus's metrics.
    assert others == {
        ("masks.py", "primerl.render"),
        ("grammar.py", "primerl._core"),
        ("batch.py", "numpy"),  # which transformers requires
        ("prefixes.py", "numpy"),
        ("sources.py", "datasets"),
        ("progress.py", "rich.progress"),
        ("lora.py", "peft"),
        ("metrics.py", "prometheus_client"),
        ("prometheus.py", "prometheus_client"),
    }


@pytest.mark.processes
def test_losses_and_optimizers_are_checked_without_torch() -> None:
    """The command line checks a config by these modules, and torch takes seconds to import."""
    program = (
        "import sys; from primerl.train import losses, optimizers; "
        "losses.REGISTRY.options('clip', {'clip_low': 0.1}, ''); "
        "optimizers.REGISTRY.options('muon', {}, ''); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
