"""The forms of config there are: which command reads which class, for help, `primerl config` and the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

    from primerl.config.describe.fields import Table

ALL = "all processes"
LAUNCHER = "the launcher"
PYTHON = "the launcher, which starts the env workers with it"
# By the longest beginning of the path.
RL_READERS = {
    "": LAUNCHER,
    "output_dir": ALL,
    "max_steps": "the orchestrator and the trainer",
    "seq_len": "the orchestrator; the engines, where inference.max_model_len is unset",
    "seed": ALL,
    "keep_broadcasts": "the orchestrator and the trainer",
    "model.path": "the orchestrator, the engines and the trainer",
    "model.name": "the orchestrator and the engines",
    "ckpt": "the trainer",
    "ckpt.resume_step": "the launcher, which goes back to that step before it starts the trainer",
    "trainer.ckpt.resume_step": "the launcher, which goes back to that step before it starts the trainer",
    "log": ALL,
    "env_files": "the env workers, as variables",
    "tailscale": "the env workers",
    "store": "the process that uploads",
    "wandb": "the monitor",
    "monitors": "the monitor",
    "monitor": "the monitor",
    "trainer.wandb": "the monitor",
    "orchestrator.wandb": "the monitor",
    "orchestrator.prime_monitor": "the monitor",
    "trainer": "the trainer",
    "orchestrator": "the orchestrator",
    "orchestrator.log.vf_level": "the env workers",
    "inference": "the engines",
    "inference.replicas": LAUNCHER,
    "inference.python": "the launcher, which starts vLLM with it",
    **{
        f"orchestrator.{role}.env.{name}": reader
        for role in ("train", "eval")
        for name, reader in {
            "id": "the orchestrator and the env workers",
            "name": "the orchestrator and the env workers",
            "taskset": "the env workers",
            "harness": "the env workers",
            "args": "the env workers",
            "system_prompt": "the env workers",
            "system_prompt_file": LAUNCHER,
            "limits": "the orchestrator and the env workers",
            "max_concurrent": "the env workers",
            "memory_mb": "the env workers",
            "metrics_port": "the env workers",
            "cpus": "the env workers",
            "num_workers": LAUNCHER,
            "python": PYTHON,
        }.items()
    },
    "orchestrator.train.env.held_out": "the env workers",
}

EVAL_READERS = {
    "": "the orchestrator",
    "output_dir": ALL,
    "seed": "the engine and the env workers",
    "env": "the env workers",
    **dict.fromkeys(
        (
            *("env.num_examples", "env.rollouts_per_example", "env.max_tokens", "env.temperature"),
            *("env.pass_threshold", "env.rollout_max_tokens", "env.rollout_s"),
        ),
        "the orchestrator",
    ),
    "env.num_workers": LAUNCHER,
    "env.system_prompt_file": LAUNCHER,
    "env.python": PYTHON,
    "env_files": "the env workers, as variables",
    "inference": "the engine",
    "served_name": "the orchestrator and the engine",
    **dict.fromkeys(("clean_output_dir", "retry_errors", "dry_run", "fork_server", "restarts"), LAUNCHER),
    "inference.replicas": LAUNCHER,
}


@dataclass(frozen=True, slots=True)
class Form:
    """A class of config, and the command that reads it."""

    command: str
    """`primerl rl`"""
    location: str
    """`module:class`, imported when it is asked for."""
    readers: dict[str, str] = field(default_factory=dict)
    """Who reads what is below a path; without any, the command's own process."""
    most_used: tuple[str, ...] = ()
    """Paths that `--help` shows, in this order."""
    called: str = ""
    """Tells the forms of one command apart: `short form`."""
    help_by: str = ""
    """The command that shows the help of such a form."""
    flags: str = ""
    """What its usage has besides keys."""

    @property
    def title(self) -> str:
        return f"{self.command}, {self.called}" if self.called else self.command

    @property
    def cls(self) -> type[BaseModel]:
        module, name = self.location.split(":")
        found: type[BaseModel] = getattr(import_module(module), name)
        return found

    def read_by(self, path: str) -> str:
        from primerl.config.describe.fields import plain_path

        parts = plain_path(path).split(".")
        beginnings = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        return next((self.readers[start] for start in beginnings if start in self.readers), f"`{self.command}`")


