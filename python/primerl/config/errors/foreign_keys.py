"""What prime-rl and Hosted Training call what has another name here, or is not here: with what to write.

By the dotted path of a key, without numbers of entries. For an unknown key the text follows `no key here`. For one that
means something else here (`model.name`), and for a value (`loss.type = default`), it is added to the message about the
place where it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Names = Mapping[str, str]

CHANGES_SAMPLING = "it changes what is sampled from, and the trainer would compute other log-probabilities"
SAMPLING = {
    "repetition_penalty": CHANGES_SAMPLING,
    "min_tokens": CHANGES_SAMPLING,
    "seed": "engines have the run's, seed",
    "temp_scheduler": "the temperature is constant",
}

MONITORS = {
    "monitors.wandb": "W&B is [wandb]; monitors of your own are [[monitors]]",
    "monitor.wandb": "W&B is [wandb]; monitors of your own are [[monitors]]",
}

# Keys of a trainer; `{}` stands for their section.
TRAINER = {
    "scheduler": "it is {}optim.schedule, with {}optim.warmup_steps, {}optim.decay_steps and {}optim.final_lr_ratio (a "
    "share of the peak)",
    "optim.betas1": "{}optim.betas has both",
    "optim.betas2": "{}optim.betas has both",
    "optim.momentum": "{}optim.args has the settings of the optimizer's module",
    "optim.nesterov": "{}optim.args has the settings of the optimizer's module",
    "optim.mu": "{}optim.args has the settings of the optimizer's module",
    "model.ac": "it is {}activation_checkpointing",
    "model.compile": "it is {}compile",
    "model.dp_replicate": "it is {}dp_replicate",
    "model.cp": "it is {}context_parallel, which has to be 1",
    "model.impl": "models are transformers' own",
    "model.attn": "it is found out, and proved, when the model is loaded",
    "model.optimization_dtype": "it is {}dtype, of the computation; weights are updated in float32",
    "model.reduce_dtype": "gradients are summed in float32",
    "model.lora.modules_to_save": "the base model is not trained together with an adapter",
    "dist_timeout_seconds": "it is {}dist_timeout_s",
    "tokenizer": "tokenizer and chat template are those of the model's folder",
    "renderer": "the model's own template is rendered",
    "ckpt.output_dir": "checkpoints are within output_dir",
}

PRIME_RL: Names = {
    **{f"trainer.{key}": reason.format(*["trainer."] * 4) for key, reason in TRAINER.items()},
    **{f"orchestrator.sampling.{key}": reason for key, reason in SAMPLING.items()},
    "orchestrator.sampling.extra_body": "chat_template_kwargs, top_k and min_p are keys of orchestrator.sampling; of "
    "other fields the trainer would have to know",
    "trainer.model.trust_remote_code": "it is model.trust_remote_code",
    "model.name": "the model is model.path; model.name is what environments call it",
    "tokenizer": TRAINER["tokenizer"],
    "weight_broadcast": "weights are sent as files, and from memory too with trainer.weights.transport",
    "deployment.num_train_gpus": "processes of the trainer are trainer.ranks",
    "deployment.num_infer_gpus": "engines of this machine are inference.replicas; other machines join "
    "(docs/recipes/several-machines.md)",
    "run": "a run is called by its folder, output_dir",
    "bench": "`primerl simulate` plans, and benches/ of the repository measure",
    "env_server_base_port": "env workers listen on no port",
    "orchestrator.rollouts_per_example": "it is orchestrator.group_size",
    "orchestrator.max_inflight_rollouts": "it is orchestrator.oversampling_factor, as a multiple of "
    "orchestrator.batch_size",
    "orchestrator.env": "environments are [[orchestrator.train.env]]",
    **MONITORS,
    "monitors.prime": "it is [orchestrator.prime_monitor]",
    "monitor.prime": "it is [orchestrator.prime_monitor]",
    "orchestrator.model": "the model is model.path; engines that run already are orchestrator.engines",
    "orchestrator.client": "engines that run already are orchestrator.engines",
    "orchestrator.models": "a teacher is orchestrator.teacher.client, with orchestrator.training_mode",
    "orchestrator.actor": "a teacher is orchestrator.teacher.client, with orchestrator.training_mode",
    "orchestrator.tokenizer": TRAINER["tokenizer"],
    "orchestrator.renderer": "the model's own template is rendered; orchestrator.parsers reads answers",
    "orchestrator.seq_len": "it is seq_len, of the whole run",
    "orchestrator.ckpt": "its state is in the run's checkpoints, ckpt",
    "orchestrator.algorithms": "it is orchestrator.algorithm, and of one environment its own `algorithm`",
    "orchestrator.advantage": "it is orchestrator.algorithm",
    "orchestrator.pre_batch_filters": "groups without signal are dropped by "
    "orchestrator.buffer.online_difficulty_filtering; orchestrator.algorithm.path may give a rollout no advantage",
    "orchestrator.post_batch_filters": "groups without signal are dropped by "
    "orchestrator.buffer.online_difficulty_filtering; orchestrator.algorithm.path may give a rollout no advantage",
    "orchestrator.rollout_transport": "batches go over HTTP, and there is nothing to set",
    "orchestrator.num_train_workers": "it is trainer.ranks, and found out",
    "orchestrator.tasks_per_minute": "max_concurrent of an environment bounds rollouts at once",
    "orchestrator.heartbeat": "the orchestrator's /metrics can be watched",
    "orchestrator.collect_inference_metrics": "each engine serves /metrics",
    "orchestrator.buffer.skip_verification": "every rollout is scored",
    "orchestrator.sampling.max_completion_tokens": "it is orchestrator.sampling.max_tokens",
    "orchestrator.train.sampling": "it is orchestrator.sampling",
    "orchestrator.train.max_retries": "it is max_retries of each [[orchestrator.train.env]]",
    "orchestrator.train.num_workers": "it is num_workers of each [[orchestrator.train.env]]",
    "orchestrator.train.env.taskset.id": "the environment's id is not in taskset but next to it: as id",
    "orchestrator.train.env.pool": "env workers are num_workers",
    "orchestrator.train.env.address": "workers of other machines join: num_workers = 0 here, and `primerl env-worker "
    "--join` there",
    "orchestrator.train.env.timeout": "it is limits.time_s, at which a rollout is scored, or rollout_s, at which it "
    "fails",
    "orchestrator.train.env.max_turns": "it is limits.turns",
    "orchestrator.train.env.max_total_tokens": "it is limits.tokens, of those that are sampled",
    "orchestrator.train.env.algorithms": "it is `algorithm`, one of each environment",
    "orchestrator.train.env.extra_env_kwargs": "it is args",
    "orchestrator.eval.interval": "it is interval of each [[orchestrator.eval.env]]",
    "orchestrator.eval.num_examples": "it is num_examples of each [[orchestrator.eval.env]]; all if unset",
    "orchestrator.eval.group_size": "it is rollouts_per_example of each [[orchestrator.eval.env]]",
    "orchestrator.eval.rollouts_per_example": "it is rollouts_per_example of each [[orchestrator.eval.env]]",
    "orchestrator.eval.sampling": "it is sampling of each [[orchestrator.eval.env]]",
    "orchestrator.eval.skip_first_step": "it is base_model = false of each [[orchestrator.eval.env]]",
    "orchestrator.eval.eval_base_model": "it is base_model of each [[orchestrator.eval.env]]",
    "orchestrator.eval.env.group_size": "it is rollouts_per_example",
    "orchestrator.eval.env.taskset.id": "the environment's id is not in taskset but next to it: as id",
    "trainer.loss.type = default": 'prime-rl\'s "default" is "dppo", with settings in trainer.loss.args',
    "trainer.loss.type = custom": "a function of yours is trainer.loss.custom",
    "trainer.loss.import_path": "it is trainer.loss.custom, as module:function",
    "trainer.loss.kwargs": "it is trainer.loss.args",
    "trainer.loss.dppo_mask_low": "it is mask_low of trainer.loss.args",
    "trainer.loss.dppo_mask_high": "it is mask_high of trainer.loss.args",
    "trainer.loss.kl_tau": "it is kl_tau of trainer.loss.args",
    "trainer.loss.adv_tau": "it is 1; divide kl_tau of trainer.loss.args by it",
    "trainer.model.name": "the model is model.path, of the whole run",
    "trainer.model.seq_len": "it is seq_len, of the whole run",
    "trainer.weight_broadcast": "it is trainer.weights",
    "trainer.metrics_server": "it is trainer.metrics_port",
    "trainer.max_concurrent_runs": "a trainer has one run",
    "trainer.data": "batches are the orchestrator's",
    "inference.server": "they are inference.host and inference.port",
    "inference.model": "the model is model.path; inference.dtype and inference.max_model_len are here, parsers are "
    "orchestrator.parsers",
    "inference.parallel": "it is in inference.vllm, as { tensor-parallel-size = 2 }; engines side by side are "
    "inference.replicas",
    "inference.gpu_memory_utilization": "it is in inference.vllm, as { gpu-memory-utilization = 0.8 }",
    "inference.enable_prefix_caching": "it is in inference.vllm, as { enable-prefix-caching = true }",
    "inference.vllm_extra": "it is inference.vllm, with vLLM's long names",
    "inference.enable_lora": "it follows from trainer.model.lora",
    "inference.max_lora_rank": "it follows from trainer.model.lora.rank",
    "inference.enable_return_routed_experts": "it follows from trainer.enable_router_replay",
    "inference.seed": "it is seed, of the whole run",
    "inference.weight_broadcast": "it is trainer.weights",
    "inference.deployment": "servers of your own are orchestrator.engines",
}

INFERENCE: Names = {"vllm.model": "model is a table here, with path: --model.path"}

PRIME_RL_SFT: Names = {
    **{key: reason.format(*[""] * 4) for key, reason in TRAINER.items()},
    "model.name": "the model is model.path",
    "model.seq_len": "it is data.seq_len",
    "bench": "benches/sft_throughput.py of the repository measures",
    "loss_impl": "the loss is computed without all logits",
    "data.type": "data are rows of conversations",
    "data.subsets": "they are tables here: [[data.subsets]] with path, and name and split where it has several",
    "data.splits": "it is split of each of [[data.subsets]], or data.split",
    "data.probabilities": "it is ratio of each of [[data.subsets]]",
    "data.stopping_strategy": "a dataset that is used up starts over; data.epochs ends it",
    "data.micro_batch_size": "data.batch_size and data.seq_len are in tokens",
    "data.pack_function": "rows are packed whole, without padding",
    "val.eval_on_start": "it is val.at_start",
    "eval": "rows are measured by [val], with val.interval and val.data; environments by `primerl eval`, when a model "
    "is there",
    **MONITORS,
}

HOSTED: Names = {
    **{f"sampling.{key}": reason for key, reason in SAMPLING.items()},
    "sampling.extra_body": "enable_thinking and reasoning_effort are keys of [sampling], and the full form has more "
    "(orchestrator.sampling)",
    "loss": "distillation is in the full form (docs/distillation.md)",
    "teacher": "rewards are learnt from; distillation is in the full form (docs/distillation.md)",
    "max_inflight_rollouts": "rollouts in flight are oversampling_factor * batch_size",
    "name": "a run is called by its folder, output_dir",
    "run_config": "what it sets is in the full form (docs/hosted.md)",
    "cluster_name": "a run is on this machine",
    "env.version": "write it into the id, as owner/name@version",
    "env.ratio": "shares of environments are buffer.env_ratios, one number for each",
    "env.taskset.id": "the environment's id is not in taskset but next to it: as id",
    "eval.env.version": "write it into the id, as owner/name@version",
    "eval.env.max_retries": "a rollout of an evaluation that failed is tried once more",
    "eval.env.taskset.id": "the environment's id is not in taskset but next to it: as id",
    "buffer.skip_verification": "every rollout is scored",
    "lora_rank": "the rank is 16; another is in the full form (trainer.model.lora.rank)",
}


def added(names: Names, path: str, given: Any, *, is_missing: bool) -> str:
    """To what is wrong with the key, or the table, at `path`: the words of a name that is here too.

    Args:
        given: Of a missing key the table that lacks it; else what stands there.
        is_missing: Any key of that table may be what was meant, where its words name the missing one; else values only.
    """
    table = path.rpartition(".")[0] if is_missing else path
    beginning = f"{table}." if table else ""
    found = [beginning + name for name in _given(given, values=not is_missing)]
    reasons = [names[name] for name in ([] if is_missing else [path]) + found if name in names]
    if is_missing:
        reasons = [reason for reason in reasons if _speaks_of(reason, path)]
    return f"; {reasons[0]}" if reasons else ""


def first_of(names: Names, path: str, given: Any) -> tuple[str, str] | None:
    """The first key of the table at `path` that has another name here, and its words."""
    keys = given if isinstance(given, dict) else ()
    return next(((name, names[f"{path}.{name}"]) for name in keys if f"{path}.{name}" in names), None)


def _speaks_of(reason: str, path: str) -> bool:
    """Whether the words have the key: its whole path, or its name alone."""
    named = (path, path.rpartition(".")[2])
    return any(re.search(rf"(?<![\w./]){re.escape(name)}(?![\w/]|\.\w)", reason) for name in named)


def _given(node: Any, *, values: bool) -> Iterator[str]:
    """Dotted keys of a table, or its keys with their values (`type = default`)."""
    for name, inner in node.items() if isinstance(node, dict) else ():
        if values:
            yield f"{name} = {inner}"
            continue
        yield name
        yield from (f"{name}.{rest}" for rest in _given(inner, values=False))
