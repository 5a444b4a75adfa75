"""Files of prime-rl and verifiers: what becomes of them. The files are of our own writing."""

from __future__ import annotations

import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from primerl.config.command_line.flags import look_up
from primerl.config.command_line.load import load
from primerl.config.describe import forms
from primerl.config.errors.fail import ConfigError
from primerl.config.foreign import KINDS, Kind, Translation, kind_of, rows, translate
from primerl.config.foreign.rows import ONE, REST, expanded
from primerl.config.foreign.table import EVAL, EVALS, GEPA, RL, SFT, table
from primerl.config.foreign.translate import NOT_KNOWN
from primerl.config.hosted.load_run import load_run
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.gepa import GepaConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.sft import SFTConfig

NEW = """
max_steps = 20
seq_len = 512
clean = true

[run]
name = "mine"

[model]
name = "owner/name"

[monitors.wandb]
project = "words"

[weight_broadcast]
type = "nccl"
timeout = 90

[ckpt]
interval = 10

[orchestrator]
batch_size = 32
group_size = 4
max_off_policy_steps = 1

[orchestrator.concurrency]
max_inflight = 64

[orchestrator.algo]
type = "max_rl"

[orchestrator.renderer]
name = "prime-qwen3"

[orchestrator.train.sampling]
max_completion_tokens = 512

[orchestrator.train.sampling.extra_body.chat_template_kwargs]
enable_thinking = false

[[orchestrator.train.source]]
name = "words"

[orchestrator.train.source.env.taskset]
id = "reverse-text"
split = "train"

[orchestrator.train.source.env.agent]
max_turns = 3

[orchestrator.train.source.env.agent.harness]
id = "null"

[orchestrator.train.source.env.agent.runtime]
type = "subprocess"

[[orchestrator.train.source]]

[orchestrator.train.source.env.taskset]
id = "sort-letters"

[orchestrator.train.source.env.agent.harness]
id = "bash"

[orchestrator.train.source.env.agent.timeout]
rollout = 3600

[orchestrator.eval]
num_examples = 16
skip_first_step = true

[[orchestrator.eval.source]]
interval = 5

[orchestrator.eval.source.env.taskset]
id = "reverse-text"

[trainer.model]
attn = "flash_attention_3"

[trainer.model.compile]

[trainer.model.lora]
rank = 8

[trainer.optim]
type = "muon"
lr = 1e-4

[trainer.scheduler]
type = "linear"
min_lr = 1e-5

[trainer.loss]
dppo_mask_high = 0.3

[deployment]
num_train_gpus = 2
num_infer_gpus = 4

[inference.vllm]
tensor_parallel_size = 2
gpu_memory_utilization = 0.8
"""
OLD = """
max_steps = 20

[model]
name = "owner/name"

[wandb]
project = "words"

[ckpt]
resume_step = 10

[orchestrator]
batch_size = 32
rollouts_per_example = 4
training_mode = "opd"
max_inflight_rollouts = 48

[orchestrator.teacher.client]
base_url = "http://localhost:8001/v1"

[orchestrator.teacher.model]
name = "owner/teacher"

[orchestrator.train.sampling]
max_tokens = 128

[[orchestrator.train.env]]
id = "reverse-text"
args = { split = "train" }
num_workers = "auto"
max_total_completion_tokens = -1
"""
PARTS = {
    "orch.toml": 'max_steps = 5\nbatch_size = 8\ngroup_size = 4\n[[train.source]]\nenv = { taskset = { id = "e" } }\n',
    "train.toml": "max_steps = 5\n[model]\nseq_len = 256\n[optim]\nlr = 3e-6\n",
    "infer.toml": '[model]\nname = "owner/name"\n',
}
WHOLE = {"model": {"path": "m"}, "max_steps": 1, "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}}


def read(text: str, kind: Kind | None = None) -> Translation:
    tree = tomllib.loads(text)
    found = kind_of(tree)
    assert found is not None
    assert kind in (None, found)
    return translate(tree, found)


def whole(made: Translation) -> None:
    """Nothing of it is lost that matters, and our own checks take it."""
    assert not made.refused, made.refused
    forms.FORMS[made.kind.form].cls.model_validate(deepcopy(made.tree))


def leaf_keys(repository: Path) -> dict[str, list[str]]:
    parts = re.split(r"^\[(\w+)\]$", (repository / "tests" / "foreign_keys.txt").read_text("utf-8"), flags=re.MULTILINE)
    return {name: keys.split() for name, keys in zip(parts[1::2], parts[2::2], strict=True)}


def test_a_file_of_the_present_schema_becomes_ours() -> None:
    made = read(NEW, RL)
    whole(made)
    assert made.tree == {
        "max_steps": 20,
        "seq_len": 512,
        "clean_output_dir": True,
        "output_dir": "outputs/mine",
        "model": {"path": "owner/name"},
        "wandb": {"project": "words"},
        "ckpt": {"interval": 10, "keep_last": 1_000_000},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 4,
            "max_off_policy_steps": 1,
            "max_async_level": 1,
            "oversampling_factor": 2.0,
            "algorithm": {"type": "maxrl"},
            "sampling": {"max_tokens": 511, "chat_template_kwargs": {"enable_thinking": False}},
            "timeouts": {"engine_update_s": 90, "rollout_s": 4020},
            "train": {
                "env": [
                    {
                        "name": "words",
                        "id": "reverse-text",
                        "taskset": {"split": "train"},
                        "args": {"agent": {"max_turns": 3}},
                    },
                    {
                        "id": "sort-letters",
                        "args": {
                            "agent": {
                                "harness": {"id": "bash"},
                                "runtime": {"type": "prime"},
                                "timeout": {"rollout": 3600},
                            }
                        },
                    },
                ]
            },
            "eval": {
                "env": [
                    {
                        "id": "reverse-text",
                        "harness": {"id": "default"},
                        "interval": 5,
                        "num_examples": 16,
                        "base_model": False,
                        "sampling": {"temperature": 1.0},
                    }
                ]
            },
        },
        "trainer": {
            "compile": True,
            "ranks": 2,
            "model": {"lora": {"rank": 8}},
            "weights": {"transport": "collective"},
            "loss": {"type": "dppo", "args": {"mask_high": 0.3}},
            "optim": {
                "type": "muon",
                "args": {"momentum": 0.95},
                "lr": 1e-4,
                "weight_decay": 0.01,
                "betas": [0.9, 0.95],
                "schedule": "wsd",
                "warmup_steps": 10,
                "decay_steps": 10,
                "final_lr_ratio": pytest.approx(0.1),
            },
        },
        "inference": {"replicas": 2, "vllm": {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.8}},
    }
    assert {left.theirs[-1] for left in made.notes} == {"name", "attn"}