FORMS: dict[str, Form] = {
    "rl": Form(
        "primerl rl",
        "primerl.config.schema.rl:RLConfig",
        RL_READERS,
        (
            "output_dir",
            "max_steps",
            "seq_len",
            "model.path",
            "ckpt.interval",
            "ckpt.resume_step",
            "trainer.optim.lr",
            "trainer.loss.type",
            "trainer.model.lora.rank",
            "orchestrator.batch_size",
            "orchestrator.group_size",
            "orchestrator.max_async_level",
            "orchestrator.max_off_policy_steps",
            "orchestrator.training_mode",
            "orchestrator.sampling.max_tokens",
            "orchestrator.sampling.temperature",
            "orchestrator.train.env[].id",
            "orchestrator.train.env[].num_workers",
            "inference.backend",
            "inference.replicas",
            "clean_output_dir",
            "dry_run",
        ),
        flags=" [--plan [--json]]",
    ),
    "sft": Form(
        "primerl sft",
        "primerl.config.schema.sft:SFTConfig",
        {},
        (
            "output_dir",
            "max_steps",
            "model.path",
            "model.lora.rank",
            "data.path",
            "data.batch_size",
            "data.seq_len",
            "data.epochs",
            "val.interval",
            "val.data.path",
            "optim.lr",
            "optim.schedule",
            "ckpt.interval",
            "ckpt.resume_step",
            "ranks",
            "clean_output_dir",
            "dry_run",
        ),
    ),
    "hosted": Form(
        "primerl rl",
        "primerl.config.hosted.schema:HostedConfig",
        {"": LAUNCHER},
        called="short form",
        help_by="primerl rl @ SHORT_FORM.toml --help",
    ),
    "eval": Form(
        "primerl eval",
        "primerl.config.schema.evaluation:EvalConfig",
        EVAL_READERS,
        (
            "model",
            "base_url",
            "api_key_env",
            "env[].id",
            "num_examples",
            "rollouts_per_example",
            "max_tokens",
            "temperature",
            "concurrency",
            "output_dir",
            "clean_output_dir",
            "retry_errors",
            "dry_run",
        ),
    ),
    "gepa": Form(
        "primerl gepa run",
        "primerl.config.schema.gepa:GepaConfig",
        {**EVAL_READERS, "": LAUNCHER, "served_name": "the orchestrator and the engine"},
        (
            "model",
            "base_url",
            "api_key_env",
            "reflection_model",
            "reflection_base_url",
            "env[].id",
            "initial_prompt",
            "gepa.max_calls",
            "gepa.num_train",
            "gepa.num_val",
            "gepa.minibatch_size",
            "gepa.perfect_score",
            "gepa.state_columns",
            "gepa.max_concurrent",
            "max_tokens",
            "temperature",
            "output_dir",
            "clean_output_dir",
            "dry_run",
        ),
    ),
    "serve": Form("primerl serve --tinker", "primerl.config.schema.serve:ServeConfig"),
    "trainer": Form("primerl trainer", "primerl.config.schema.trainer:TrainerConfig"),
    "orchestrator": Form(
        "primerl orchestrator",
        "primerl.config.schema.orchestrator:OrchestratorConfig",
        {},
        (
            "output_dir",
            "max_steps",
            "seq_len",
            "model.path",
            "host",
            "port",
            "batch_size",
            "group_size",
            "max_async_level",
            "max_off_policy_steps",
            "sampling.max_tokens",
            "train.env[].id",
            "engines",
            "log.level",
        ),
    ),
    "inference": Form("primerl inference", "primerl.config.schema.inference_run:InferenceRunConfig"),
    "env-worker": Form("primerl env-worker", "primerl.config.schema.env_worker:EnvWorkerConfig"),
    "env-worker-join": Form(
        "primerl env-worker",
        "primerl.config.schema.env_worker:JoinConfig",
        {},
        ("join", "env", "workers", "wait_s", "env_files", "log_dir"),
        called="joining a run elsewhere",
        help_by="primerl env-worker --join --help",
    ),
    "simulate": Form("primerl simulate", "primerl.config.schema.simulate:SimulateConfig"),
}


@cache
def tree(name: str) -> Table:
    """The whole tree of a form."""
    from primerl.config.describe.fields import table_of

    return table_of(FORMS[name].cls)


def form_of(cls: Any) -> str | None:
    """The name of the form that a config class is of, whose module is imported already."""
    return next((name for name, form in FORMS.items() if form.location == f"{cls.__module__}:{cls.__name__}"), None)
