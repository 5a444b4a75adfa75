"""Modules of a Rust crate depend on each other in one direction."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

KNOWN = {
    # The machine and its stages: transitions are methods of `Core`, each in the folder of its stage.
    "primerl-core": [
        {
            "admission",
            "batch",
            "curriculum",
            "deadlines",
            "environment",
            "evaluation",
            "group",
            "machine",
            "metrics",
            "policy",
            "rollout",
            "signal",
            "status",
            "wait",
            "worker",
        }
    ],
}
"""Cycles that may stay. None may grow, none may come."""


@pytest.fixture(scope="module")
def module_cycles(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("module_cycles", repository / "scripts" / "module_cycles.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(source: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)


def test_no_crate_has_a_new_cycle_of_modules(repository: Path, module_cycles: ModuleType) -> None:
    crates = sorted(path.parent for path in (repository / "rust").glob("*/src/lib.rs"))
    assert crates
    for crate in crates:
        known = KNOWN.get(crate.parent.name, [])
        for cycle in module_cycles.cycles(module_cycles.graph_of(crate)):
            assert any(set(cycle) <= one for one in known), f"{crate.parent.name}: {' '.join(cycle)}"


def test_files_of_different_modules_are_in_no_cycle_but_through_the_machine(
    repository: Path, module_cycles: ModuleType
) -> None:
    for crate in sorted(path.parent for path in (repository / "rust").glob("*/src/lib.rs")):
        for cycle in module_cycles.cycles(module_cycles.files_of(crate, without="Core")):
            modules = {file.partition("::")[0] for file in cycle}
            assert len(modules) == 1, f"{crate.parent.name}: {' '.join(cycle)}"


def test_a_cycle_is_found_through_groups_of_imports_and_what_the_root_exports(
    tmp_path: Path, module_cycles: ModuleType
) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod c;\nmod d;\npub use b::{Kind, Other as Name};\n",
        "a.rs": "use crate::{c, Kind};\n",
        "b/mod.rs": "mod inner;\n",
        "b/inner.rs": "// use super::super::d;\nuse super::super::a::{self, X};\n",
        "c.rs": "use super::d::Y;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n",
        "d.rs": "#[cfg(test)]\nuse crate::c;\n",
    }
    write(tmp_path, files)
    graph = module_cycles.graph_of(tmp_path)
    assert {name: set(used) for name, used in graph.items()} == {"a": {"b", "c"}, "b": {"a"}, "c": {"d"}, "d": set()}
    assert module_cycles.cycles(graph) == [["a", "b"]]


def test_a_file_depends_on_where_a_name_is_defined(tmp_path: Path, module_cycles: ModuleType) -> None:
    files = {
        "lib.rs": "mod a;\nmod b;\nmod state;\npub use state::State;\n",
        "a.rs": "mod inner;\npub use inner::Kind;\nuse crate::b::{Own, State as Other};\n",
        "a/inner.rs": "use crate::State;\nfn f() { super::super::b::deep::g() }\n",
        "b/mod.rs": "mod deep;\npub(crate) use deep::*;\npub use self::deep::Own;\npub use super::State;\n",
        "b/deep.rs": "use crate::a::Kind;\n",
        "state.rs": "mod child;\nfn g() { child::h(crate::b::Own) }\n",
        "state/child.rs": "use super::State;\n",
    }
    write(tmp_path, files)
    graph = module_cycles.files_of(tmp_path, without="State")
    assert {name: set(used) for name, used in graph.items()} == {
        "a": {"b::deep", "state"},
        "a::inner": {"b::deep"},
        "b": set(),
        "b::deep": {"a::inner"},
        "state": {"state::child", "b::deep"},
        "state::child": {"state"},
    }
    assert module_cycles.cycles(graph) == [["a::inner", "b::deep"], ["state", "state::child"]]