def test_a_file_of_the_schema_before_becomes_ours() -> None:
    made = read(OLD, RL)
    whole(made)
    orchestrator = made.tree["orchestrator"]
    assert made.tree["ckpt"]["resume_step"] == 10
    assert made.tree["inference"] == {"replicas": 0}
    assert orchestrator["engines"] == ["http://localhost:8000"]  # no [inference]: servers that run already
    assert orchestrator["training_mode"] == "opd"
    assert orchestrator["teacher"] == {"client": {"base_url": "http://localhost:8001/v1", "model": "owner/teacher"}}
    assert (orchestrator["group_size"], orchestrator["oversampling_factor"]) == (4, 1.5)
    assert orchestrator["train"]["env"] == [{"id": "reverse-text", "args": {"split": "train"}}]


def test_unset_keys_mean_what_their_program_takes() -> None:
    source = '[[orchestrator.train.source]]\nenv = { taskset = { id = "e" } }'
    made = read(f"[orchestrator]\nbatch_size = 8\ngroup_size = 2\n{source}\n[inference]\n[trainer]\n")
    whole(made)
    config = RLConfig.model_validate(made.tree)
    assert (config.trainer.optim.lr, config.trainer.optim.weight_decay) == (1e-6, 0.01)
    assert config.trainer.optim.betas == (0.9, 0.999)
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.inference.replicas == 1
    assert config.orchestrator.sampling.max_tokens == 2047  # up to the context
    assert {one.ours for one in made.defaults} >= {"trainer.optim.lr", "trainer.optim.betas", "max_steps"}


