"""Which keys of the orchestrator's config do not go together: for each rule a config that breaks it, and one that only
just keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
TEXT, TOKEN = "openai_chat_completions", "openai_chat_completions_token"
SERVER = {"base_url": "http://h:1/v1", "model": "t"}
TWO_SERVERS = {**SERVER, "base_url": ["http://h:1/v1", "http://h:2/v1"]}


def run(**keys: Any) -> Config:
    """A small run of one environment `a`, with these keys."""
    return {"output_dir": "o", "max_steps": 2, "model": {"path": "m"}, "train": {"env": [{"id": "a"}]}, **keys}


def own(**keys: Any) -> Config:
    """The same, these keys the environment's."""
    return run(train={"env": [{"id": "a", **keys}]})


def measured(**keys: Any) -> Config:
    """The same, with an evaluation `e` of these keys."""
    return run(eval={"env": [{"id": "a", "name": "e", **keys}]})


def only_measured(**keys: Any) -> Config:
    """A run that trains nothing, with these keys."""
    return run(**{"max_steps": 0, "train": {"env": []}, "eval": {"env": [{"id": "a"}]}, **keys})


def environments(*entries: Config, **keys: Any) -> Config:
    """A run of these training environments, called `a`, `b` and so on."""
    return run(train={"env": [{"id": "abc"[number], **entry} for number, entry in enumerate(entries)]}, **keys)


def taught(mode: str = "opd", /, client: Config = SERVER, **keys: Any) -> Config:
    return run(training_mode=mode, teacher={"client": client}, **keys)


def algorithm(kind: str, **keys: Any) -> Config:
    return {"type": kind, **keys}


@dataclass(frozen=True)
class Rule:
    key: str
    """The key to change first; a rule may also be about the keys below it."""
    broken: Config
    kept: Config


CUSTOM, SEATS = algorithm("custom", path="m:f"), algorithm("hierarchical_grpo", episode_agents=["s"])
FILTERS = {"online_difficulty_filtering": True}
RLOO, RAE = algorithm("rloo"), algorithm("rae")
SHOWN = {"template": "x {demonstration}"}

