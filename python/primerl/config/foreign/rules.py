"""What becomes of values whose key has another unit, another form or another meaning here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from primerl.config.foreign.rows import Context, Omitted, Refused, Rule, Several, look

NONE = "None"
"""How prime-rl's files write that something is unset."""
PINFERENCE = "https://api.pinference.ai/api/v1"
SEQ_LEN = 2048
NO_KEY = "(no key)"
"""Stands for what a file cannot set, and what ours does otherwise unless told."""


def among(names: Mapping[Any, Any], otherwise: str) -> Rule:
    """A value of a fixed list, by another name."""

    def rule(value: Any, _: Context) -> Any:
        if value not in names:
            raise Refused(otherwise)
        return names[value]

    return rule


def only(value: Any, why: str) -> Rule:
    """That value and no other; it needs no key."""

    def rule(given: Any, _: Context) -> Any:
        if given != value:
            raise Refused(why)
        raise Omitted

    return rule


def unset(*values: Any) -> Rule:
    """Values that stand for an unset key."""

    def rule(value: Any, _: Context) -> Any:
        if value in values:
            raise Omitted
        return value

    return rule


def inverted(value: Any, _: Context) -> Any:
    return not value if isinstance(value, bool) else value


def present(value: Any, _: Context) -> bool:
    return value not in (None, False, NONE)


def table(value: Any, _: Context) -> Any:
    """The table is there, whatever it has."""
    if value in (None, False, NONE):
        raise Omitted
    return {}


def seq_len_of(context: Context) -> int:
    found = context.get("seq_len") or context.get("orchestrator.seq_len") or context.get("trainer.model.seq_len")
    return found if isinstance(found, int) else SEQ_LEN


def answer(value: Any, context: Context) -> Any:
    """Longest answer: here it has to be below `seq_len`, which holds the prompt too. None: as long as fits."""
    room = seq_len_of(context) - 1
    return min(value, room) if isinstance(value, int) else room


def body(value: Any, context: Context) -> Any:
    """`extra_body` of training requests."""
    if not isinstance(value, dict):
        raise Refused("it is a table of fields of a request")
    found = Several()
    sampling = "./sampling" if any(isinstance(part, int) for part in context.place) else "orchestrator.sampling"
    for name, given in value.items():
        if name == "chat_template_kwargs":
            found[f"{sampling}.chat_template_kwargs"] = given
        elif name in ("top_k", "min_p", "top_p"):
            if given in {"top_k": (-1, 0), "min_p": (0,), "top_p": (1,)}[name]:
                continue
            found[f"{sampling}.{name}"] = given
            found[f"{sampling}.truncated"] = "replay"
        else:
            raise Refused(f"{name} of a request: the trainer would have to know what changes the distribution")
    return found


def ratio_of_peak(value: Any, context: Context) -> Any:
    """The lowest rate, as a share of the highest."""
    prefix = "trainer.optim" if context.place[0] == "trainer" else "optim"
    peak = context.get(f"{prefix}.lr", 1e-6)
    return value / peak if peak else 0.0


def betas(value: Any, context: Context) -> Any:
    prefix = "trainer.optim" if context.place[0] == "trainer" else "optim"
    usual = 0.95 if context.get(f"{prefix}.type") == "muon" else 0.999
    return [context.get(f"{prefix}.betas1", 0.9), context.get(f"{prefix}.betas2", usual)]


def optimizer(value: Any, context: Context) -> Any:
    prefix = "trainer." if context.place[0] == "trainer" else ""
    found = Several({f"{prefix}optim.type": value})
    if value == "sgd":
        own = {"momentum": 0.9, "nesterov": True}
        found[f"{prefix}optim.args"] = {name: context.get(f"{prefix}optim.{name}", own[name]) for name in own}
    if value == "muon":
        found[f"{prefix}optim.args"] = {"momentum": context.get(f"{prefix}optim.mu", 0.95)}
    return found