def test_a_table_alone_is_enough_to_resume() -> None:
    source = '[[orchestrator.train.source]]\nenv = { taskset = { id = "e" } }'
    skip = "[trainer.ckpt]\nskip_optimizer = true\n"
    made = read(f"{source}\n{skip}[resume]")
    assert made.tree["ckpt"] == {"resume_step": -1}
    assert [left.theirs for left in made.notes if left.theirs[0] == "trainer"] == [
        ("trainer", "ckpt", "skip_optimizer")
    ]
    made = read(f"{source}\n{skip}[resume]\nstep = 5")
    assert made.tree["ckpt"] == {"resume_step": 5}
    assert [left.theirs[-1] for left in made.refused] == ["skip_optimizer"]


def test_distillation_takes_its_teacher_along() -> None:
    text = """[orchestrator.algo]
type = "sft"
sampling = { source = { name = "owner/teacher", base_url = "http://t/v1", api_key_var = "KEY" } }
[[orchestrator.train.source]]
env = { taskset = { id = "e" } }
[orchestrator]
group_size = 4
batch_size = 8
"""
    made = read(text)
    whole(made)
    client = {"base_url": "http://t/v1", "model": "owner/teacher", "api_key_env": "KEY"}
    assert made.tree["orchestrator"]["teacher"]["client"] == client
    assert made.tree["orchestrator"]["training_mode"] == "sft"


def test_each_environment_keeps_its_algorithm_teacher_groups_and_sampling() -> None:
    text = """[orchestrator]
group_size = 4
batch_size = 16
[orchestrator.algo]
type = "opd"
teacher = { name = "owner/teacher", base_url = "http://t/v1" }
[[orchestrator.train.source]]
env = { taskset = { id = "of-the-run" } }
[[orchestrator.train.source]]
env = { taskset = { id = "rewarded" } }
group_size = 8
sampling = { temperature = 0.7, max_completion_tokens = 99, extra_body = { top_k = 20 } }
algo = { type = "max_rl" }
[[orchestrator.train.source]]
env = { taskset = { id = "imitated" } }
algo = { type = "sft", sampling = { source = { name = "owner/other", base_url = "http://o/v1" } } }
[[orchestrator.train.source]]
env = { taskset = { id = "foreseen" } }
algo = { type = "echo", roles = { user = { alpha = 0.3 } } }
[[orchestrator.train.source]]
env = { taskset = { id = "shown" } }
algo = { type = "opsd", demo_key = "answer" }
"""
    made = read(text)
    whole(made)
    orchestrator = RLConfig.model_validate(made.tree).orchestrator
    of_the_run, rewarded, imitated, foreseen, shown = orchestrator.train.env
    assert orchestrator.training_mode == "opd"
    assert (of_the_run.training_mode, of_the_run.teacher, of_the_run.algorithm) == (None, None, None)
    assert (rewarded.training_mode, rewarded.group_size) == ("rl", 8)
    assert rewarded.algorithm is not None
    assert rewarded.algorithm.type == "maxrl"
    sampling = rewarded.sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k, sampling.truncated) == (0.7, 99, 20, "replay")
    assert imitated.training_mode == "sft"
    assert imitated.teacher is not None
    assert imitated.teacher.client.model == "owner/other"
    assert foreseen.algorithm is not None
    assert foreseen.algorithm.echo is not None
    assert (foreseen.algorithm.echo.user, foreseen.algorithm.echo.tool) == (0.3, 0.0)
    assert shown.training_mode == "opsd"
    assert shown.demonstration is not None
    assert shown.demonstration.key == "answer"
    assert read("[orchestrator.algo]\ntype = 'echo'").tree["orchestrator"]["algorithm"]["echo"] == {"tool": 0.1}


