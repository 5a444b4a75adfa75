"""The configs, the list of endpoints and the guidance that `primerl lab setup` writes.

Each config names the workspace's example environment and an active model, with its siblings as comments. Evaluations
and prompt optimisation have the form of verifiers' files, training has the short form of Hosted Training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from primerl.workspace import scaffold
from primerl.workspace.names import module_of
from primerl.workspace.scaffold import Files

EXAMPLE = "sums"
"""Name of the workspace's example environment."""


@dataclass(frozen=True)
class Family:
    """Models of one kind, the first of them active in the files."""

    models: tuple[str, ...]
    batch_size: int = 128
    """Rollouts of a training step."""


FAMILIES = {
    "qwen-3": Family(
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B"),
    ),
    "qwen-3-moe": Family(("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B-Thinking-2507"), 256),
    "llama-3": Family(
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
    ),
    "gpt-oss": Family(("openai/gpt-oss-20b",), 256),
}

ENDPOINTS = """\
# Servers by names of your own: `primerl eval run ENV -m NAME` and `-m NAME` of `primerl gepa run` look here first.
# `key` NAMES the environment variable that holds the key, which is in no file. Any OpenAI-compatible server will do.

[[endpoint]]
endpoint_id = "gpt-4.1-mini"
model = "gpt-4.1-mini"
url = "https://api.openai.com/v1"
key = "OPENAI_API_KEY"

[[endpoint]]
endpoint_id = "local"               # `primerl inference --model.path FOLDER --port 8000`, vLLM, ...
model = "local"
url = "http://127.0.0.1:8000/v1"
key = "VLLM_API_KEY"                # of a server without keys: any text

# [[endpoint]]
# endpoint_id = "qwen3-235b"
# model = "qwen/qwen3-235b-a22b-2507"
# url = "https://openrouter.ai/api/v1"
# key = "OPENROUTER_API_KEY"
"""
RL = """\
# Training by reinforcement learning, of a low-rank adapter, in the short form of Hosted Training.
#   primerl rl @ @FILE@ --dry-run        checks everything and starts nothing
#   primerl rl @ @FILE@                  trains, in a new folder of outputs/rl
@MODELS@
max_steps = 100
batch_size = @BATCH@                    # rollouts of a step, a multiple of rollouts_per_example
rollouts_per_example = 8            # which are compared with each other
# learning_rate = 1e-4
# lora_alpha = 16

[sampling]
max_tokens = 512                    # longest answer of one turn
# temperature = 1.0

[[env]]                             # repeat it for several
id = "@ENV@"                          # `primerl env install @ENV@` installs it
# args = {}                         # the environment's own settings

[env.taskset]
split = "train"

[val]                               # measured on examples that are held out of training
num_examples = 64
interval = 10

# [eval]
# interval = 20
# [[eval.env]]
# id = "@ENV@"
# name = "@ENV@-eval"
# taskset = { split = "eval" }

# [checkpoints]
# interval = 20

# [wandb]
# project = "my-project"
"""
ADVANCED = """\
# What the other files of this folder leave at its default, written out.
#   primerl rl @ @FILE@ --dry-run        checks everything and starts nothing
@MODELS@
max_steps = 200
batch_size = @BATCH@
rollouts_per_example = 16
learning_rate = 5e-5
lora_alpha = 32
oversampling_factor = 2.0           # rollouts in flight, as a multiple of batch_size
max_async_level = 2                 # steps that sampling may be ahead of training; 0 is synchronous
trajectory_strategy = "interleaved"
# env_files = ["secrets.env"]       # NAME=value lines, for env workers alone

[sampling]
max_tokens = 1024
temperature = 0.7

[[env]]
id = "@ENV@"

[env.taskset]
split = "train"
num_examples = 2048

[val]
num_examples = 64
interval = 5

[eval]
interval = 20
num_examples = 64
rollouts_per_example = 1
eval_base_model = true

[[eval.env]]
id = "@ENV@"
name = "@ENV@-eval"
taskset = { split = "eval" }

[buffer]
online_difficulty_filtering = true  # groups without signal make room for others
easy_threshold = 0.9
hard_threshold = 0.1

[checkpoints]
interval = 20
keep_cloud = 5

[adapters]
interval = 20
keep_last = 3
"""
EVAL = """\
# An evaluation: what an environment measures of a model.
#   primerl eval run @FILE@ --dry-run    checks everything and starts nothing
#   primerl eval run @FILE@              measures; results are in a new folder of outputs/eval
@MODELS@
# endpoint_id = "gpt-4.1-mini"      # in place of model: a server of configs/endpoints.toml
max_tokens = 512
temperature = 0.7
num_examples = 64                   # -1: all of them
rollouts_per_example = 4            # the k of avg@k and pass@k
max_concurrent = 32

[[eval]]                            # repeat it for several
env_id = "@ENV@"

[eval.taskset]
split = "eval"
"""
GEPA = """\
# Optimises the environment's system prompt; the model stays as it is.
#   primerl gepa run @FILE@ --dry-run    checks everything and starts nothing
#   primerl gepa run @FILE@
# The model is served here, unless its name is one of configs/endpoints.toml.
@MODELS@
reflection_model = "gpt-4.1-mini"   # who proposes new prompts, of configs/endpoints.toml
max_tokens = 1024
output_dir = "outputs/gepa/@STEM@"

[[env]]
id = "@ENV@"

[gepa]
max_calls = 500                     # rollouts, at most one iteration more
num_train = 100
num_val = 50
minibatch_size = 3                  # examples of one reflection
max_concurrent = 32
"""
FULL = """\
# Training in primerl's own form, which has every key (`primerl rl --help-all`): full fine-tuning on this machine.
#   primerl rl @ @FILE@ --dry-run        checks everything and starts nothing
#   primerl rl @ @FILE@
output_dir = "outputs/@ENV@"
max_steps = 100
seq_len = 2048                      # longest sequence: prompt and completion of all turns, in tokens

[model]
path = "@MODEL@"           # a model folder, or a name of the hub

[trainer.optim]
lr = 1e-6

# [trainer.model.lora]              # train a low-rank adapter instead; then with lr = 1e-4
# rank = 16
# alpha = 32

[ckpt]
interval = 20                       # steps between checkpoints, from which a stopped run resumes

[orchestrator]
batch_size = 128
group_size = 8
max_async_level = 2

[orchestrator.sampling]
max_tokens = 512

[[orchestrator.train.env]]
id = "@ENV@"
taskset = { split = "train" }

[[orchestrator.eval.env]]
id = "@ENV@"
name = "@ENV@-eval"
interval = 20
num_examples = 64
taskset = { split = "eval" }
"""
AGENTS = """\
# Working in this folder

A workspace of primerl: environments, and configs that measure models on them and train models with them.

| folder | what |
|---|---|
| `environments/<name>/` | one package per environment: `primerl env init NAME`, `primerl env install NAME` |
| `configs/endpoints.toml` | servers by name; keys are in environment variables, never in files |
| `configs/eval/`, `configs/gepa/`, `@TRAIN@/` | evaluations, prompt optimisation, training |
| `outputs/` | what commands write: one folder per run |

## Order of work
1. Write the environment and its test; `python -m pytest environments/<name>` runs in seconds and needs no model.
2. `primerl eval run NAME -m MODEL -n 8 -r 2`: read the rollouts in `outputs/eval/<run>/results.jsonl`, not only the
   mean. Is the reward what you would give?
3. Rewards have to differ between answers to one example, else there is nothing to learn.
4. `primerl rl @ FILE --dry-run` starts nothing; the message names the key and the line of a mistake.
5. `primerl rl @ FILE`, then `primerl top RUN`, `primerl report RUN`, `primerl page RUN`.

## Rules
- `primerl config explain KEY` says what a key means; `primerl COMMAND --help` lists options. Do not guess keys.
- Do not edit files in `outputs/`. A run is resumed by the command that started it.
- Commit no keys: `primerl secret set NAME` keeps them for env workers.
"""
ENVIRONMENTS_AGENTS = """\
# Writing an environment

A package with a verifiers v1 taskset: `environments/@MODULE@/@MODULE@/taskset.py` is a small complete one.

- `Taskset.load` yields tasks: the same ones, in the same order, for the same settings; randomness has a seed in them.
- A task's data holds the prompt and what its rewards need. `system_prompt` is what prompt optimisation changes.
- `@vf.reward` functions are added; `@vf.metric` is reported only. Both take the trace and return a number.
- Splits share no example: make membership a property of the example itself.
- A reward that nearly every rollout gets, or none, teaches nothing.
- Test rewards on replies written by hand, bad ones first: empty, cut off, two answers, the right one in the wrong form.
- An exception fails the rollout, which is tried again and never trained: it is for machinery, not for answers.
"""
IGNORED = """\
.env
outputs/
environments/*/dist/
environments/*/outputs/
__pycache__/
*.egg-info/
.venv/
"""