RULES = [
    # What there is to do.
    Rule("train.env", run(train={"env": []}), run()),
    Rule("max_steps", run(max_steps=0), run(max_steps=1)),
    Rule("max_steps", only_measured(eval={"env": []}), only_measured()),
    # Names.
    Rule("train.env[0].id", environments({"id": "a b"}), environments({"id": "o/a@1"})),
    Rule("eval.env[0].id", run(eval={"env": [{"id": "o/"}]}), run(eval={"env": [{"id": "o/a"}]})),
    Rule("train.env[0]", environments({"id": "all"}), environments({"id": "all", "name": "a"})),
    Rule("eval.env[0]", measured(name="staleness_1"), measured(name="staleness")),
    Rule("train.env[1]", environments({}, {"id": "o/a"}), environments({}, {"id": "o/b"})),
    Rule("eval.env[0]", measured(name="a"), run(eval={"env": [{"id": "a"}]})),
    Rule("eval.env[0]", environments({"name": "a-eval"}, eval={"env": [{"id": "a"}]}), measured()),
    Rule("eval.env[0].validates", measured(validates="e"), measured(validates="a")),
    # Groups and batches.
    Rule("batch_size", run(batch_size=63), run(batch_size=64)),
    Rule("batch_size", own(group_size=3), own(group_size=4)),
    Rule("batch_size", environments({"group_size": 16}, {}, batch_size=8), environments({"group_size": 16}, {})),
    Rule("batch_size", run(token_batch_size=4096, batch_size=64), run(token_batch_size=4096, batch_size=128)),
    Rule("oversampling_factor", run(token_batch_size=4096, oversampling_factor=2.0), run(token_batch_size=4096)),
    Rule("min_group_size", run(min_group_size=9), run(min_group_size=8)),
    Rule("min_group_size", run(token_batch_size=4096, min_group_size=9), own(group_size=16)),
    Rule("group_size", run(group_size=1), run(group_size=2)),
    Rule("train.env[0].group_size", own(group_size=1), own(group_size=1, algorithm=RAE)),
    Rule("max_off_policy_steps", run(max_off_policy_steps=1), run(max_off_policy_steps=2)),
    # Times.
    Rule("train.env[0].rollout_s", own(rollout_s=601.0), own(rollout_s=600.0)),
    Rule("eval.env[0].rollout_s", measured(rollout_s=601.0), measured(rollout_s=600.0)),
    Rule("train.env[0].limits.time_s", own(limits={"time_s": 600.0}), own(limits={"time_s": 599.0})),
    Rule(
        "eval.env[0].limits.time_s",
        measured(rollout_s=60.0, limits={"time_s": 60.0}),
        measured(rollout_s=60.0, limits={"time_s": 59.0}),
    ),
    # The draw of examples, and admission.
    Rule("buffer.env_ratios", run(buffer={"env_ratios": [1.0, 2.0]}), run(buffer={"env_ratios": [1.0]})),
    Rule("buffer.env_ratios", environments({"ratio": 1.0}, buffer={"env_ratios": [1.0]}), own(ratio=1.0)),
    Rule("buffer.hard_threshold", run(buffer={"hard_threshold": 0.8}), run(buffer={"hard_threshold": 0.7})),
    Rule("buffer.online_difficulty_filtering", taught(buffer=FILTERS), run(buffer=FILTERS)),
    Rule("admission.start_per_engine", run(admission={"start_per_engine": 7}), run(admission={"start_per_engine": 8})),
    # Sampling.
    Rule("sampling.top_p", run(sampling={"top_p": 0.5}), run(sampling={"top_p": 0.5, "truncated": "replay"})),
    Rule("sampling.top_k", run(sampling={"top_k": 4}), run(sampling={"top_k": -1})),
    Rule("sampling.min_p", run(sampling={"min_p": 0.1}), run(sampling={"min_p": 0.0})),
    Rule("train.env[0].sampling.top_p", own(sampling={"top_p": 0.5}), own(sampling={"top_p": 1.0})),
    # Algorithms, of the run and of environments.
    Rule("algorithm.normalize_std", run(algorithm={**RLOO, "normalize_std": True}), run(algorithm=RLOO)),
    Rule("algorithm.length_penalty", run(algorithm={**RLOO, "length_penalty": {}}), run(algorithm=RLOO)),
    Rule("algorithm.decay", run(algorithm={"decay": 0.5}), run(algorithm={**RAE, "decay": 0.5})),
    Rule("algorithm.episode_agents", run(algorithm={"episode_agents": ["s"]}), run(algorithm=SEATS)),
    Rule("algorithm.episode_agents", run(algorithm=algorithm("hierarchical_grpo")), run(algorithm=SEATS)),
    Rule("algorithm.path", run(algorithm={"path": "m:f"}), run(algorithm=CUSTOM)),
    Rule("algorithm.path", run(algorithm=algorithm("custom")), run(algorithm=CUSTOM)),
    Rule("algorithm.shuffle_advantages", run(algorithm={**CUSTOM, "shuffle_advantages": True}), run(algorithm=CUSTOM)),
    Rule("algorithm.echo", run(algorithm={"echo": {"tool": 0.0}}), run(algorithm={"echo": {}})),
    Rule("train.env[0].algorithm.decay", own(algorithm={"decay": 0.5}), own(algorithm=RAE)),
    Rule("algorithm.normalize_std", only_measured(algorithm={**RLOO, "normalize_std": True}), only_measured()),
    Rule("algorithm.echo", run(client_type=TOKEN, algorithm={"echo": {}}), run(client_type=TOKEN)),
    Rule("algorithm.echo", taught("sft", algorithm={"echo": {}}), taught("opd", algorithm={"echo": {}})),
    Rule(
        "train.env[0].algorithm.echo",
        environments({"algorithm": {"echo": {}}}, client_type=TOKEN),
        environments({"algorithm": {}}, client_type=TOKEN),
    ),
    # Teachers.
    Rule("training_mode", run(training_mode="opd"), taught("opd")),
    Rule("train.env[0].training_mode", own(training_mode="sft"), own(training_mode="sft", teacher={"client": SERVER})),
    Rule("teacher", taught("rl"), taught("sft")),
    Rule("teacher", taught("opsd"), run(training_mode="opsd")),
    Rule(
        "teacher",
        only_measured(training_mode="opsd", teacher={"client": SERVER}),
        only_measured(training_mode="opd", teacher={"client": SERVER}),
    ),
    Rule("train.env[0].teacher", own(teacher={"client": SERVER}), own(teacher={"client": SERVER}, training_mode="opd")),
    Rule("teacher.client.client_type", taught("opd", {**SERVER, "client_type": TEXT}), taught("opd")),
    Rule("teacher.client.client_type", taught("sft", {**SERVER, "client_type": "renderer"}), taught("sft")),
    Rule("teacher.client.base_url", taught("sft", TWO_SERVERS), taught("opd", TWO_SERVERS)),
    Rule("teacher.client.base_url", taught("opd", {**SERVER, "base_url": ["http://h/v1", "http://h"]}), taught("opd")),
    Rule("teacher.client.base_url", taught("opd", {**SERVER, "base_url": []}), taught("opd")),
    Rule("teacher.client.base_url", taught("opd", {**SERVER, "base_url": "h:1"}), taught("opd")),
    Rule("teacher.client.base_url", taught("opd", {**SERVER, "base_url": "http://u:p@h"}), taught("opd")),
    # Demonstrations.
    Rule("train.env[0].demonstration", own(demonstration=SHOWN), own(demonstration=SHOWN, training_mode="opsd")),
    Rule("demonstration.key", run(demonstration={"key": "k"}), run(demonstration={"key": "demonstration"})),
    Rule("demonstration.template", run(demonstration=SHOWN), run(demonstration=SHOWN, training_mode="opsd")),
    Rule("demonstration.template", run(demonstration={"template": "x"}), run()),
    Rule("client_type", run(training_mode="opsd", client_type=TOKEN), run(client_type=TOKEN)),
    # Who renders.
    Rule("client_type", run(client_type=TEXT), run(client_type=TOKEN)),
    Rule("control_tokens", run(client_type=TOKEN, control_tokens="neutralize"), run(control_tokens="neutralize")),
    Rule("control_tokens", {**measured(client=SERVER), "control_tokens": "neutralize"}, measured(client=SERVER)),
    Rule("eval.env[0].client.client_type", measured(client={**SERVER, "client_type": "renderer"}), measured()),
    Rule("engines[0]", run(engines=["h:1"]), run(engines=["https://h:1"])),
    Rule("engines[0]", run(engines=["http://h:1/?a=b"]), run(engines=["http://h:1/"])),
]

OF_THE_NATIVE_SIDE = [
    Rule("sampling.max_tokens", run(sampling={"max_tokens": 2048}), run(sampling={"max_tokens": 2047})),
    Rule("router_replay", run(router_replay=True, client_type=TOKEN), run(router_replay=True)),
    Rule(
        "group_size",
        run(group_size=1, buffer=FILTERS, algorithm=algorithm("reinforce_plus_plus")),
        run(group_size=1, buffer=FILTERS, algorithm=RAE),
    ),
]
"""What only the native side refuses: its check names the key before anything starts."""
