"""Broken configs, in both forms: each message in full, with the file, the line and the key, before anything starts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import config_texts
import pytest
from primerl.cli import main
from primerl.config.command_line.load import load
from primerl.config.errors.fail import ConfigError
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.sft import SFTConfig
from primerl.config.schema.simulate import SimulateConfig
from test_train_loss import LOSSES

SHORT = config_texts.SHORT.replace("MODEL", "owner/name")
FULL = config_texts.FULL.replace("MODEL", "model")
# A form, what of it is replaced, by what, the command line's overrides, the message.
# fmt: off
CASES: list[tuple[str, str, str, list[str], str]] = [
    (SHORT, "max_tokens = 64", "max_tokens = 64\ntemperature = -1", [],
     "sampling.temperature (in run.toml, line 8): Input should be greater than or equal to 0 (it is -1)"),
    (SHORT, "max_tokens = 64", "max_tokens = 64\ntemperature = 0", [],
     "sampling (in run.toml, line 8): temperature (0) makes all rollouts of an example the same, with nothing to "
     "compare; set it to 0.001 or more"),
    (SHORT, "max_tokens = 64", "temperature = 1.0", [],
     "sampling.max_tokens (in run.toml, line 6): missing; it has no default, so set it"),
    (SHORT, "max_tokens = 64", 'max_tokens = "many"', [],
     "sampling.max_tokens (in run.toml, line 7): Input should be a valid integer, unable to parse string as an "
     "integer (it is 'many')"),
    (SHORT, "max_tokens = 64", 'max_tokens = 64\nenable_thinking = true\nreasoning_effort = "low"', [],
     "sampling (in run.toml, line 8): enable_thinking and reasoning_effort are both set, and a model has one of "
     "the two; omit one"),
    (SHORT, "max_tokens = 64", 'max_tokens = 64\nreasoning_effort = "extreme"', [],
     "sampling.reasoning_effort (in run.toml, line 8): Input should be 'low', 'medium' or 'high' (it is 'extreme')"),
    (SHORT, "max_tokens = 64", "max_tokens = 64\ntop_p = 0.9", [],
     "sampling.top_p (in run.toml, line 8): unknown key; known keys here: enable_thinking, max_tokens, "
     "reasoning_effort, temperature"),
    (SHORT, "[sampling]\nmax_tokens = 64\n", "", [],
     "sampling (in run.toml): missing; it has no default, so set it"),
    (SHORT, "max_steps = 10", "max_step = 10", [],
     "max_steps (in run.toml): missing; it has no default, so set it\nmax_step (in run.toml, line 2): unknown key; "
     "did you mean 'max_steps'?"),
    (SHORT, "max_steps = 10", "max_steps = 0", [],
     "max_steps (in run.toml, line 2): Input should be greater than 0 (it is 0)"),
    (SHORT, "max_steps = 10", "max_steps = true", [],
     "max_steps is true or false, where a number is expected; write the number (in run.toml, line 2)"),
    (SHORT, "max_steps = 10", "max_steps = 10\nlearning_rate = 0", [],
     "learning_rate (in run.toml, line 3): Input should be greater than 0 (it is 0)"),
    (SHORT, "max_steps = 10", "max_steps = 10\nlora_rank = 8", [],
     "lora_rank (in run.toml, line 3): no key here: the rank is 16; another is in the full form "
     "(trainer.model.lora.rank)"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nloss = "sft"', [],
     "loss (in run.toml, line 3): Input should be 'rl' (it is 'sft'); distillation is in the full form "
     "(docs/distillation.md)"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nenv_files = ["a.env"]\nenv_file = ["b.env"]', [],
     "env_files and env_file are the same setting, and both are given; put all into env_files, today's name (in "
     "run.toml, line 3)"),
    (SHORT, "max_steps = 10", "max_steps = 10\nkeep_broadcasts = true", [],
     "two forms of config are mixed: model (in run.toml, line 1), batch_size (in run.toml, line 4), "
     "rollouts_per_example (in run.toml, line 5), sampling (in run.toml, line 7), env (in run.toml, line 10) are "
     "of the short form (Hosted Training's), and keep_broadcasts (in run.toml, line 3) is of the full form; write all "
     "in one of them (docs/hosted.md says what becomes what, and --dry-run of a file in the short form writes the "
     "full one)"),
    (SHORT, "max_steps = 10", "max_steps = 10\noversampling_factor = 0.5", [],
     "oversampling_factor (in run.toml, line 3): Input should be greater than or equal to 1 (it is 0.5)"),
    (SHORT, "max_steps = 10", 'max_steps = 10\ntrajectory_strategy = "linear"', [],
     "trajectory_strategy (in run.toml, line 3): Input should be 'interleaved' or 'branching' (it is 'linear')"),
    (SHORT, "max_steps = 10", "max_steps = 10\nseq_len = 64", [],
     "sampling.max_tokens (64) must be below seq_len (64), which holds the prompt too; lower one or raise the "
     "other (in run.toml, line 8)"),
    (SHORT, "batch_size = 16", "batch_size = 18", [],
     "batch_size (18) must be a multiple of rollouts_per_example (4); set batch_size to 16 or 20 (in run.toml, "
     "line 3)"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\nname = "all"', [],
     "env[0] (in run.toml, line 11): name makes 'all', which is a name of metrics; set another `name`"),
    (SHORT, "rollouts_per_example = 4", "rollouts_per_example = 1", [],
     "rollouts_per_example (in run.toml, line 4): Input should be greater than or equal to 2 (it is 1)"),
    (SHORT, 'id = "owner/reverse-text"', 'name = "x"', [],
     "env[0].id (in run.toml, line 9): missing; it has no default, so set it"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/../_"', [],
     "env[0] (in run.toml, line 10): id ('owner/../_') makes '_', which cannot name metrics and files; set `name` "
     "to letters, digits, '.', '_' and '-'"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\nversion = "1.0"', [],
     "env[0].version (in run.toml, line 11): no key here: write it into the id, as owner/name@version"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\n\n[[env]]\nid = "other/reverse-text"', [],
     "env[1] (in run.toml, line 12): two environments are called 'reverse-text'; give one of them another `name` (it "
     "names metrics, logs and files)"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\n\n[[env.taskset.rewards]]\nweight = 0.5', [],
     "env[0].taskset.rewards[0].fn (in run.toml, line 12): missing; it has no default, so set it"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\n\n[[env.taskset.rewards]]\nfn = "no function"', [],
     "env[0].taskset.rewards[0] (in run.toml, line 13): fn ('no function') is no function like `module:function` "
     "or `path/to/file.py:function`"),
    (SHORT, 'id = "owner/reverse-text"',
     'id = "owner/reverse-text"\n\n[env.taskset.toolsets.search]\nfn = "my:toolset"', [],
     "env[0].taskset.toolsets.search.tools (in run.toml, line 12): missing; it has no default, so set it\n"
     "env[0].taskset.toolsets.search.fn (in run.toml, line 13): unknown key; known keys here: bindings, objects, "
     "tools"),
    (SHORT, 'id = "owner/reverse-text"',
     'id = "owner/reverse-text"\nargs = { harness = { max_turns = 1 } }\n\n[env.harness]\nmax_turns = 8', [],
     "env[0] (in run.toml, line 11): args.harness and harness are the same settings, and both are given; omit one "
     "of them"),
    (SHORT, '[[env]]\nid = "owner/reverse-text"\n', "", [],
     "env (in run.toml): missing; it has no default, so set it"),
    (SHORT, "[[env]]", "[env]", [],
     "env (in run.toml, line 9): `env` is a list: write `[[env]]` instead of `[env]`"),
    (SHORT, "max_tokens = 64", "max_tokens = 64\nmin_tokens = 4", [],
     "sampling.min_tokens (in run.toml, line 8): no key here: it changes what is sampled from, and the trainer would "
     "compute other log-probabilities"),
    (SHORT, "[[env]]", '[eval]\nnum_examples = 0\n[[eval.env]]\nid = "a"\n\n[[env]]', [],
     "eval (in run.toml, line 10): num_examples is 0; give how many, or -1 for all of them"),
    (SHORT, "[[env]]", "[val]\ninterval = 0\n\n[[env]]", [],
     "val.interval (in run.toml, line 10): Input should be greater than 0 (it is 0)"),
    (SHORT, "[[env]]", "[val]\nnum_examples = -2\n\n[[env]]", [],
     "val.num_examples (in run.toml, line 10): Input should be greater than or equal to -1 (it is -2)"),
    (SHORT, "[[env]]", "[buffer]\neasy_threshold = 0.1\n\n[[env]]", [],
     "buffer (in run.toml, line 10): hard_threshold (0.2) must be below easy_threshold (0.1): an example would be "
     "both; lower the first or raise the second"),
    (SHORT, "[[env]]", "[buffer]\nenv_ratios = [1, 2]\n\n[[env]]", [],
     "buffer.env_ratios has 2 numbers, and there are 1 [[env]]; give one for each, in order (in run.toml, line 10)"),
    (SHORT, "[[env]]", "[buffer]\nskip_verification = true\n\n[[env]]", [],
     "buffer.skip_verification (in run.toml, line 10): no key here: every rollout is scored"),
    (SHORT, "[[env]]", "[checkpoints]\nkeep_cloud = -2\n\n[[env]]", [],
     "checkpoints.keep_cloud (in run.toml, line 10): Input should be greater than or equal to -1 (it is -2)"),
    (SHORT, "[[env]]", "[adapters]\ninterval = -1\n\n[[env]]", [],
     "adapters.interval (in run.toml, line 10): Input should be greater than or equal to 0 (it is -1)"),
    (SHORT, "[[env]]", '[infrastructure]\ncompute_size = "XL"\n\n[[env]]', [],
     "infrastructure.compute_size (in run.toml, line 10): Input should be 'S', 'M' or 'L' (it is 'XL')"),
    (SHORT, "[[env]]", "[infrastructure]\n\n[[env]]", [],
     "infrastructure.compute_size (in run.toml, line 9): missing; it has no default, so set it"),
    (SHORT, "[[env]]", '[wandb]\nproject = ""\n\n[[env]]', [],
     "wandb.project (in run.toml, line 10): String should have at least 1 character (it is '')"),
    (SHORT, "[[env]]", "[checkpoints]\nkeep_cloud = 0\n\n[[env]]", [],
     "checkpoints.keep_cloud (in run.toml, line 10): 0 would keep none; give how many, or -1 for all of them (it "
     "is 0)"),
    (SHORT, "[[env]]", '[tailscale]\nauth_key = "tskey-api-SECRET"\n\n[[env]]', [],
     "tailscale (in run.toml, line 10): auth_key does not begin with 'tskey-auth-'; give an auth key of Tailscale, "
     "no API key"),
    (SHORT, "[[env]]", '[tailscale]\nhostname_prefix = "9lives"\n\n[[env]]', [],
     "tailscale (in run.toml, line 10): hostname_prefix ('9lives') must be 1 to 30 of a-z, 0-9 and -, and begin "
     "with a letter"),
    (FULL, "", "", ["--tailscale.auth-key", "tskey-client-SECRET"],
     "tailscale (on the command line): auth_key does not begin with 'tskey-auth-'; give an auth key of Tailscale, "
     "no API key"),
    (SHORT, "[[env]]", "[trainer.optim]\nlr = 1e-4\n\n[[env]]", [],
     "two forms of config are mixed: model (in run.toml, line 1), batch_size (in run.toml, line 3), "
     "rollouts_per_example (in run.toml, line 4), sampling (in run.toml, line 6), env (in run.toml, line 12) are "
     "of the short form (Hosted Training's), and trainer (in run.toml, line 9) is of the full form; write all in "
     "one of them (docs/hosted.md says what becomes what, and --dry-run of a file in the short form writes the "
     "full one)"),
    (SHORT, "", "", ["--orchestrator.batch-size", "8"],
     "two forms of config are mixed: model (in run.toml, line 1), batch_size (in run.toml, line 3), "
     "rollouts_per_example (in run.toml, line 4), sampling (in run.toml, line 6), env (in run.toml, line 9) are of "
     "the short form (Hosted Training's), and orchestrator (on the command line) is of the full form; write all in one "
     "of them (docs/hosted.md says what becomes what, and --dry-run of a file in the short form writes the full one)"),
    (SHORT, "", "", ["--sampling.temperature", "-1"],
     "sampling.temperature (on the command line): Input should be greater than or equal to 0 (it is '-1')"),
    (SHORT, "", "", ["--no-such-key", "1"],
     "no_such_key (on the command line): unknown key; known keys here: adapters, batch_size, buffer, "
     "checkpoint_id, checkpoints, clean_output_dir, dry_run, env, env_file, env_files, eval, fork_server, "
     "infrastructure, learning_rate, lora_alpha, loss, max_async_level, max_steps, model, output_dir, "
     "oversampling_factor, rollouts_per_example, sampling, seed, seq_len, skip_event, tailscale, trajectory_strategy, "
     "val, wandb"),
    (SHORT, "", "", ["--clean-output-dir", "--dry-run"],
     "dry_run and clean_output_dir are both set, but a dry run deletes nothing; omit clean_output_dir "
     "(--no-clean-output-dir where the file sets it), or dry_run to delete and start (on the command line)"),
    (SHORT, "max_steps = 10", "max_steps = = 10", [],
     "Invalid TOML in run.toml: Invalid value (at line 2, column 13)"),
    (SHORT, "max_steps = 10", "max_steps = 10\nmax_steps = 11", [],
     "Invalid TOML in run.toml: Cannot overwrite a value (at line 3, column 15)"),
    (FULL, "max_steps = 10", "max_steps = 10\nmax_stepz = 11", [],
     "max_stepz (in run.toml, line 2): unknown key; did you mean 'max_steps'?"),
    (FULL, "max_steps = 10", "max_steps = 10\nseq_len = 512", [],
     "orchestrator.sampling.max_tokens (512) must be below seq_len (512), which holds the prompt too; lower one or "
     "raise the other (in run.toml, line 2)"),
    (FULL, '[model]\npath = "model"\n', "", [],
     "model (in run.toml): missing; it has no default, so set it"),
    (FULL, 'path = "model"', 'name = "n"', [],
     "model.path (in run.toml, line 3): missing; it has no default, so set it; the model is model.path; model.name is "
     "what environments call it"),
    (FULL, "[model]", '[trainer.loss]\ntype = "default"\n\n[model]', [],
     f"trainer.loss (in run.toml, line 4): type is 'default'; it must be one of {LOSSES}; prime-rl's \"default\" is "
     '"dppo", with settings in trainer.loss.args'),
    (FULL, 'id = "reverse-text"', 'taskset = { id = "reverse-text" }', [],
     "orchestrator.train.env[0].id (in run.toml, line 10): missing; it has no default, so set it; the environment's id "
     "is not in taskset but next to it: as id"),
    (FULL, "group_size = 4", "group_size = 5", [],
     "orchestrator (in run.toml, line 7): batch_size (16) must be a multiple of group_size (5); set batch_size to "
     "15 or 20"),
    (FULL, "group_size = 4", "group_size = 4\nsampling.temperature = -1", [],
     "orchestrator.sampling.temperature (in run.toml, line 9): Input should be greater than or equal to 0.001 (it "
     "is -1)"),
    (FULL, "group_size = 4", "group_size = 4\nsampling = { temperature = 1, max_token = 3 }", [],
     "orchestrator.sampling.max_token (in run.toml, line 9): unknown key; did you mean 'max_tokens'?"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\nratioo = 2', [],
     "orchestrator.train.env[0].ratioo (in run.toml, line 12): unknown key; did you mean 'ratio'?"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\nmemory_mb = 10', [],
     "orchestrator.train.env[0].memory_mb (in run.toml, line 12): Input should be greater than or equal to 1024 "
     "(it is 10)"),
    (FULL, "[model]", "[trainer.optim]\nlr = -1\n\n[model]", [],
     "trainer.optim.lr (in run.toml, line 4): Input should be greater than 0 (it is -1)"),
    (FULL, "[model]", '[trainer.optim]\ntype = "adam"\n\n[model]', [],
     "trainer.optim (in run.toml, line 4): type is 'adam'; it must be one of 'adamw', 'muon', 'sgd', 'sign_sgd'"),
    (FULL, "[model]", "[trainer]\nckpt.interval = 2\n\n[ckpt]\ninterval = 3\n\n[model]", [],
     "ckpt and trainer.ckpt are the same settings, and both are given; omit one of them (in run.toml, line 6)"),
    (FULL, "[model]", "[store]\nkeep = -5\n\n[model]", [],
     "store.keep (in run.toml, line 4): Input should be greater than or equal to -1 (it is -5)"),
    (FULL, "[model]", "[inference]\nreplicas = 0\n\n[model]", [],
     "inference.replicas is 0 and orchestrator.engines names no engine; set one of them (engines of other "
     "machines are named there, as in [\"http://node:8001\"]) (in run.toml, line 4)"),
    (FULL, "[model]", "[sampling]\nmax_tokens = 3\n\n[model]", [],
     "two forms of config are mixed: sampling (in run.toml, line 3) is of the short form (Hosted Training's), and "
     "model (in run.toml, line 6), orchestrator (in run.toml, line 9) are of the full form; write all in one of "
     "them (docs/hosted.md says what becomes what, and --dry-run of a file in the short form writes the full one)"),
    (FULL, '[model]\npath = "model"', "[foo]\nmodel = 1", [],
     "model (in run.toml): missing; it has no default, so set it\nfoo (in run.toml, line 3): unknown key; known "
     "keys here: checkpoint_id, ckpt, clean_output_dir, deployment, dry_run, env_files, fork_server, inference, "
     "keep_broadcasts, log, max_steps, model, monitor, monitors, orchestrator, output_dir, ray, restarts, "
     "seed, seq_len, skip_event, slurm, store, tailscale, timeouts, trainer, wandb"),
    (FULL, "", "", ["--model.path"],
     "--model.path requires a value"),
    (FULL, "", "", ["--trainer.optim.lr", "0"],
     "trainer.optim.lr (on the command line): Input should be greater than 0 (it is '0')"),
    (FULL, "", "", ["--max-steps", "[1"],
     "max_steps (on the command line): Input should be a valid integer, unable to parse string as an integer (it "
     "is '[1')"),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\n\n[eval]\n[[eval.env]]\nid = "reverse-text"\n'
     '[[eval.env]]\nid = "reverse-text"', [],
     "eval.env[1] (in run.toml, line 15): two environments are called 'reverse-text'; give one of them another `name` "
     "(it names metrics, logs and files)"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\n\n[[orchestrator.eval.env]]\nid = "reverse-text"\n'
     '[[orchestrator.eval.env]]\nid = "reverse-text"', [],
     "orchestrator.eval.env[1] (in run.toml, line 15): two environments are called 'reverse-text'; give one of them "
     "another `name` (it names metrics, logs and files)"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\n\n[orchestrator.val]\n\n[[orchestrator.eval.env]]\n'
     'id = "reverse-text-val"', [],
     "orchestrator.eval.env[0] (in run.toml, line 15): two environments are called 'reverse-text-val'; give one of "
     "them another `name` (it names metrics, logs and files)"),
    (SHORT, "[sampling]", "[[sampling]]", [],
     "sampling (in run.toml, line 6): `sampling` is one table: write `[sampling]` instead of `[[sampling]]`"),
    (SHORT, "[sampling]\nmax_tokens = 64\n", "", ["--sampling=3"],
     "--sampling: [sampling] is a section; set keys of it, as in --sampling.max-tokens VALUE"),
    (SHORT, "max_steps = 10", "max_steps = 10\nwandb = 5", [],
     "wandb (in run.toml, line 3): a table is expected; write its keys below [wandb] (it is 5)"),
    (SHORT, "max_steps = 10", 'max_steps = 10\nenv_file = "a.env"', [],
     'env_file (in run.toml, line 3): a list is expected; write ["a.env"] (it is \'a.env\')'),
    (SHORT, 'id = "owner/reverse-text"', 'id = "owner/reverse-text"\ntaskset = "train"\nargs = 3', [],
     "env[0].args (in run.toml, line 12): a table is expected; write its keys below [env.args] (it is 3)\n"
     "env[0].taskset (in run.toml, line 11): a table is expected; write its keys below [env.taskset] (it is 'train')"),
    (SHORT, '[[env]]\nid = "owner/reverse-text"\n', "", ["--env", '["reverse-text"]'],
     "env[0] (on the command line): a table is expected for each entry; write its keys below [[env]] (it is "
     "'reverse-text')"),
    (FULL, "[model]", "[trainer.optim]\nbetas = 0.9\n\n[model]", [],
     "trainer.optim.betas (in run.toml, line 4): a list is expected; write its values between [ and ] (it is 0.9)"),
    (FULL, "[model]", "[model]\npth = 1\nkind = 2", [],
     "model.pth (in run.toml, line 4): unknown key; did you mean 'path'?\n"
     "model.kind (in run.toml, line 5): unknown key; known keys here: name, path, trust_remote_code"),
    (FULL, "[model]", "[model]\nhub = 1\nkind = 2", [],
     "model.hub (in run.toml, line 4): unknown key; known keys here: name, path, trust_remote_code\n"
     "model.kind (in run.toml, line 5): unknown key"),
    (FULL, "max_steps = 10", "max_steps = 99999999999999999999999", [],
     "max_steps (in run.toml, line 1): Input should be less than or equal to 9223372036854775807 (it is "
     "99999999999999999999999)"),
    (FULL, "max_steps = 10", f"max_steps = 0x{'f' * 4000}", [],
     "max_steps (in run.toml, line 1): Input should be less than or equal to 9223372036854775807 (it is a number of "
     "thousands of digits)"),
    (FULL, "", "", ["--max-steps", "99999999999999999999999"],
     "max_steps (on the command line): Input should be less than or equal to 9223372036854775807 (it is "
     "'99999999999999999999999')"),
    (FULL, "batch_size = 16", "batch_size = 4000000000", [],
     "orchestrator.batch_size (in run.toml, line 7): Input should be less than or equal to 1000000 (it is "
     "4000000000)"),
    (FULL, "batch_size = 16", "batch_size = 16\noversampling_factor = 1e30", [],
     "orchestrator.oversampling_factor (in run.toml, line 8): Input should be less than or equal to 1000 (it is "
     "1e+30)"),
    (FULL, "[model]", "[inference]\nmax_num_seqs = 1000000000000\n\n[model]", [],
     "inference.max_num_seqs (in run.toml, line 4): Input should be less than or equal to 65536 (it is "
     "1000000000000)"),
    (FULL, 'id = "reverse-text"', 'id = "reverse-text"\nmax_concurrent = 5000000000\n'
     "taskset.seeds = [1, 99999999999999999999]", [],
     "orchestrator.train.env[0].taskset (in run.toml, line 13): seeds[1] is more than the 64 bits of an integer "
     "hold; write it as a string\n"
     "orchestrator.train.env[0].max_concurrent (in run.toml, line 12): Input should be less than or equal to "
     "4294967295 (it is 5000000000)"),
    (SHORT, "[[env]]", "[val]\ninterval = 99999999999999999999999\n\n[[env]]", [],
     "val.interval (in run.toml, line 10): Input should be less than or equal to 9223372036854775807 (it is "
     "99999999999999999999999)"),
    (SHORT, "max_tokens = 64", "max_tokens = 4000000000", [],
     "sampling.max_tokens (in run.toml, line 7): Input should be less than or equal to 536870912 (it is 4000000000)"),
    (FULL, "[model]", '[inference]\nvllm = { api-key = "x" }\n\n[model]', [],
     "inference.vllm.api-key (in run.toml, line 4): the orchestrator sends engines no key; keep inference.host on an "
     "address that only the run reaches"),
    (FULL, "[model]", "[timeouts]\ncheck_s = 1e300\n\n[model]", [],
     "timeouts.check_s (in run.toml, line 4): Input should be less than or equal to 31536000 (it is 1e+300)"),
    (FULL, "batch_size = 16", "batch_size = 16\nmax_async_level = 9", [],
     "orchestrator (in run.toml, line 8): max_off_policy_steps (8) must be at least max_async_level (9): rollouts "
     "would be generated only to be too old to train on; raise the first, or lower the second"),
    (SHORT, "batch_size = 16", "batch_size = 16\nmax_async_level = 9", [],
     "max_off_policy_steps (8) must be at least max_async_level (9): rollouts would be generated only to be too old "
     "to train on; raise the first, or lower the second (in run.toml, line 4)"),
    (FULL, "batch_size = 16", 'batch_size = 16\nengines = ["http://a:1", "foo"]', [],
     "orchestrator (in run.toml, line 8): engines[1] (foo) is no URL like http://host:port; give one"),
    (FULL, "batch_size = 16", 'batch_size = 16\nengines = ["http://[bad"]', [],
     "orchestrator (in run.toml, line 8): engines[0] (http://[bad) is no URL like http://host:port; give one"),
]
# fmt: on


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("form", "old", "new", "overrides", "message"), CASES)
def test_a_broken_config_is_explained(form: str, old: str, new: str, overrides: list[str], message: str) -> None:
    assert old in form
    Path("run.toml").write_text(form.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_run(["@", "run.toml", *overrides], program="primerl rl")
    assert str(caught.value) == message


@pytest.mark.parametrize("form", [SHORT, FULL])
def test_the_forms_themselves_are_fine(form: str) -> None:
    Path("run.toml").write_text(form.replace("max_tokens = 64", "max_tokens = 64\ntemperature = 0.7"))
    assert load_run(["@", "run.toml"], program="primerl rl").max_steps == 10


def test_a_key_is_named_in_the_file_that_has_set_it_last() -> None:
    Path("run.toml").write_text(FULL)
    Path("more.toml").write_text("[orchestrator]\n\nbatch_size = 0\n")
    Path("optim.toml").write_text("# slow\nlr = -1\n")
    files = ["@", "run.toml", "@", "more.toml", "--trainer.optim", "@", "optim.toml"]
    for arguments in (files, [*files[:-2], "@optim.toml"]):
        with pytest.raises(ConfigError) as caught:
            load_run(arguments, program="primerl rl")
        assert str(caught.value).splitlines() == [
            "trainer.optim.lr (in optim.toml, line 2): Input should be greater than 0 (it is -1)",
            "orchestrator.batch_size (in more.toml, line 3): Input should be greater than 0 (it is 0)",
        ]


def test_keys_are_found_wherever_toml_lets_them_be_written() -> None:
    Path("run.toml").write_text(
        '# A comment\n"max_steps" = 10\noutput_dir = """\n[sampling]\nmax_tokens = 1"""\n'
        'model = { path = "m" }\n'
        'orchestrator.train.env = [\n  { id = "a" }, # first\n  { id = "b", max_concurrent = 0 },\n]\n'
        "[orchestrator.timeouts]\n'rollout_s' = 0\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_run(["@", "run.toml"], program="primerl rl")
    assert str(caught.value).splitlines() == [
        "orchestrator.timeouts.rollout_s (in run.toml, line 12): Input should be greater than or equal to 0.001 "
        "(it is 0)",
        # Of a value over several lines, where it begins.
        "orchestrator.train.env[1].max_concurrent (in run.toml, line 7): Input should be greater than 0 (it is 0)",
    ]


def test_nothing_shows_the_key_of_a_tailnet(monkeypatch: pytest.MonkeyPatch) -> None:
    section = '[tailscale]\nauth_key = "tskey-auth-SECRET"\nno_such = 1\nenabled = true\n\n[[env]]'
    Path("run.toml").write_text(SHORT.replace("[[env]]", section))
    monkeypatch.setenv("TAILSCALE_AUTH_KEY", "tskey-auth-SECRET")
    with pytest.raises(ConfigError) as caught:
        load_run(["@", "run.toml"], program="primerl rl")
    assert "no_such" in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize("form", [SHORT, FULL])
def test_a_config_error_imports_nothing_heavy_and_exits_2(form: str) -> None:
    Path("run.toml").write_text(form + "\n[no_such]\n")
    code = (
        "import sys; from primerl.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'verifiers', 'huggingface_hub', 'primerl._core'} & set(sys.modules)\n"
        "print(code, heavy or 'light')"
    )
    command = [sys.executable, "-c", code, "rl", "@", "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2 light", done.stderr
    assert "no_such (in run.toml, line" in done.stderr


@pytest.mark.processes
def test_a_broken_file_is_told_by_its_place_and_not_by_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (
        ("a.yaml", "wandb:\n  api_key: 'sk-secret-123\nmax_steps: 1\n"),
        ("b.yaml", "wandb: {api_key: sk-secret-123\nmax_steps: 1\n"),
        ("c.yaml", "wandb:\n  api_key: *sk-secret-123\n"),
        ("d.yaml", "wandb:\n  api_key: !sk-secret-123 x\n"),
        ("e.json", '{"wandb": {"api_key": "sk-secret-123"'),
        ("f.toml", '[wandb]\napi_key = "sk-secret-123\n'),
    ):
        Path(name).write_text(text)
        assert main(["rl", "@", name]) == 2
        said = capsys.readouterr().err
        assert re.search(rf"Invalid (YAML|JSON|TOML) in {name}: .*line \d+", said), said
        assert "secret-123" not in said


def test_a_file_that_begins_with_a_byte_order_mark_is_read() -> None:
    Path("run.toml").write_bytes(b"\xef\xbb\xbf" + SHORT.replace("max_steps = 10", "max_steps = 0").encode())
    with pytest.raises(ConfigError, match=r"^max_steps \(in run\.toml, line 2\): Input should be greater than 0"):
        load_run(["@", "run.toml"], program="primerl rl")
    Path("plan.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"max_steps": 7}).encode())
    Path("run.toml").write_text(SHORT)
    assert load_run(["@", "run.toml", "@", "plan.json"], program="primerl rl").max_steps == 7


def test_known_keys_are_listed_once() -> None:
    Path("run.toml").write_text(FULL)
    with pytest.raises(ConfigError) as caught:
        load(SFTConfig, ["@", "run.toml"], program="primerl sft")
    assert str(caught.value).count("known keys here: ") == 1
    assert "orchestrator (in run.toml, line" in str(caught.value)


def test_keys_of_sections_that_are_one_of_several_are_named() -> None:
    Path("plan.toml").write_text('[environment.turns]\ntype = "uniform"\nmin = -1\nmx = 4\n')
    with pytest.raises(ConfigError) as caught:
        load(SimulateConfig, ["@", "plan.toml"], program="primerl simulate")
    assert str(caught.value).splitlines() == [
        "environment.turns.min (in plan.toml, line 3): Input should be greater than or equal to 0 (it is -1)",
        "environment.turns.max (in plan.toml, line 1): missing; it has no default, so set it",
        "environment.turns.mx (in plan.toml, line 4): unknown key; did you mean 'max'?",
    ]


def test_the_short_form_is_known_in_every_kind_of_file() -> None:
    import tomllib

    import yaml

    tree = tomllib.loads(SHORT)
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    Path("run.JSON").write_text(json.dumps(tree))
    for name in ("run.yaml", "run.JSON"):
        assert load_run(["@", name, "--batch-size", "32"], program="primerl rl").orchestrator.batch_size == 32
