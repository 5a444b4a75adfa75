"""The table of renamings: prime-rl's fine-tuning. What it shares with the trainer of a run is made from that part."""

from __future__ import annotations

from dataclasses import replace

from primerl.config.foreign import rules, run_rules, table_run, table_trainer
from primerl.config.foreign.rows import UNSET, Row, expanded, moved, note, refused, row

_SHARED = (
    "max_steps",
    "output_dir",
    "run.",
    "clean",
    "dry_run",
    "bench",
    "env_vars",
    "model.",
    "tokenizer.",
    "ckpt",
    "resume",
    "log.",
    "monitors.",
    "wandb",
    "deployment.gpus_per_node",
    "deployment.type",
    "deployment.nodes",
    "slurm",
    "heartbeat",
    "name",
    "image_tag",
    "gpu_type",
    "volume",
    "source_ref",
    "type",
    "k8s",
)
_NOT_SHARED = (
    "loss",
    "data",
    "weight_broadcast",
    "rollout_transport",
    "enable_",
    "metrics_server",
    "max_concurrent_runs",
    "monitors.prime",
    "log.level",
    "log.vf_level",
)
_LATER = "environments are measured by `primerl eval`, when a model is there; rows by [val]"

_ROWS = "PrimeIntellect/Reverse-Text-SFT"
OWN: list[Row] = [
    row("log.level", "log.level", lambda value, _: {"warn": "warning"}.get(value, value)),
    note("logs", "log.{vf_level,log_data,interval}", "lines come when something happens", False, 10.0),
    refused(
        "the rows", "data.type", "rows are conversations; benches/sft_throughput.py of the repository measures", "sft"
    ),
    refused(
        "the rows",
        "data.{fake,length,input_ids}{,.**}",
        "rows are conversations; benches/sft_throughput.py of the repository measures",
    ),
    row("data.name", "data.path", rules.mixture, default=_ROWS),
    row("val.data.name", "val.data.path", rules.mixture, default=_ROWS, where="val"),
    row("{data,val.data}.{subsets,splits,probabilities}", "data.subsets", rules.mixture),
    note("the rows", "{data,val.data}.stopping_strategy", "a dataset that is used up starts over", "all_exhausted"),
    row("data.batch_size", "data.batch_size", rules.tokens_of_batch, default=128, why="rows there, tokens here"),
    row("data.seq_len", "data.seq_len", default=128),
    row("val.data.seq_len", "val.data.seq_len"),
    note("the rows", "val.data.{batch_size,shuffle,seed,type}", "all rows are measured, in their order"),
    note("the rows", "{data,val.data}.micro_batch_size", "a row of data.seq_len tokens is in memory at a time"),
    note("the rows", "{data,val.data}.{num_workers,pack_function}", "rows are packed whole, ahead of the step", 1),
    row("data.{shuffle,seed}", "data."),
    row("{data,val.data}.loss_mask.{system,user,assistant,tool}", "data.loss_mask.", rules.same_place),
    row("val.interval", "val.interval", default=50, where="val"),
    row("val.eval_on_start", "val.at_start", default=False, where="val"),
    refused(
        "rendering",
        "renderer.enable_thinking",
        "conversations are written by the model's own template with its defaults; change the default in the template",
        True,
        None,
    ),
    note("rendering", "renderer.**", "the model's own chat template is rendered; masks are exact for any"),
    note("memory and speed", "loss_impl", "the loss is computed without all logits", "torch", versions="0.8"),
    note("monitors", "heartbeat.url", "what watches a run reads its metrics.jsonl"),
    note("variables", "{env_file,env_files}", "fine-tuning gets the variables of the shell that starts it"),
    note("evaluations", "eval.**", _LATER),
    note("evaluations", "{inference,weight_broadcast}.**", _LATER),
    row("deployment.{num_train_gpus,num_gpus}", "ranks"),
    note("evaluations", "deployment.{num_infer_gpus,num_infer_nodes}", _LATER),
    row("deployment.{num_train_nodes,num_nodes}", "deployment.num_train_nodes", run_rules.train_nodes_of_sft),
]


def _all() -> list[Row]:
    run = [one for one in expanded(table_run.RUN + table_run.MACHINES) if one.theirs.startswith(_SHARED)]
    trainer = moved(expanded(table_trainer.TRAINER), ("trainer.", ""), ("trainer.", ""))
    shared = [one for one in (*run, *trainer) if not one.theirs.startswith(_NOT_SHARED)]
    return [_of_sft(one) for one in (*expanded(OWN), *shared)]


def _of_sft(one: Row) -> Row:
    ours = {"seq_len": "data.seq_len", "trainer.dp_replicate": "dp_replicate"}.get(one.ours or "", one.ours)
    if one.theirs == "data.seq_len":
        ours = "data.seq_len"
    if one.theirs == "ckpt.keep_last":
        one = replace(one, default=UNSET)
    return replace(one, ours=ours, why=one.why.replace("trainer.", ""))


ROWS = _all()
