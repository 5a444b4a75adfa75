"""Each metric that the sources name has a row in docs/metrics.md. Those of a whole run: `tests/test_end_to_end.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics_page import names_in, rows, without_row

RUST = ("metrics.rs", "batch/cut.rs")
LITERAL = re.compile(r'(spread\(\s*&?(?:format!\()?)?"([a-z_]+/[^"\s]*|[a-z_]+/)"')
PYTHON = ("loop", "model")
METRIC = re.compile(r"[a-z_]+[\w{}]*/[\w/{}]+")


@pytest.fixture(scope="module")
def known(repository: Path) -> set[str]:
    return rows(repository)


def of_rust(repository: Path) -> set[str]:
    """As the core writes them, with `{...}` for what is put in."""
    found = set()
    for name in RUST:
        text = (repository / "rust" / "primerl-core" / "src" / name).read_text(encoding="utf-8")
        code = re.sub(r"//.*", "", text)
        for spread, metric in LITERAL.findall(code):
            found |= {f"{metric}/{what}" for what in ("mean", "max", "min")} if spread else {metric}
    return found


def of_python(repository: Path) -> set[str]:
    """Keys of dictionaries that look like metrics, and the parts of a step's time."""
    found = set()
    for folder in PYTHON:
        for path in sorted((repository / "python" / "primerl" / "train" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found |= {name for key in keys(node) if METRIC.fullmatch(name := written(key))}
                found |= {f"time/{part}" for part in parts(node)}
    return found


def keys(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Dict():
            yield from (key for key in node.keys if key is not None)
        case ast.DictComp():
            yield node.key
        case ast.Subscript(ctx=ast.Store()):
            yield node.slice


def parts(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(attr="lap" | "add_background"), args=[ast.Constant(value=str(name)), *_]):
            yield name


def written(key: ast.expr) -> str:
    """The text of a string, with `{}` for what an f-string puts in; empty for anything else."""
    match key:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in key.values)
    return ""


def test_a_row_is_read_as_it_is_meant() -> None:
    assert names_in("| `a_{b,c}/{mean,max}`, `.../<g>/mean`, `step`") == {
        *("a_b/mean", "a_b/max", "a_c/mean", "a_c/max"),
        *("a_b/<g>/mean", "a_c/<g>/mean"),
    }
    assert without_row(["a/x", "a/x/y", "z/all"], ["a/<n>", "<any>/all"]) == ["a/x/y", "z/all"]
    assert without_row(["a/to_{}/{}b", "a/{}", "b/{}"], ["a/to_c/b", "a/c"]) == ["b/{}"]


def test_every_metric_of_the_sources_has_a_row(known: set[str], repository: Path) -> None:
    found = of_rust(repository) | of_python(repository)
    assert len(found) > 80
    assert {"pack/fill", "cancelled/{}", "num_turns/{name}/max", "optim/lr", "time/broadcast_thread"} <= found
    fine_tuning = (repository / "docs" / "sft.md").read_text(encoding="utf-8")
    assert without_row(found, known | names_in(fine_tuning)) == []
    assert "<metric>/all/mean" in known