def learning_rate(value: Any, _: Context) -> Any:
    if not value:
        raise Refused("a learning rate of 0 trains nothing; give one above 0")
    return value


def max_norm(value: Any, _: Context) -> Any:
    """None turns clipping off; a bound that nothing reaches is the same."""
    return 1e30 if value in (None, NONE, 0) else value


def schedule(value: Any, _: Context) -> Any:
    return {"linear": "wsd"}.get(value, value)


def warmup(value: Any, context: Context) -> Any:
    """The constant schedule has none, and the others ten steps."""
    prefix = "trainer.scheduler" if context.place[0] == "trainer" else "scheduler"
    if context.get(f"{prefix}.type", "constant") == "constant":
        raise Omitted
    return value


LOSSES = {
    "default": ("dppo", {"dppo_mask_low": "mask_low", "dppo_mask_high": "mask_high", "kl_tau": "kl_tau"}),
    "ipo": ("ipo", {"ipo_threshold": "threshold", "kl_tau": "kl_tau"}),
}
"""Theirs by name: ours, and what their settings are called here."""
OWN_LOSS = "custom"


def loss(value: Any, context: Context) -> Any:
    """One of ours keeps its name, and has `trainer.loss.args`."""
    if value == OWN_LOSS:
        raise Omitted
    if value not in LOSSES:
        return value
    ours, names = LOSSES[value]
    tau = context.get("trainer.loss.adv_tau", 1.0)
    if not 0 < tau < math.inf:
        raise Refused(f"adv_tau is {tau}; learning from rewards needs a number above 0")
    given = {name: context.get(f"trainer.loss.{theirs}") for theirs, name in names.items()}
    args = {name: number for name, number in given.items() if number is not None}
    if tau != 1.0:
        args["kl_tau"] = args.get("kl_tau", 1e-3) / tau
    return Several({"trainer.loss.type": ours, **({"trainer.loss.args": args} if args else {})})


def loss_setting(value: Any, context: Context) -> Any:
    """A setting of the type that has it; the others would ignore it."""
    kind, name = context.get("trainer.loss.type", "default"), context.place[-1]
    if kind in LOSSES and name in (*LOSSES[kind][1], "adv_tau"):
        return loss(kind, context)
    if kind == OWN_LOSS:
        raise Omitted("the loss of your own has its settings in kwargs")
    having = " or ".join(repr(kind) for kind, (_, names) in LOSSES.items() if name in names or name == "adv_tau")
    raise Refused(f"the loss of type {kind!r} has no such setting, {having} has it")


def import_path(value: Any, _: Context) -> Any:
    """`module.function` -> `module:function`."""
    if not isinstance(value, str) or ("." not in value and ":" not in value):
        raise Refused("it is no path of a function, as module.function")
    if ":" in value:
        return value
    module, _dot, name = value.rpartition(".")
    return f"{module}:{name}"


def stale(value: Any, _: Context) -> Any:
    """Generation may run no further ahead than what may be trained."""
    found = Several({"orchestrator.max_off_policy_steps": value})
    if isinstance(value, int) and value < 2:
        found["orchestrator.max_async_level"] = value
    return found


def harness(value: Any, context: Context) -> Any:
    """verifiers' chat program is the harness that runs within the worker. Another one is in a sandbox of Prime unless
    the file says where; here that has to be written."""
    *above, seat, _harness, _id = context.place
    if value == "null":
        if _has_seats_without_harness(look(context.tree, above)):
            return value  # a seat without one would be left to verifiers
        raise Omitted
    found = Several({f"./args.{seat}.harness.id": value})
    if look(context.tree, (*above, seat, "runtime", "type")) is None:
        found[f"./args.{seat}.runtime.type"] = "prime"
    return found