def test_keys_of_algorithms_are_translated_where_there_is_the_algorithm() -> None:
    source = '[[orchestrator.train.source]]\nenv = { taskset = { id = "e" } }\ngroup_size = 2'
    algo = (
        "[orchestrator.algo]\ntype = 'NAME'\nlength_penalty = { type = 'linear', num_turns_weight = 0.5 }\ndecay = 0.5"
    )
    made = read(f"{algo}\n{source}".replace("NAME", "rae"))
    there = look_up(RLConfig, ["orchestrator", "algorithm", "decay"]).kind == "known"
    refused = {left.theirs[-1] for left in made.refused}
    assert refused.isdisjoint({"type", "decay"}) == there
    algorithm = made.tree["orchestrator"].get("algorithm", {})
    assert (algorithm.get("type"), algorithm.get("decay")) == (("rae", 0.5) if there else (None, None))
    assert ("num_turns_weight" in refused) != ("length_penalty" in algorithm)
    made = read(f"{algo}\n{source}".replace("NAME", "no_such"))
    assert "no_such is not among the algorithms here, which are grpo" in " ".join(left.why for left in made.refused)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ('type = "rae"\ndecay = 0.5', {"type": "rae", "decay": 0.5}),
        (
            'type = "hierarchical_grpo"\nepisode_agents = ["solver"]',
            {"type": "hierarchical_grpo", "episode_agents": ["solver"]},
        ),
        (
            'type = "grpo"\nlength_penalty = { type = "linear", num_turns_weight = 0.5 }',
            {"type": "grpo", "length_penalty": {"num_turns_weight": 0.5}},
        ),
    ],
)
def test_algorithms_are_translated_for_the_run_and_for_one_environment(theirs: str, ours: dict[str, object]) -> None:
    run = '[model]\nname = "owner/name"\n[orchestrator]\nbatch_size = 4\ngroup_size = 2'
    source = '[[orchestrator.train.source]]\nenv = { taskset = { id = "reverse-text" } }'
    made = read(f"{run}\n[orchestrator.algo]\n{theirs}\n{source}")
    whole(made)
    assert made.tree["orchestrator"]["algorithm"] == ours
    made = read(f"{run}\n{source}\n[orchestrator.train.source.algo]\n{theirs}")
    whole(made)
    assert made.tree["orchestrator"]["train"]["env"][0]["algorithm"] == ours


def test_machines_are_counted_in_engines_of_their_size() -> None:
    text = """[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 3
num_infer_replicas = 2
[slurm]
job_name = "j"
[inference.vllm]
tensor_parallel_size = 4
[orchestrator]
batch_size = 8
group_size = 4
train = { source = [{ env = { taskset = { id = "e" } } }] }
concurrency = { initial_inflight = 240 }
"""
    made = read(text)
    whole(made)
    assert made.tree["deployment"] == {"num_train_nodes": 2, "num_infer_nodes": 6, "gpus_per_node": 8}
    assert made.tree["trainer"]["ranks"] == 16
    assert made.tree["inference"]["replicas"] == 12
    assert made.tree["orchestrator"]["admission"]["start_per_engine"] == 20


def test_fine_tuning_counts_tokens_and_makes_tables_of_lists() -> None:
    made = read(
        """max_steps = 5
[model]
name = "owner/name"
[model.lora]
rank = 4
[data]
name = "owner/rows"
subsets = ["a", "b"]
splits = ["train", "test"]
probabilities = [0.25, 0.75]
batch_size = 4
seq_len = 1024
micro_batch_size = 2
[data.loss_mask]
user = true
[val]
interval = 7
[val.data]
name = "owner/held"
[optim]
lr = 2e-5
[scheduler]
type = "cosine"
warmup_steps = 3
[deployment]
num_train_gpus = 2
""",
        SFT,
    )
    whole(made)
    assert made.tree["data"] == {
        "subsets": [
            {"path": "owner/rows", "name": "a", "split": "train", "ratio": 0.25},
            {"path": "owner/rows", "name": "b", "split": "test", "ratio": 0.75},
        ],
        "batch_size": 4096,
        "seq_len": 1024,
        "loss_mask": {"user": True},
    }
    assert made.tree["val"] == {"interval": 7, "at_start": False, "data": {"path": "owner/held"}}
    assert made.tree["ranks"] == 2
    assert made.tree["model"] == {"path": "owner/name", "lora": {"rank": 4}}
    assert made.tree["optim"]["schedule"] == "cosine"
    assert made.tree["optim"]["warmup_steps"] == 3


