"""What the two sides of the orchestrator's config refuse: the classes, and the native program, which also reads files
that no class has seen. A rule of one side alone would be found late, or never."""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import get_args

import pytest
from config_rules import FILTERS, OF_THE_NATIVE_SIDE, RULES, SERVER, TEXT, TOKEN, Config, Rule, run
from primerl._core import check_config
from primerl.config.command_line.arguments import dotted
from primerl.config.schema.orchestrator import OrchestratorConfig
from primerl.config.schema.rollouts import Algorithm
from pydantic import ValidationError
from pydantic_core import ErrorDetails


def refused(config: Config) -> ErrorDetails | None:
    """By the classes."""
    try:
        OrchestratorConfig.model_validate(copy.deepcopy(config))
    except ValidationError as error:
        return error.errors()[0]
    return None


def key_of(detail: ErrorDetails) -> str:
    keys = detail["ctx"]["error"].keys
    return ".".join(filter(None, [dotted(detail["loc"]), keys[0]]))


def numbered(key: str, config: Config) -> str:
    """The native side calls environments by their names; where two have one, it means the last."""
    found = re.fullmatch(r"(train|eval)\.env\.(.*)", key)
    if found is None:
        return key
    role, rest = found.groups()
    suffix = {"train": "", "eval": "-eval"}[role]
    for index, entry in reversed(list(enumerate(config[role]["env"]))):
        name = entry.get("name", entry["id"].rpartition("/")[2].partition("@")[0] + suffix)
        if is_within(rest, name):
            return f"{role}.env[{index}]{rest.removeprefix(name)}"
    raise AssertionError(key)


