"""One start of a search: checks, the package's loop, the files. The same command on the same folder resumes it.

Exit codes: 0 done, 1 ended early (the same command resumes it), 2 bad input (nothing was written), 130 interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl.config.errors.fail import ConfigError, renamed
from primerl.config.process_files.files import absolute, write_text
from primerl.config.schema.gepa import GepaConfig
from primerl.evals import endpoint, preflight
from primerl.launch.interpreters import lookup
from primerl.launch.placement.protocol import Placement
from primerl.launch.placement.registry import chosen
from primerl.launch.preflight import kinds
from primerl.launch.preflight.output_folder import check_output_dir, claimed
from primerl.launch.secrets import Variables
from primerl.launch.supervise.failures import FAILED
from primerl.process import extras

if TYPE_CHECKING:
    from primerl.gepa.engines import Engines
    from primerl.gepa.rollouts import Adapter

KIND = "gepa"
BEGUN = kinds.BEGUN_SEARCH
MAY_CHANGE = {"output_dir", "api_key_env", "reflection_api_key_env", "env_files", "clean_output_dir", "dry_run"}
MAY_CHANGE |= {"fork_server", "timeouts", "gepa.max_calls", "gepa.max_concurrent"}
MAY_CHANGE |= {name for name in preflight.MAY_CHANGE if name.startswith(("env.", "inference."))}
OF_THE_MODEL = {"model", "seq_len", "served_name"}
"""Keys whose values are known once the checkpoint was read."""
WEIGHTS = "weights"


def run(config: GepaConfig, say: Callable[[str], None]) -> int:
    """Raises [`ConfigError`][primerl.config.errors.fail.ConfigError] before anything is written."""
    extras.require("`primerl gepa`", "gepa")
    folder = Path(absolute(config.output_dir))
    check_output_dir(config.output_dir, clean=config.clean_output_dir, goes_on=kinds.holds(KIND), kind=KIND)
    if not config.clean_output_dir:
        same_search(config, folder)
    with renamed(config.teachers_keys()):
        endpoint.check(config.teacher())
    checked = preflight.with_model(config.evaluation(str(folder / "evaluations" / "00000")))
    weights = None
    if config.base_url is None:
        # The folder in place of a hub's name, and what follows from the model.
        changes = {name: getattr(checked, name) for name in OF_THE_MODEL}
        config = config.model_copy(update={**changes, "model": absolute(checked.model)})
        say("hashing the checkpoint's weights")
        weights = digest_of(Path(config.model))
        if not config.clean_output_dir:
            same_search(config, folder, weights)
    placement = chosen(checked.deployment)
    variables = preflight.check(checked, say, placement)
    listed = _listed(config, variables)
    train, val = sizes(config, listed["total"], say)
    start = _initial_prompt(config, listed["examples"], say)
    if config.dry_run:
        say("everything checked; nothing was started")
        return 0
    from primerl.gepa import rollouts

    with claimed(config.output_dir, clean=config.clean_output_dir, kind=KIND) as claimed_folder:
        write_text(claimed_folder / BEGUN, json.dumps({**_values(config), WEIGHTS: weights}, indent=1) + "\n")
        with _engines(config, claimed_folder, placement) as engines:
            adapter = rollouts.Adapter(config, claimed_folder, listed["examples"], variables, say, engines)
            return _search(config, claimed_folder, adapter, (train, val), start, say)


def digest_of(model: Path) -> str:
    """The digest of all weights in the folder. Raises ConfigError where they cannot be read."""
    from primerl.evals import checkpoint
    from primerl.train.settings import ConfigError as FileError

    try:
        return str(checkpoint.manifest_of(model)["digest"])
    except (FileError, OSError) as error:
        raise ConfigError.at("model", f"{error}; give the folder of a model whose files are whole") from None


@contextmanager
def _engines(config: GepaConfig, folder: Path, placement: Placement) -> Iterator[Engines | None]:
    """Those that serve the checkpoint; None where an endpoint is measured."""
    from primerl.gepa.engines import Engines

    if config.base_url is not None:
        yield None
        return
    with Engines(folder, placement, config.timeouts.stop_s) as engines:
        yield engines


def _search(
    config: GepaConfig,
    folder: Path,
    adapter: Adapter,
    sizes: tuple[int, int],
    start: str,
    say: Callable[[str], None],
) -> int:
    from gepa.api import optimize

    from primerl.gepa import files
    from primerl.gepa.rollouts import COMPONENT
    from primerl.gepa.teacher import StopError, Teacher

    train, val = sizes
    settings = config.gepa
    try:
        result: Any = optimize(
            seed_candidate={COMPONENT: start},
            trainset=list(range(train)),
            valset=list(range(train, train + val)),
            adapter=adapter,
            reflection_lm=Teacher(config.teacher(), folder / "reflections.jsonl"),
            reflection_minibatch_size=settings.minibatch_size,
            max_metric_calls=settings.max_calls,
            skip_perfect_score=settings.perfect_score is not None,
            perfect_score=1.0 if settings.perfect_score is None else settings.perfect_score,
            seed=settings.seed,
            logger=_Log(folder / kinds.SEARCH_LOG),
            track_best_outputs=False,
        )
    except StopError as stop:
        say(f"the search has stopped, and the same command resumes it: {stop}")
        return FAILED
    files.write(folder, result, config)
    scores = result.val_aggregate_scores
    say(
        f"best of {len(scores)} prompts: mean reward {scores[result.best_idx]:.3f} on {val} examples (at the "
        f"start {scores[0]:.3f}); it is in {folder / 'system_prompt.txt'}"
    )
    return 0


class _Log:
    """The package's own lines, of this start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("", encoding="utf-8")

    def log(self, message: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")


def sizes(config: GepaConfig, total: int, say: Callable[[str], None]) -> tuple[int, int]:
    """Examples to train and to validate with, of so many. Raises ConfigError."""
    wanted = config.gepa.num_train, config.gepa.num_val
    if total < 2:
        label = config.env[0].label
        raise ConfigError(f"environment {label!r} has {total} example; a search needs at least two", environment=label)
    val = min(wanted[1], max(1, total - wanted[0]) if total > wanted[0] else total // 3 or 1)
    train = min(wanted[0], total - val)
    if (train, val) != wanted:
        say(f"the environment has {total} examples: {train} are to train with and {val} to validate")
    least = val + 2 * config.gepa.minibatch_size
    if config.gepa.max_calls < least:
        raise ConfigError(
            f"gepa.max_calls ({config.gepa.max_calls}) is below one round, {least} evaluated examples ({val} to "
            "validate and twice gepa.minibatch_size); raise it, or lower gepa.num_val",
            "gepa.max_calls",
            "gepa.minibatch_size",
            "gepa.num_val",
        )
    return train, val


def _initial_prompt(config: GepaConfig, examples: list[dict[str, Any]], say: Callable[[str], None]) -> str:
    first = examples[0]
    messages = first.get("prompt")
    own = [m.get("content") for m in messages if m.get("role") == "system"] if isinstance(messages, list) else []
    for found in (config.initial_prompt, config.env[0].system_prompt, first.get("system_prompt"), *own):
        if isinstance(found, str):
            return found
    say("the environment has no system prompt: the search starts from an empty one (initial_prompt)")
    return ""


def _listed(config: GepaConfig, variables: Variables) -> dict[str, Any]:
    """The data of the examples, from the environment's own interpreter. Raises ConfigError."""
    entry = config.env[0]
    count = config.gepa.num_train + config.gepa.num_val
    python = lookup.of(entry)
    request = json.dumps([entry.id, entry.arguments, config.gepa.seed, count], default=str)
    with tempfile.TemporaryDirectory(prefix="primerl-check-") as temporary:
        environment = {
            **lookup.variables(python, Path(temporary) / "package", dict(os.environ)),
            **variables[entry.label],
        }
        try:
            done = subprocess.run(
                [python, "-m", "primerl.envs.tasks"],
                input=request,
                capture_output=True,
                text=True,
                encoding="utf-8",
                env=environment,
                timeout=config.timeouts.check_s,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"environment {entry.label!r} has not listed its examples within {config.timeouts.check_s:.0f} s "
                "(timeouts.check_s)",
                environment=entry.label,
            ) from None
    if done.returncode != 0:
        raise _refused(done, entry.label)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _refused(done: subprocess.CompletedProcess[str], label: str) -> ConfigError:
    """What the process says; the last line of its output where the environment has ended it."""
    try:
        said = json.loads(done.stdout)
        return ConfigError(said["problem"], *said["keys"], environment=label)
    except (ValueError, LookupError, TypeError):
        words = (done.stderr.strip().splitlines() or [f"environment {label!r} cannot be listed"])[-1]
        return ConfigError(words, environment=label)


def _values(config: GepaConfig) -> dict[str, Any]:
    """By dotted name: what must stay as it is."""
    content = config.model_dump(mode="json")
    content |= {f"gepa.{name}": value for name, value in content.pop("gepa").items()}
    content |= {f"env.{name}": value for name, value in content.pop("env")[0].items()}
    engine = content.pop("inference")
    if config.base_url is None:
        content |= {f"inference.{name}": value for name, value in engine.items()}
    kept = {name: value for name, value in content.items() if name not in MAY_CHANGE}
    return {**kept, kinds.SEARCHED_BY: metadata.version("gepa")}


def same_search(config: GepaConfig, folder: Path, weights: str | None = None) -> None:
    """Raises ConfigError where the folder holds another search; the message names the field.

    Args:
        weights: Digest of the checkpoint's; None where the model was not looked at so far.
    """
    file = folder / BEGUN
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError.at("output_dir", f"{file} cannot be read: {error}; choose another --output-dir") from None
    now = _values(config)
    unknown = OF_THE_MODEL if config.base_url is None and weights is None else set()
    # Where that differs, the model's name means something else.
    for name in ("base_url", *now):
        if name not in unknown and before.get(name) != now[name]:
            raise ConfigError(
                f"{name} is {_shown(now[name])}, but the search in {folder} was begun with "
                f"{_shown(before.get(name))}; set it to that to resume, choose another --output-dir, or start again "
                "with --clean-output-dir",
                name,
            )
    if weights is not None and weights != before.get(WEIGHTS):
        raise ConfigError.at(
            "model",
            f"the weights in {config.model} are not those that the search in {folder} was begun with; choose "
            "another --output-dir, or start again with --clean-output-dir",
        )


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
