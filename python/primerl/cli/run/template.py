"""`primerl run init`: a config to start from."""

from __future__ import annotations

import json
import sys

from primerl.cli.arguments import parse
from primerl.cli.run.common import BAD_INPUT, parser_of

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
interval = 20                     # steps between checkpoints, from which a run that was stopped goes on
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

# [store]                         # copy checkpoints and weights away while the run goes on (docs/runs.md)
# url = "s3://bucket/primerl"
"""
FILL_IN = "# Fill in model.path and the environment's id, then run it with --dry-run.\n"


def main(arguments: list[str]) -> int:
    parser = parser_of(
        "init", "Prints a commented config to start from: primerl run init > rl.toml. Nothing is checked.", of_run=False
    )
    parser.add_argument("--model", metavar="FOLDER", help="model folder to fill in")
    parser.add_argument("--env", metavar="ID", help="environment to fill in")
    chosen = parse(parser, arguments)
    if isinstance(chosen, int):
        return chosen
    given = (chosen.model, chosen.env)
    if any(value is not None and ("\n" in value or not value) for value in given):
        print("primerl run init: --model and --env each take one line of text", file=sys.stderr)
        return BAD_INPUT
    # TOML's basic strings are JSON's.
    model = json.dumps(chosen.model or "path/to/model", ensure_ascii=False)
    environment = json.dumps(chosen.env or "my-environment", ensure_ascii=False)
    missing = "" if all(given) else FILL_IN
    print(TEMPLATE.format(missing=missing, model=model, environment=environment), end="")
    return 0
