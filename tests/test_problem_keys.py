"""Refusals name keys that exist, and other layers hand them on as they are."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from primerl.config.describe.fields import plain_path
from primerl.config.errors.error_locations import paths_of
from primerl.config.errors.fail import ConfigError, Problems, renamed
from primerl.config.schema.env_worker import JoinConfig
from primerl.config.schema.evaluation import EvalConfig
from primerl.config.schema.gepa import GepaConfig
from primerl.config.schema.inference import InferenceConfig
from primerl.config.schema.inference_run import InferenceRunConfig
from primerl.config.schema.rl import RLConfig
from primerl.config.schema.serve import ServeConfig
from primerl.config.schema.sft import SFTConfig
from primerl.config.schema.trainer import TrainerConfig
from primerl.inference.backend import UnservableError
from primerl.process.problems import Problem
from primerl.train.settings import ConfigError as SettingError

FORMS = (RLConfig, EvalConfig, SFTConfig, GepaConfig, ServeConfig, InferenceRunConfig, JoinConfig)
# What a process of a run reads, which its own messages name.
OF_PROCESSES = (TrainerConfig, InferenceConfig)
FOLDERS = ("launch", "evals", "gepa", "inference", "stores", "tinker", "train", "api.py")
ERRORS = ("ConfigError", "DataError", "PlacementError", "Problem", "RefusedError", "StoreError", "UnservableError")
ELSEWHERE = (
    *("launch/placement/fitting.py", "evals/endpoints.py", "evals/published_file.py"),
    *("tinker/routes.py", "tinker/state_routes.py"),
)
"""Of these, files of another kind, or another class of one of the names."""
KEYED = re.compile(r"""f?['"]([a-z_]+(\.[a-z_]+)*|\{(key|name|where)\}[\w.]*): """)


def files(package: Path) -> Iterator[Path]:
    for name in FOLDERS:
        path = package / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def keys_of(call: ast.Call) -> list[ast.expr]:
    """Arguments that are keys: `Error.at(KEY, words, *others)` or `Error(words, *keys)`."""
    if any(keyword.arg == "environment" for keyword in call.keywords):
        return []  # those of an environment's section, whose settings may be any
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.attr == "at":
        return [*call.args[:1], *call.args[2:]] if function.value.id in ERRORS else []
    return call.args[1:] if isinstance(function, ast.Name) and function.id in ERRORS else []


def literal_keys(package: Path) -> Iterator[tuple[str, str]]:
    """Each with the place of the call."""
    for file in files(package):
        place = file.relative_to(package).as_posix()
        if place in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for key in keys_of(node) if isinstance(node, ast.Call) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield f"{place}:{node.lineno}", key.value


def test_keys_of_refusals_exist(repository: Path) -> None:
    known = {plain_path(path) for form in (*FORMS, *OF_PROCESSES) for path in paths_of(form)}
    found = list(literal_keys(repository / "python" / "primerl"))
    assert len(found) > 100
    assert [(place, key) for place, key in found if plain_path(key) not in known] == []


def without_key(package: Path) -> Iterator[str]:
    """Places of refusals that begin with a key, in words alone."""
    for file in [*files(package), *sorted((package / "config" / "process_files").rglob("*.py"))]:
        place = file.relative_to(package).as_posix()
        if place in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[words], keywords=[]) if name in ERRORS:
                    if KEYED.match(ast.unparse(words)):
                        yield f"{place}:{node.lineno}"


def test_no_refusal_says_its_key_in_words_alone(repository: Path) -> None:
    assert list(without_key(repository / "python" / "primerl")) == []


def test_a_key_passes_through_all_layers() -> None:
    problems = Problems()
    with problems.noted(), renamed({"model.path": "model"}):
        try:
            raise UnservableError.at("model.path", "no model", "inference.backend")
        except UnservableError as error:
            raise ConfigError.like(error) from None
    with problems.noted():
        raise ConfigError("environment 'a': no", "args", environment="a")
    with pytest.raises(ConfigError) as caught:
        problems.check()
    first, second = caught.value.problems
    assert str(caught.value) == "model: no model\nenvironment 'a': no"
    assert (first, first.reason, first.keys) == ("model: no model", "no model", ("model", "inference.backend"))
    assert (second.key, second.environment) == ("args", "a")


def test_an_error_of_a_rank_keeps_its_key() -> None:
    error = pickle.loads(pickle.dumps(SettingError.at("data.path", "no")))
    assert (str(error), error.keys) == ("data.path: no", ("data.path",))
    assert Problem("no").key is None
