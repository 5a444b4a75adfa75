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
from primerl.models.tiny import TinyConfig
from primerl.train.settings import ConfigError, TrainerConfig
from primerl.train.sft_settings import SFTConfig

TRAINER: dict[str, Any] = {
    "output_dir": "out",
    "orchestrator_url": "http://127.0.0.1:1",
    "max_steps": 3,
    "model": {"path": "m"},
}
SFT: dict[str, Any] = {"output_dir": "out", "max_steps": 3, "model": {"tiny": {}}, "data": {"path": "d"}}


def test_defaults_and_values() -> None:
    config = TrainerConfig.from_dict(
        {**TRAINER, "optim": {"lr": 1, "betas": [0.8, 0.9]}, "weights": {"keep_all": True}}
    )
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.optim.betas == (0.8, 0.9)
    assert config.weights.keep_all
    assert config.loss.type == "dppo"


def test_tiny_model_from_a_table() -> None:
    assert SFTConfig.from_dict(SFT).model.tiny == TinyConfig()
    assert SFTConfig.from_dict({**SFT, "model": {"tiny": {"hidden_size": 32}}}).model.tiny == TinyConfig(hidden_size=32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim": {"learning_rate": 1e-3}}, "unknown setting `optim.learning_rate`; known here: args, betas"),
        ({"wandb": {}}, "unknown setting `wandb`"),
        ({"max_steps": "3"}, "max_steps is '3'; it must be of type int"),
        ({"max_steps": True}, "max_steps is True"),
        ({"max_steps": 0}, "max_steps is 0; it must be at least 1"),
        ({"peak_tflops": 0}, "peak_tflops is 0.0; it must be above 0"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of 'float32', 'bfloat16'"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas"),
        ({"optim": {"lr": 0}}, "optim.lr is 0.0; it must be above 0"),
        ({"weights": {"keep_last": 1}}, "weights.keep_last is 1"),
        ({"loss": {"type": "ppo"}}, "loss.type is 'ppo'; it must be one of 'cispo', 'clip', 'dppo', 'gspo', 'icepop'"),
        ({"loss": {"args": {"mask_lo": 0.1}}}, "unknown setting `loss.args.mask_lo`; known here: kl_tau, mask_high"),
        ({"loss": {"args": {"mask_low": -0.1}}}, "loss.args.mask_low is -0.1"),
        ({"loss": {"args": {"kl_tau": float("nan")}}}, "loss.args.kl_tau is nan"),
        ({"loss": {"args": {"kl_tau": "1e-3"}}}, "loss.args.kl_tau is '1e-3'; it must be of type float"),
        ({"loss": {"type": "clip", "args": {"dual_clip": 0.5}}}, "loss.args.dual_clip is 0.5; it must be above 1"),
        ({"loss": {"type": "clip", "args": {"clip_low": 1.5}}}, "loss.args.clip_low is 1.5"),
        ({"loss": {"type": "icepop", "args": {"min_ratio": 2.0}}}, "loss.args.min_ratio is 2.0"),
        ({"loss": {"type": "importance", "args": {"max_ratio": -1}}}, "loss.args.max_ratio is -1.0"),
        ({"loss": {"type": "clip", "custom": "a:b"}}, "loss.custom and loss.type ('clip') are both set"),
        ({"loss": {"custom": "no function"}}, "must be like package.module:function"),
        ({"loss": {"rl_weight": 0}}, "nothing is trained"),
        ({"loss": {"rl_weight": 0, "ce_weight": 1, "entropy_weight": 0.1}}, "loss.entropy_weight is set"),
        ({"loss": {"ref_kl_weight": float("nan")}}, "loss.ref_kl_weight is nan"),
        ({"optim": {"type": "adam"}}, "optim.type is 'adam'; it must be one of 'adamw', 'muon', 'sgd'"),
        ({"optim": {"type": "sgd", "args": {"nesterov": True}}}, "optim.args.nesterov is true, but momentum is 0"),
        ({"optim": {"type": "muon", "args": {"momentum": 1}}}, "optim.args.momentum is 1.0"),
        ({"optim": {"weight_decay_by_name": {"*": -1}}}, "optim.weight_decay_by_name.* is -1.0"),
        ({"optim": {"weight_decay_by_name": 1}}, "optim.weight_decay_by_name is 1; it must be a table"),
        ({"optim": {"schedule": "wsd", "decay_steps": 0}}, "optim.decay_steps is 0"),
        ({"dist_timeout_s": 1e30}, "dist_timeout_s is 1e+30; it must be from 1 to 31536000 (a year)"),
        ({"dist_timeout_s": 1e-9}, "dist_timeout_s is 1e-09; it must be from 1 to"),
        ({"dist_timeout_s": float("nan")}, "dist_timeout_s is nan; it must be from 1 to"),
        ({"environments": "a"}, "environments is 'a'; it must be a list"),
        ({"model": "m"}, "model: expected a table"),
    ],
)
def test_trainer_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.from_dict({**TRAINER, **change})
    assert message in str(caught.value)


def test_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"missing setting `model\.path`"):
        TrainerConfig.from_dict({**TRAINER, "model": {}})


@pytest.mark.parametrize("model", [{}, {"path": "m", "tiny": {}}])
def test_sft_wants_exactly_one_model(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either `path`"):
        SFTConfig.from_dict({**SFT, "model": model})


def test_the_package_names_all_its_modules() -> None:
    """For a newcomer, who reads it from there."""
    (folder,) = map(Path, primerl.train.__path__)
    named = re.findall(r"`(\w+)/?`", primerl.train.__doc__ or "")
    there = {path.stem for path in folder.iterdir() if path.name != "__init__.py" and not path.name.startswith("__")}
    assert there <= {*named}, there - {*named}


def test_training_imports_little() -> None:
    """A machine that only trains has torch, transformers and these; the one exception is imported where it is used."""
    own = ("run_key", "extras", "net.prometheus", "net.addresses", "process.imports", "process.rank_variables")
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
        "import sys; from primerl.train import losses, optimizers; losses.options('clip', {'clip_low': 0.1}); "
        "optimizers.options('muon', {}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0