def test_evaluations_of_both_programs() -> None:
    made = read(
        """model = "m"
[eval.client]
base_url = "https://h/v1"
api_key_var = "KEY"
[eval]
num_examples = 8
[eval.concurrency]
max_inflight = 4
[[eval.source]]
group_size = 2
env = { taskset = { id = "e" }, agent = { harness = { id = "null" }, timeout = { rollout = 60 } } }
""",
        EVALS,
    )
    whole(made)
    config = EvalConfig.model_validate(made.tree)
    assert (config.model, config.base_url, config.api_key_env) == ("m", "https://h/v1", "KEY")
    assert (config.num_examples, config.concurrency, config.env[0].rollouts_per_example) == (8, 4, 2)
    assert config.env[0].args == {"agent": {"timeout": {"rollout": 60}}}
    assert config.timeouts.rollout_s == 126

    made = read('num_tasks = 5\nnum_rollouts = 3\n[env.taskset]\nid = "e"\nsplit = "s"\n[env.player]\nmax_turns = 8')
    whole(made)
    config = EvalConfig.model_validate(made.tree)
    assert (config.num_examples, config.rollouts_per_example) == (5, 3)
    assert (config.env[0].id, config.env[0].taskset) == ("e", {"split": "s"})
    assert config.env[0].args == {"player": {"max_turns": 8}}
    # A seat without a harness gets verifiers' own default, not ours; the file's runtime stays.
    assert config.env[0].harness == {"id": "default"}
    made = read('num_tasks = 5\n[env]\ntaskset.id = "e"\nagent = { max_turns = 8, runtime = { type = "subprocess" } }')
    whole(made)
    assert made.tree["env"][0]["harness"] == {"id": "default"}
    assert made.tree["env"][0]["args"] == {"agent": {"max_turns": 8, "runtime": {"type": "subprocess"}}}
    # A seat that names the chat keeps it where others name none.
    text = 'num_tasks = 5\n[env]\nid = "user-sim"\ntaskset.id = "e"\nassistant.harness.id = "null"'
    made = read(text)
    whole(made)
    assert made.tree["env"][0]["harness"] == {"id": "default"}
    assert made.tree["env"][0]["args"] == {"id": "user-sim", "assistant": {"harness": {"id": "null"}}}
    assert read(f"{text}\nassistant.timeout.rollout = 'soon'").refused[0].why == "it is 'soon'; give seconds"
    made = read('num_tasks = 5\n[env]\ntaskset.id = "e"\nharness.id = "bash"')
    assert "a harness belongs to a seat" in made.refused[0].why
    assert config.base_url == "https://api.pinference.ai/api/v1"
    assert config.api_key_env == "PRIME_API_KEY"

    made = read("""model = "m"
max_tokens = 64
[[eval]]
env_id = "owner/e"
rollouts_per_example = 2
[[eval]]
env_id = "f"
env_args = { split = "s" }
""")
    whole(made)
    config = EvalConfig.model_validate(made.tree)
    assert [entry.id for entry in config.env] == ["owner/e", "f"]
    assert config.env[1].args == {"split": "s"}
    assert (config.num_examples, config.rollouts_per_example, config.max_tokens) == (5, 3, 64)


def test_prompt_optimisation_has_one_form() -> None:
    published = """model = "m"
reflection_model = "r"
[[env]]
env_id = "e"
[gepa]
max_calls = 9
num_train = 4
[sampling]
max_tokens = 64
"""
    newer = """model = "m"
reflection_model = "r"
max_total_rollouts = 9
num_train = 4
[env]
taskset.id = "e"
agent.harness.id = "null"
[sampling]
max_tokens = 64
"""
    made = read(published, GEPA)
    whole(made)
    assert read(newer, GEPA).tree == made.tree
    config = GepaConfig.model_validate(made.tree)
    assert (config.env[0].id, config.gepa.max_calls, config.gepa.num_train, config.max_tokens) == ("e", 9, 4, 64)
    assert config.teacher().model == "r"