def files(*, full_form: bool, guidance: bool) -> Files:
    """The workspace's files by paths within it.

    Args:
        full_form: One training config in primerl's own form, `configs/prime-rl`, in place of `configs/rl`.
        guidance: With `AGENTS.md` files.
    """
    package = PurePosixPath("environments") / module_of(EXAMPLE)
    found = {PurePosixPath("configs/endpoints.toml"): ENDPOINTS}
    for name, family in FAMILIES.items():
        for kind, text in (("eval", EVAL), ("gepa", GEPA), *([] if full_form else [("rl", RL)])):
            path = PurePosixPath("configs") / kind / f"{name}.toml"
            found[path] = _filled(text, path, family)
    if full_form:
        path = PurePosixPath("configs/prime-rl") / f"{EXAMPLE}.toml"
        found[path] = _filled(FULL, path, FAMILIES["qwen-3"])
    else:
        path = PurePosixPath("configs/rl/qwen-3-advanced.toml")
        found[path] = _filled(ADVANCED, path, FAMILIES["qwen-3"])
    found |= {package / relative: text for relative, text in scaffold.files(EXAMPLE).items()}
    if guidance:
        training = "configs/prime-rl" if full_form else "configs/rl"
        found[PurePosixPath("AGENTS.md")] = AGENTS.replace("@TRAIN@", training)
        found[PurePosixPath("environments/AGENTS.md")] = ENVIRONMENTS_AGENTS.replace("@MODULE@", module_of(EXAMPLE))
    found[PurePosixPath(".gitignore")] = IGNORED
    return found


def _filled(text: str, path: PurePosixPath, family: Family) -> str:
    active, *others = family.models
    models = "\n".join([f'model = "{active}"', *(f'# model = "{other}"' for other in others)])
    values = {"@FILE@": path, "@MODELS@": models, "@MODEL@": active, "@BATCH@": family.batch_size, "@ENV@": EXAMPLE}
    return scaffold.filled(text, {**values, "@STEM@": path.stem})
