"""What each training environment is learnt from, with which groups and sampling. All checks raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from primerl.config.schema.base import BadKeysError, check_whole_groups
from primerl.config.schema.environment import TrainSource
from primerl.config.schema.rollouts import Demonstration, Sampling, TrainingMode
from primerl.config.schema.services import ClientType

if TYPE_CHECKING:
    from primerl.config.schema.orchestrator import Orchestration

ASKED_AS: dict[TrainingMode, ClientType] = {"opd": "renderer", "sft": "openai_chat_completions"}
"""How the teacher of a mode is asked."""
WITHOUT: dict[TrainingMode, str] = {"rl": "rewards", "opsd": "the policy itself"}
"""What the other modes learn from."""
LOSS_OF_MODE: dict[TrainingMode, str] = {
    "rl": "rl_weight",
    "opd": "ref_kl_weight",
    "sft": "ce_weight",
    "opsd": "ref_kl_weight",
}
"""The weight of `trainer.loss` by which what a mode learns from is trained."""


def with_own_sampling(given: Any) -> Any:
    """An orchestrator's settings before they are checked, each training environment's `sampling` completed from the
    run's."""
    if not isinstance(given, dict) or not given.get("sampling"):
        return given
    train = _given(given.get("train"))
    environments = train.get("env")
    if not isinstance(environments, list):
        return given
    run = _given(given["sampling"])
    merged = []
    for environment in environments:
        own = _given(environment)
        if own.get("sampling") is not None:
            environment = {**own, "sampling": {**run, **_given(own["sampling"])}}
        merged.append(environment)
    return {**given, "train": {**train, "env": merged}}


def _given(section: Any) -> dict[str, Any]:
    if isinstance(section, dict):
        return section
    names: Sequence[str] = getattr(section, "model_fields_set", ())
    return {name: getattr(section, name) for name in names}


def modes(orchestration: Orchestration, trained: Sequence[TrainSource]) -> set[TrainingMode]:
    """What its environments learn from."""
    return {environment.training_mode or orchestration.training_mode for environment in trained}


def samplings(orchestration: Orchestration, trained: Sequence[TrainSource]) -> list[tuple[str, Sampling]]:
    """The ways in which training rollouts are sampled, each with the key that says so."""
    own = [
        (f"orchestrator.train.env[{index}].sampling", environment.sampling)
        for index, environment in enumerate(trained)
        if environment.sampling is not None
    ]
    usual = [("orchestrator.sampling", orchestration.sampling)] if len(own) < len(trained) or not own else []
    return usual + own


def losses(orchestration: Orchestration, trained: Sequence[TrainSource]) -> dict[str, str]:
    """The weights of `trainer.loss` by which something is learnt, each with the key that asks for it."""
    found = {LOSS_OF_MODE[mode]: f'training_mode "{mode}"' for mode in sorted(modes(orchestration, trained))}
    if any((environment.algorithm or orchestration.algorithm).echo is not None for environment in trained):
        found.setdefault("ce_weight", "algorithm.echo")
    return found