@pytest.mark.parametrize("name", ["rl", "sft", "evals"])
def test_every_leaf_key_is_translated_or_has_a_sentence(repository: Path, name: str) -> None:
    kind = {"rl": RL, "sft": SFT, "evals": EVALS}[name]
    keys = leaf_keys(repository)[name]
    assert len(keys) > {"rl": 440, "sft": 280, "evals": 60}[name]
    for key in keys:
        for value in (1, "x", True, [], {"x": 1}):
            tree: Any = value
            for part in reversed(key.split(".")):
                tree = {part.removesuffix("[]"): [tree] if part.endswith("[]") else tree}
            made = translate(tree, kind)
            unknown = [left for left in made.refused if left.subject == NOT_KNOWN]
            # A table where a value is expected may have unknown keys.
            assert not unknown or value == {"x": 1}, (key, value, unknown)
            assert all(left.why and left.subject for left in made.refused + made.notes), key


def test_every_row_has_a_key_of_ours_or_a_reason() -> None:
    for kind in KINDS:
        for row in expanded(rows(kind)):
            assert row.ours is not None or (row.why and row.subject), row
            if not row.ours or row.rule.__name__ in ("said", "where_known"):
                continue
            path = row.ours + row.theirs.rsplit(".", 1)[-1] if row.ours.endswith(".") else row.ours
            parts = [part for part in re.split(r"\.|\[(\d*)\]", path) if part is not None]
            place = [0 if part == "" else int(part) if part.isdigit() else part for part in parts]
            place = [part for part in _without_doubles(place) if part not in (ONE, REST)]
            assert look_up(forms.FORMS[kind.form].cls, place).kind in ("known", "any", "unnumbered"), row


def _without_doubles(place: list[Any]) -> list[Any]:
    """`a[].b` is split into a, 0 and an empty part, which is read as 0 too."""
    return [part for number, part in enumerate(place) if number == 0 or not part == place[number - 1] == 0]


def test_patterns_prefer_the_nearest_row() -> None:
    found = table(RL).find("orchestrator.train.source[].env.agent.harness.id")
    assert found is not None
    assert found[1] == ("agent",)
    found = table(RL).find("orchestrator.train.source[].env.agent.max_turns")
    assert found is not None
    assert found[1] == ("agent.max_turns",)
    assert table(RL).find("orchestrator.nothing") is None