def seats(value: Any, _: Context) -> Any:
    """Who plays where the file does not say: what verifiers takes for seats without a harness."""
    if isinstance(value, dict) and "harness" in value:
        raise Refused("a harness belongs to a seat: give agent.harness, or that of a seat by its name")
    if not _has_seats_without_harness(value):
        raise Omitted
    return Several({"./harness.id": "default"})


def _has_seats_without_harness(environment: Any) -> bool:
    """Whether it may have some. An environment of its own class (`id`) has seats that the file need not name."""
    if not isinstance(environment, dict) or "taskset" not in environment:
        return False
    seats = {name: inner for name, inner in environment.items() if name not in NO_SEATS and isinstance(inner, dict)}
    named = [name for name, inner in seats.items() if look(inner, ("harness", "id"))]
    return not named or len(named) < len(seats) or bool(environment.get("id"))


NO_SEATS = ("taskset", "timeout", "retries", "interception")
"""Tables of an environment besides its seats."""


def runtime(value: Any, context: Context) -> Any:
    """A process on this machine is the default here, but not of a harness that is left to verifiers."""
    *seat, _runtime, _type = context.place
    if value == "subprocess" and look(context.tree, (*seat, "harness", "id")) not in (None, "default"):
        raise Omitted
    return value


def rollout_time(bound: str) -> Rule:
    """A seat's own limit, and above it the time at which a rollout fails, `bound`."""

    def rule(value: Any, context: Context) -> Any:
        if value in (None, NONE):
            raise Omitted
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"it is {value!r}; give seconds")
        return Several(
            {
                f"./args.{context.place[-3]}.timeout.rollout": value,
                f"^{bound}": math.ceil(value) + math.ceil(value) // 10 + 60,
            }
        )

    return rule


def all_if_negative(value: Any, _: Context) -> Any:
    if value in (-1, None):
        raise Omitted
    return value