def is_within(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_both_sides_refuse_what_does_not_go_together(rule: Rule) -> None:
    detail, native = refused(rule.broken), check_config(rule.broken)
    assert detail is not None, native
    assert native is not None, detail["msg"]
    assert is_within(key_of(detail), rule.key), detail["msg"]
    key, message = native
    assert key is not None, message
    assert is_within(numbered(key, rule.broken), rule.key), message


@pytest.mark.parametrize("rule", [*RULES, *OF_THE_NATIVE_SIDE], ids=lambda rule: rule.key)
def test_both_sides_take_what_goes_together(rule: Rule) -> None:
    assert (refused(rule.kept), check_config(rule.kept)) == (None, None)


@pytest.mark.parametrize("rule", OF_THE_NATIVE_SIDE, ids=lambda rule: rule.key)
def test_the_native_side_has_rules_of_its_own(rule: Rule) -> None:
    assert refused(rule.broken) is None
    native = check_config(rule.broken)
    assert native is not None
    assert native[0] == rule.key


# Parameters of the types that have none by default.
GIVEN: dict[str, Config] = {"custom": {"path": "m:f"}, "hierarchical_grpo": {"episode_agents": ["s"]}}


@pytest.mark.parametrize("kind", get_args(Algorithm.model_fields["type"].annotation))
def test_both_sides_compare_rollouts_by_the_same_algorithms(kind: str) -> None:
    """A relative one refuses groups of one rollout."""
    keys = {"type": kind, **GIVEN.get(kind, {})}
    of_one = run(group_size=1, algorithm=keys)
    refusal = ("group_size",) if Algorithm(**keys).is_relative else None
    native = check_config(of_one)
    assert (native and native[:1], refused(of_one) is not None) == (refusal, refusal is not None)
    assert check_config(run(group_size=2, algorithm=keys)) is None


# What a config may have; most have none of one line.
PARTS: list[list[Config]] = [
    [{}, {"training_mode": "opd"}, {"training_mode": "sft"}, {"training_mode": "opsd"}],
    [{}, {"client_type": TOKEN}],
    [{}, {}, {"teacher": {"client": SERVER}}, {"teacher": {"client": {**SERVER, "client_type": TEXT}}}],
    [{}, {}, {"demonstration": {"key": "k"}}],
    [{}, {"control_tokens": "neutralize"}],
    [{}, {"batch_size": 12}, {"token_batch_size": 4096}, {"batch_size": 4}],
    [{}, {"group_size": 2}, {"group_size": 1}],
    [{}, {}, {"min_group_size": 4}],
    [{}, {}, {"buffer": FILTERS}, {"buffer": {"env_ratios": [1.0, 1.0]}}],
    [{}, {}, {"algorithm": {"echo": {}}}, {"algorithm": {"type": "rae"}}, {"algorithm": {"type": "custom"}}],
    [{}, {}, {"timeouts": {"rollout_s": 50.0}}],
    [{}, {}, {}, {"max_steps": 0}],
]
OF_ENVIRONMENT: list[list[Config]] = [
    [{}, {}, {"training_mode": "rl"}, {"training_mode": "opd"}, {"training_mode": "opsd"}],
    [{}, {}, {"teacher": {"client": SERVER}}],
    [{}, {}, {"demonstration": {}}],
    [{}, {}, {"group_size": 4}, {"group_size": 1}],
    [{}, {}, {"ratio": 2.0}],
    [{}, {}, {"algorithm": {}}, {"algorithm": {"type": "rae", "decay": 0.5}}, {"algorithm": {"decay": 0.5}}],
    [{}, {}, {"sampling": {"top_p": 0.5}}],
    [{}, {}, {"rollout_s": 60.0}, {"limits": {"time_s": 60.0}}],
]
OF_EVALUATION: list[list[Config]] = [[{}, {"name": "a"}, {"validates": "a"}], [{}, {"client": SERVER}]]


def drawn(parts: list[list[Config]], draw: random.Random, most: int) -> Config:
    found: Config = {}
    for choices in draw.sample(parts, draw.randint(0, most)):
        found |= draw.choice(choices)
    return found


def combinations(number: int) -> Iterator[Config]:
    draw = random.Random(7)
    for _ in range(number):
        train = [{"id": name, **drawn(OF_ENVIRONMENT, draw, 2)} for name in "ab"[: draw.choice([0, 1, 1, 2])]]
        evaluated = [{"id": "a", **drawn(OF_EVALUATION, draw, 2)}] * draw.choice([0, 1])
        keys = {"output_dir": "o", "max_steps": 2, "model": {"path": "m"}}
        yield {**keys, "train": {"env": train}, "eval": {"env": evaluated}, **drawn(PARTS, draw, 4)}


def test_both_sides_agree_on_combinations() -> None:
    own = [native[1] for rule in OF_THE_NATIVE_SIDE if (native := check_config(rule.broken)) is not None]
    taken = 0
    for config in combinations(2000):
        detail, native = refused(config), check_config(config)
        if native is not None and native[1] in own:
            continue
        assert (detail is None) == (native is None), (config, detail and detail["msg"], native)
        taken += detail is None
    assert 300 < taken < 1700, taken


# Refusals of the classes that no file of an orchestrator meets, by function.
ELSEWHERE = {
    "check_held_out": "held out examples, of which the orchestrator knows nothing",
    "_check_number": "likewise",
    "_is_validated": "`val`, which becomes environments",
    "_holds_some_out": "likewise",
    "_is_one_of_two": "`python` of env workers",
    "check_ports": "ports of env workers",
    "_reads_the_prompt": "settings of env workers",
    "_is_given_once": "likewise",
    "_as_told": "a tailnet",
    "_as_toml": "JSON's null, and numbers that TOML does not hold",
    "_true_is_no_number": "a type, which the schema has",
    "check_dry_run": "a flag of commands",
}
MODULES = ("base", "environment", "environment_checks", "learning", "orchestrator", "rollouts", "services")


def raises_of(tree: ast.AST, function: str = "") -> Iterator[tuple[str, range]]:
    """The lines of each refusal, with the function that it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            assert node.end_lineno is not None
            if isinstance(node.exc.func, ast.Name) and node.exc.func.id == "BadKeysError":
                yield function, range(node.lineno, node.end_lineno + 1)
        name = node.name if isinstance(node, ast.FunctionDef) else function
        yield from raises_of(node, name)


def raised_at(detail: ErrorDetails) -> tuple[str, int]:
    """File and line."""
    error: Exception = detail["ctx"]["error"]
    last: TracebackType | None = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_code.co_filename, last.tb_lineno


def test_each_rule_of_the_classes_has_a_case(repository: Path) -> None:
    seen = [raised_at(detail) for rule in RULES if (detail := refused(rule.broken)) is not None]
    without, functions = [], set()
    for module in MODULES:
        file = repository / "python" / "primerl" / "config" / "schema" / f"{module}.py"
        for function, lines in raises_of(ast.parse(file.read_text(encoding="utf-8"))):
            functions.add(function)
            if function not in ELSEWHERE and not any(Path(path) == file and line in lines for path, line in seen):
                without.append(f"{module}.py:{lines[0]} {function}")
    assert without == []
    assert ELSEWHERE.keys() <= functions


NATIVE = (
    *("primerl-core/src/config.rs", "primerl-core/src/config/*.rs"),
    *("primerl-core/src/advantage/algorithm.rs", "primerl-core/src/advantage/settings.rs"),
    *("primerl-engines/src/clients/config.rs", "primerl-orchestrator/src/config/*.rs"),
)
NO_RULES = ("schema.rs", "testing.rs", "tests.rs")
"""What a key alone may be, and tests."""
# Texts of the native side that no config of a file is refused with.
UNMET = {
    "environments[{index}].name is empty; give it a name": "an id or a name is never empty",
    "environments[{index}] ({name:?}) trains but comes after an evaluation environment; list training environments "
    "first": "a file has two lists",
    "flops.{field} = {value} must be a finite number of at least 0, and one of the two above 0": "no key",
    "`{level}` is no log level": "the schema has the levels",
    "use error, warn, info, debug or trace": "likewise",
    "a URL or a list of URLs": "the schema has the types",
}


def texts(source: str) -> Iterator[str]:
    """Literals of a few words, of what is no test."""
    code = source.partition("#[cfg(test)]")[0]
    code = "\n".join(line for line in code.split("\n") if not line.lstrip().startswith("//"))
    for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', code, re.DOTALL):
        text = re.sub(r"\\\n\s*", "", literal).replace('\\"', '"')
        if text.count(" ") >= 3:
            yield text


def as_pattern(text: str) -> str:
    return ".*".join(map(re.escape, re.split(r"\{[^{}]*\}", text)))


def test_each_rule_of_the_native_side_has_a_case(repository: Path) -> None:
    refusals = [check_config(rule.broken) for rule in [*RULES, *OF_THE_NATIVE_SIDE]]
    said = "\n".join(refusal[1] for refusal in refusals if refusal is not None)
    named = [sorted((repository / "rust").glob(name)) for name in NATIVE]
    assert all(named), "a file that was moved has its rules elsewhere"
    files = [file for group in named for file in group if file.name not in NO_RULES]
    found = [text for file in files for text in texts(file.read_text(encoding="utf-8"))]
    assert len(found) > 60
    without = [text for text in found if not re.search(as_pattern(text), said)]
    assert sorted(without) == sorted(UNMET)