def refusal(text: str, *flags: str) -> str:
    Path("theirs.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_run(["@", "theirs.toml", *flags], program="primerl rl")
    return str(caught.value)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_refused_what_would_change_what_is_learnt() -> None:
    said = refusal(NEW + '\n[trainer.data.fake]\n[model.vlm]\nvision_encoder_attr = "v"\n[extra]\nkey = 1\n')
    first, *others = said.splitlines()
    assert first.startswith("theirs.toml is a file of prime-rl's `rl`")
    assert "`primerl convert theirs.toml`" in first
    assert any(line.startswith("trainer.data.fake (in theirs.toml, line ") for line in others)
    assert any(line.startswith("model.vlm.vision_encoder_attr (in theirs.toml") for line in others)
    assert any(line.startswith("extra.key") and "prime-rl has no such key" in line for line in others)
    assert len(others) == 3


def test_our_own_checks_name_the_place_in_their_file() -> None:
    said = refusal(NEW.replace("batch_size = 32", "batch_size = 33"))
    line = NEW.splitlines().index("batch_size = 32") + 1
    assert f"(in theirs.toml, line {line})" in said
    assert "must be a multiple of" in said


def test_environments_that_are_not_installed_are_named_together() -> None:
    text = NEW.replace('"sort-letters"', '"no-such-words"').replace(
        'id = "reverse-text"\nsplit', 'id = "no-such-text"\nsplit'
    )
    said = refusal(text)
    assert said.startswith("environments 'no-such-text', 'no-such-words' are not installed for this Python")
    assert "uv pip install" in said


def test_what_has_no_counterpart_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("once.toml").write_text(NEW, encoding="utf-8")
    arguments = ["@", "once.toml", "--model.name", "other/model", "--trainer.optim.lr", "0.5", "--no-clean"]
    for _ in range(2):
        config = load_run(arguments, program="primerl rl")
    assert (config.model.path, config.trainer.optim.lr) == ("other/model", 0.5)
    assert not config.clean_output_dir
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("once.toml: a file of prime-rl's `rl`; ")
    assert "memory and speed (trainer.model.attn)" in said


def test_fine_tuning_and_evaluation_read_them_too() -> None:
    Path("sft.toml").write_text(
        'max_steps = 1\n[model]\nname = "m"\n[data]\nname = "d"\nseq_len = 64', encoding="utf-8"
    )
    config = load(SFTConfig, ["@", "sft.toml", "--data.micro-batch-size", "1"], program="p")
    assert (config.data.batch_size, config.data.path, config.val) == (8192, "d", None)
    Path("eval.toml").write_text('num_tasks = 2\n[env.taskset]\nid = "reverse-text"', encoding="utf-8")
    measured = load(EvalConfig, ["@", "eval.toml", "--model", "m"], program="p")
    assert (measured.num_examples, measured.model, measured.api_key_env) == (2, "m", "PRIME_API_KEY")
    Path("folder").mkdir()
    assert load(EvalConfig, ["@", "eval.toml", "--model", "folder"], program="p").base_url is None  # it is served here


def test_a_single_foreign_key_in_a_file_of_ours_has_its_own_sentence() -> None:
    import tomli_w

    known = {key for row in expanded(rows(RL)) for key in [row.theirs]}
    for key in ("orchestrator.concurrency.max_inflight", "resume.step", "trainer.model.ep", "monitors.file.path"):
        assert key in known or table(RL).find(key)
        tree: dict[str, Any] = tomllib.loads(tomli_w.dumps(WHOLE))
        node = tree
        *tables, name = key.split(".")
        for part in tables:
            node = node.setdefault(part, {})
        node[name] = 1
        said = refusal(tomli_w.dumps(tree))
        assert "unknown key" not in said, said
        assert "did you mean" not in said, said
        assert "no key here: " in said or "is a list" in said, said


SMALL = """[[orchestrator.train.source]]
env = { taskset = { id = "reverse-text" }, agent = { harness = { id = "null" } } }
[orchestrator]
batch_size = 8
group_size = 2
"""


def test_a_section_that_is_none_is_not_there() -> None:
    made = read(f'slurm = "None"\nckpt = "None"\nwandb = "None"\n{SMALL}eval = "None"\n[monitors]\nwandb = "None"\n')
    whole(made)
    assert made.tree.keys().isdisjoint({"slurm", "ckpt", "wandb"})
    assert "eval" not in made.tree["orchestrator"]


def test_thinking_that_is_switched_off_stays_off() -> None:
    made = read(f"{SMALL}[orchestrator.renderer]\nenable_thinking = false\n")
    whole(made)
    assert made.tree["orchestrator"]["sampling"]["chat_template_kwargs"] == {"enable_thinking": False}
    made = read('[data]\nname = "d"\n[renderer]\nenable_thinking = false\n', SFT)
    assert [left.theirs[-1] for left in made.refused] == ["enable_thinking"]


def test_a_loss_of_their_own_is_refused_with_what_ours_gets() -> None:
    made = read(f'{SMALL}[trainer.loss]\ntype = "custom"\nimport_path = "m.f"\n')
    assert "docs/custom-losses.md" in next(left.why for left in made.refused if left.theirs[-1] == "import_path")


def test_a_name_of_the_run_goes_into_the_folder_that_a_flag_names() -> None:
    Path("named.toml").write_text(SMALL, encoding="utf-8")
    flags = ["--output-dir", "out", "--run.name", "one", "--orchestrator.train.source.0.group-size", "4"]
    config = load_run(["@", "named.toml", *flags], program="primerl rl")
    assert (config.output_dir, config.orchestrator.train.env[0].group_size) == ("out/one", 4)


def test_a_server_that_a_file_names_is_asked_whatever_folders_there_are() -> None:
    Path("tiny").mkdir()
    text = 'model = "tiny"\nclient = { base_url = "http://s/v1", api_key_var = "KEY" }\n[env]\ntaskset = { id = "e" }\n'
    made = read(text, EVAL)
    assert (made.tree["base_url"], made.tree["api_key_env"]) == ("http://s/v1", "KEY")
    assert "base_url" not in read('model = "tiny"\n[env]\ntaskset = { id = "e" }\n', EVAL).tree