def tokens_of_batch(value: Any, context: Context) -> Any:
    """Rows of `seq_len` tokens there, tokens here."""
    length = context.get("data.seq_len", 128)
    for name, number in (("data.batch_size", value), ("data.seq_len", length)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise Refused(f"{name} is {number!r}; give a whole number of at least 1")
    return value * length


def mixture(value: Any, context: Context) -> Any:
    """Lists of configurations, splits and shares become a table for each dataset."""
    prefix = "val.data" if context.place[0] == "val" else "data"
    names = context.get(f"{prefix}.subsets")
    splits = context.get(f"{prefix}.splits")
    shares = context.get(f"{prefix}.probabilities") or []
    path = context.get(f"{prefix}.name", "PrimeIntellect/Reverse-Text-SFT")
    if names is None and splits is None:
        return Several({f"{prefix}.path": path})
    count = len(names or splits)
    entries = [
        {
            "path": path,
            **({"name": names[number]} if names else {}),
            **({"split": splits[number]} if splits else {}),
            **({"ratio": shares[number]} if shares else {}),
        }
        for number in range(count)
    ]
    if count == 1:
        entries[0].pop("ratio", None)
        return Several({f"{prefix}.{key}": given for key, given in entries[0].items()})
    return Several({f"{prefix}.subsets": entries})


def algorithm(value: Any, context: Context) -> Any:
    """By its name, with the teacher that it learns from."""
    from primerl.config.schema.rollouts import Algorithm

    *above, _ = context.place
    of_the_run = "train" not in above
    if value in ("opd", "sft"):
        who = ("teacher",) if value == "opd" else ("sampling", "source")
        return _teacher(value, look(context.tree, [*above, *who]), "orchestrator." if of_the_run else "./")
    if value == "opsd":
        return Several({"orchestrator.training_mode" if of_the_run else "./training_mode": value})
    name = {"max_rl": "maxrl", "echo": "grpo"}.get(value, value)
    known = get_args(Algorithm.model_fields["type"].annotation)
    if name not in known:
        raise Refused(f"{name} is not among the algorithms here, which are {', '.join(known)}")
    section = "orchestrator.algorithm" if of_the_run else "./algorithm"
    found = Several({f"{section}.type": name})
    if value == "echo":
        given = look(context.tree, [*above, "roles"], {"tool": {}})
        weights = {role: own.get("alpha", 0.1) for role, own in given.items() if isinstance(own, dict)}
        found[f"{section}.echo"] = {"tool": 0.0, **weights}
    if not of_the_run and context.get("orchestrator.algo.type") in ("opd", "sft", "opsd"):
        found["./training_mode"] = "rl"
    return found


def demonstration(key: str) -> Rule:
    """What the policy is shown, of the run or of an environment."""

    def rule(value: Any, context: Context) -> Any:
        section = "./" if "train" in context.place else "orchestrator."
        return Several({f"{section}demonstration.{key}": value})

    return rule


def _teacher(mode: str, who: Any, section: str) -> Several:
    """`section`: what begins the keys of the run, or of the environment."""
    if not isinstance(who, dict) or "name" not in who or "base_url" not in who:
        raise Refused("it learns from a teacher, of which the file gives no name and base_url")
    teacher = f"{section}teacher.client"
    found = Several({f"{section}training_mode": mode})
    found |= {f"{teacher}.base_url": who["base_url"], f"{teacher}.model": who["name"]}
    if "api_key_var" in who:
        found[f"{teacher}.api_key_env"] = who["api_key_var"]
    return found


def of_a_server(value: Any, context: Context) -> Any:
    """Their default endpoint, and its key: where the model is a folder, it is served here instead."""
    model = context.get("model")
    is_default = look(context.tree, context.place, None) is None
    if is_default and isinstance(model, str) and Path(model).is_dir():
        raise Omitted
    return value


def taught(context: Context) -> Any:
    """Name and URL of a teacher are read with the algorithm's type."""
    # `orchestrator.train.source[0].algo` has `source` too.
    prefix = context.place[: context.place.index("algo") + 1]
    return algorithm(look(context.tree, [*prefix, "type"], "grpo"), context.at((*prefix, "type")))


def gates(value: Any, _: Context) -> Any:
    """Only one kind of gate: groups whose advantages are all within a range are drawn again."""
    for name, gate in (value or {}).items():
        if gate.get("type") != "advantage_range":
            raise Refused(f"{name}: only gates of advantage_range have a counterpart")
        if gate.get("reject_min", 0) or gate.get("reject_max", 0):
            raise Refused(f"{name}: only groups without any advantage are drawn again, a range of 0 to 0")
    return Several(
        {
            "orchestrator.buffer.online_difficulty_filtering": True,
            # Groups without signal are drawn again; the draw itself does not depend on difficulty.
            "orchestrator.buffer.easy_fraction": 1.0,
            "orchestrator.buffer.hard_fraction": 1.0,
        }
    )


def same_place(value: Any, context: Context) -> Any:
    """At the same place."""
    return Several({".".join(str(part) for part in context.place): value})


def one_model(value: Any, context: Context) -> Any:
    whole = context.get("model")
    others = {entry.get("model", value) for entry in context.get("eval", [])}
    if (whole is not None and whole != value) or len(others) > 1:
        raise Refused("an evaluation has one model; make a file of each")
    return value


def said(_: Any, __: Context) -> Any:
    """Another row has read it."""
    raise Omitted


def micro_batch(value: Any, context: Context) -> Any:
    """The trainer's own length of a micro-batch; that of a sequence is the orchestrator's, if it has one."""
    for name in ("orchestrator.seq_len", "seq_len"):
        longest = context.get(name)
        if longest is not None and longest != value:
            raise Omitted("a micro-batch holds as much as the longest sequence, seq_len")
    return value


def whole_length(value: Any, context: Context) -> Any:
    """That of the orchestrator's rollouts comes first."""
    own = context.get("orchestrator.seq_len")
    if own is not None and own != value:
        raise Omitted("a micro-batch holds as much as the longest sequence, seq_len")
    return value