def check(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    _check_echo(orchestration, trained)
    _check_teachers(orchestration, trained)
    _check_demonstrations(orchestration, trained)
    _check_filtering(orchestration, trained)
    _check_groups(orchestration, trained)


def _check_teachers(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    uses_runs = not trained and orchestration.training_mode in ASKED_AS
    for index, environment in enumerate(trained):
        place, mode = f"train.env[{index}]", environment.training_mode or orchestration.training_mode
        if mode not in ASKED_AS:
            if environment.teacher is not None:
                raise BadKeysError(
                    f'{place}.teacher is given, but training_mode "{mode}" learns from {WITHOUT[mode]}; omit teacher, '
                    'or set the training_mode of the environment to "opd" or "sft"',
                    f"{place}.teacher",
                )
            continue
        teacher = environment.teacher or orchestration.teacher
        key = f"{place}.training_mode" if environment.training_mode is not None else "training_mode"
        if teacher is None:
            raise BadKeysError(
                f"{key} ({mode}) learns from a teacher; give [orchestrator.teacher.client] with base_url and model, or "
                "teacher.client of the environment",
                key,
            )
        uses_runs = uses_runs or environment.teacher is None
        name = "teacher.client" if environment.teacher is None else f"{place}.teacher.client"
        teacher.client.check_type(name, ASKED_AS[mode])
    if orchestration.teacher is not None and not uses_runs:
        mode = orchestration.training_mode
        raise BadKeysError(
            f'teacher is given, but training_mode "{mode}" learns from {WITHOUT.get(mode, "others")}; omit teacher, '
            'or set training_mode to "opd" or "sft", of the run or of an environment without a teacher of its own',
            "teacher",
        )


def _check_demonstrations(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    for index, environment in enumerate(trained):
        mode = environment.training_mode or orchestration.training_mode
        if environment.demonstration is not None and mode != "opsd":
            place = f"train.env[{index}].demonstration"
            given = ", ".join(sorted(environment.demonstration.model_fields_set))
            raise BadKeysError(
                f'{place} ({given or "{}"}) is read only with training_mode "opsd", but this environment has "{mode}"; '
                "omit it, or set training_mode",
                place,
            )
        if mode == "opsd" and orchestration.client_type != "renderer":
            raise BadKeysError(
                'training_mode "opsd" adds a message to the prompt and scores the tokens after it, which client_type '
                f"({orchestration.client_type}) cannot render; omit client_type",
                "client_type",
                "training_mode",
            )
    shows = "opsd" in modes(orchestration, trained)
    usual, given = Demonstration(), orchestration.demonstration
    for name in Demonstration.model_fields:
        if trained and not shows and getattr(given, name) != getattr(usual, name):
            raise BadKeysError(
                f'demonstration.{name} is read only with training_mode "opsd", which no environment has; '
                "omit it, or set training_mode",
                f"demonstration.{name}",
            )


def _check_echo(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    for index, environment in enumerate(trained):
        if (environment.algorithm or orchestration.algorithm).echo is None:
            continue
        key = "algorithm.echo" if environment.algorithm is None else f"train.env[{index}].algorithm.echo"
        if orchestration.client_type != "renderer":
            raise BadKeysError(
                f"{key} needs to know which message each token belongs to, which client_type "
                f"({orchestration.client_type}) does not report; omit one of them",
                key,
                "client_type",
            )
        if (environment.training_mode or orchestration.training_mode) == "sft":
            raise BadKeysError(
                f"{key} learns what the environment says to the policy, but with training_mode sft it speaks to a "
                "teacher; omit echo",
                key,
            )


def _check_filtering(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    found = modes(orchestration, trained)
    if found and "rl" not in found and orchestration.buffer.online_difficulty_filtering:
        raise BadKeysError(
            "buffer.online_difficulty_filtering drops groups whose rewards are all equal, but training_mode "
            f"({', '.join(sorted(found))}) learns from a teacher, not from rewards; set it to false",
            "buffer.online_difficulty_filtering",
            "training_mode",
        )


def _check_tokens(orchestration: Orchestration) -> None:
    """Keys that count rollouts say nothing of a step of tokens. Resolved files hold their defaults."""
    for key in ("batch_size", "oversampling_factor"):
        if getattr(orchestration, key) != type(orchestration).model_fields[key].default:
            raise BadKeysError(
                f"{key} counts rollouts, and token_batch_size makes a step of so many tokens; omit one of them",
                key,
                "token_batch_size",
            )


def _check_groups(orchestration: Orchestration, trained: Sequence[TrainSource]) -> None:
    """A batch is whole groups, and a group of one has nothing to compare with."""
    run, least = orchestration.group_size, orchestration.min_group_size
    sizes = {environment.group_size or run for environment in trained} or {run}
    largest = max(sizes)
    if least is not None and least > largest:
        raise BadKeysError(
            f"min_group_size ({least}) must be at most group_size ({largest}); lower it, or omit it to train whole "
            "groups only",
            "min_group_size",
            "group_size",
        )
    if orchestration.token_batch_size is not None:
        _check_tokens(orchestration)
    elif len(sizes) == 1:
        check_whole_groups("batch_size", orchestration.batch_size, "group_size", largest)
    elif orchestration.batch_size < largest:
        raise BadKeysError(
            f"batch_size ({orchestration.batch_size}) must be at least the largest group_size ({largest}); raise it, "
            "or lower the other",
            "batch_size",
        )
    for index, environment in enumerate(trained):
        mode = environment.training_mode or orchestration.training_mode
        algorithm = environment.algorithm or orchestration.algorithm
        if mode == "rl" and (environment.group_size or run) == 1 and algorithm.is_relative:
            key = "group_size" if environment.group_size is None else f"train.env[{index}].group_size"
            raise BadKeysError(
                f"{key} is 1: an advantage compares a rollout with the others of its group, and alone it is always 0; "
                "set group_size to at least 2",
                key,
            )
