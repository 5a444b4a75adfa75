"""`primerl run init`: a config to start from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from primerl.cli.run.common import BAD_INPUT, parser_of
from primerl.config.errors.fail import fail

TEMPLATE = """\
# A run of reinforcement learning: `primerl run @ rl.toml` starts it, `--dry-run` checks it and starts nothing.
# Each key can also be set on the command line (--orchestrator.batch-size 64); `primerl rl --help-all` lists them all.
{missing}output_dir = "outputs/my-run"     # its name is the folder's; logs, metrics, checkpoints and weights
max_steps = 100
seq_len = 2048                    # longest sequence: prompt and completion of all turns, in tokens
seed = 0

[model]
path = {model}    # a model folder; `primerl run models` lists those that are here

[trainer.optim]
lr = 1e-5                         # ten times as much, or more, with an adapter:

# [trainer.model.lora]            # train a low-rank adapter and leave the model's own weights as they are
# rank = 16
# alpha = 32

[ckpt]
interval = 20                     # steps between checkpoints, from which a stopped run resumes
keep_last = 1

[orchestrator]
batch_size = 64                   # rollouts of a step, a multiple of group_size
group_size = 8                    # rollouts of one example, which are compared with each other
max_async_level = 2               # steps that sampling may be ahead of training; 0 is synchronous
max_off_policy_steps = 8          # older rollouts are not trained

[orchestrator.sampling]
max_tokens = 512                  # longest completion of one turn; below seq_len
temperature = 1.0

[[orchestrator.train.env]]        # any installed verifiers environment; repeat it for several
id = {environment}
# taskset = {{ split = "train" }}   # the environment's own settings
# ratio = 1.0                     # its share of the groups

# [[orchestrator.eval.env]]       # measured before, during and after training, never trained on
# id = {environment}
# name = "evaluation"
# interval = 20
# num_examples = 64

# [store]                         # copy checkpoints and weights away during the run (docs/runs.md)
# url = "s3://bucket/primerl"
"""
HOSTED = """\
# A run in the short form of Hosted Training (docs/hosted.md): `primerl rl @ FILE` starts it, `--dry-run` checks it and
# writes the full form. Each key can also be set on the command line (--sampling.temperature 0.7).
{missing}model = {model}           # a name of the hub (owner/name), or a model folder
output_dir = "outputs/my-run"     # its name is the folder's; logs, metrics, checkpoints and weights
max_steps = 100
batch_size = 64                   # rollouts of a step, a multiple of rollouts_per_example
rollouts_per_example = 8          # which are compared with each other
# learning_rate = 1e-4
# lora_alpha = 16                 # a low-rank adapter is trained, of rank 16
# max_async_level = 2             # steps that sampling may be ahead of training; 0 is synchronous
# oversampling_factor = 2.0
# env_file = ["secrets.env"]      # NAME=value lines, for env workers alone
# checkpoint_id = "RUN/step_20"   # begin with what another run has stored

[sampling]
max_tokens = 512                  # longest completion of one turn
# temperature = 1.0

[[env]]                           # any installed verifiers environment; repeat it for several
id = {environment}
# args = {{ max_turns = 4 }}        # the environment's own settings
# taskset = {{ split = "train" }}   # its taskset's

# [val]                           # measured on examples that are held out of training
# num_examples = 64
# interval = 10

# [eval]
# interval = 20
# num_examples = 64
# [[eval.env]]
# id = {environment}
# name = "evaluation"

# [buffer]
# online_difficulty_filtering = true

# [checkpoints]
# interval = 20                   # steps between checkpoints and model folders
# keep_cloud = 5                  # of each, in the store; -1 keeps all

# [adapters]
# interval = 20                   # steps between adapters in the store; 0: only the last one
# keep_last = 3

# [wandb]
# project = "my-project"
"""
FILL_IN = "# Fill in {names}, then run it with --dry-run.\n"


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "init", "Prints a commented config to start from, or writes it to FILE. Nothing is checked.", of_run=False
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, help="write it there, where no file is yet")
    parser.add_argument("--hosted", action="store_true", help="in the short form of Hosted Training")
    parser.add_argument("-f", "--force", action="store_true", help="write over a FILE that is there")
    parser.add_argument("--model", metavar="FOLDER", help="model folder to fill in")
    parser.add_argument("--env", metavar="ID", help="environment to fill in")
    chosen = parser.parse_args(arguments)
    given = (chosen.model, chosen.env)
    if any(value is not None and ("\n" in value or not value) for value in given):
        print("primerl run init: --model and --env each take one line of text", file=sys.stderr)
        return BAD_INPUT
    # TOML's basic strings are JSON's.
    model = json.dumps(chosen.model or "path/to/model", ensure_ascii=False)
    environment = json.dumps(chosen.env or "my-environment", ensure_ascii=False)
    names = "model and the environment's id" if chosen.hosted else "model.path and the environment's id"
    missing = "" if all(given) else FILL_IN.format(names=names)
    text = (HOSTED if chosen.hosted else TEMPLATE).format(missing=missing, model=model, environment=environment)
    if chosen.file is None:
        print(text, end="")
        return 0
    return _write(chosen.file, text, over=chosen.force)


def _write(file: Path, text: str, *, over: bool) -> int:
    try:
        with file.open("w" if over else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        return fail(f"{file} is there already; give another name, or --force to write over it", title="Nothing written")
    except OSError as error:
        return fail(f"{file} cannot be written: {error}", title="Nothing written")
    print(f"wrote {file}; `primerl rl @ {file} --dry-run` checks it")
    return 0
