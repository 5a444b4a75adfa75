#!/usr/bin/env python3
"""Lists cycles among the top modules of each Rust crate, and exits with 1 when there are any.

A crate's top modules are what `lib.rs` declares; one depends on another when a file of it, tests left out, names it by
`crate::` or `super::`. What `lib.rs` re-exports counts as the module it comes from. `files_of` looks closer: at single
files, through everything that is re-exported.

    python scripts/module_cycles.py [-v] [rust/primerl-orchestrator ...]
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, dict[str, set[str]]]
"""By module: the modules it depends on, and the files of it in which they are named."""

COMMENT = re.compile(r"//[^\n]*")
INLINE_TESTS = re.compile(r"#\[cfg\(test\)\]\s*(pub(\(\w+\))? )?mod \w+ \{")
TEST_ITEM = re.compile(r"#\[cfg\((test|all\(test[^\]]*|any\(test[^\]]*)\)\]\s*(pub(\(\w+\))? )?(use|mod) [^;{]*;")
RELATIVE = re.compile(r"\b(?:crate|super(?:::super)*)::")
EXPORT = re.compile(r"\bpub(?:\(\w+\))? use\s+([^;]*);")
CHILD = re.compile(r"\bmod (\w+);")
IMPORT = re.compile(r"\buse\s+([^;]*);")


def is_test(path: Path) -> bool:
    return path.stem in ("tests", "testing") or any(part in ("tests", "testing") for part in path.parts)


def source_of(path: Path) -> str:
    text = COMMENT.sub("", path.read_text(encoding="utf-8"))
    return TEST_ITEM.sub("", INLINE_TESTS.split(text, maxsplit=1)[0])


def entries(text: str) -> list[str]:
    """`a::{b, c}, d` -> `a::{b, c}`, `d`."""
    found, depth, entry = [], 0, ""
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            found.append(entry)
            entry = ""
        else:
            entry += char
    return [entry.strip() for entry in [*found, entry] if entry.strip()]


def paths(tree: str) -> Iterator[tuple[str, ...]]:
    """Of a `use` tree: `a::{b, c::d}` -> (a, b), (a, c, d)."""
    head, brace, rest = tree.partition("{")
    names = [name.strip() for name in head.split("::") if name.strip()]
    if not brace:
        yield tuple(name.split(" as ")[0] for name in names)
        return
    for entry in entries(rest.rsplit("}", 1)[0]):
        for path in paths(entry):
            yield (*names, *path)


def tree_at(text: str, start: int) -> str:
    """The path that begins here, with its braces."""
    end, depth = start, 0
    while end < len(text):
        char = text[end]
        depth += (char == "{") - (char == "}")
        if depth < 0 or (depth == 0 and not (char.isalnum() or char in "_:}")):
            break
        end += 1
    return text[start:end]


def named(text: str, module: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Absolute paths that a file of this module names."""
    for match in RELATIVE.finditer(text):
        if text[: match.start()].endswith("::"):
            continue
        levels = match.group().count("super")
        base = module[: len(module) - levels] if levels else ()
        for path in paths(tree_at(text, match.end())):
            yield (*base, *path)


def module_of(path: Path, source: Path) -> tuple[str, ...]:
    parts = path.relative_to(source).with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


def graph_of(source: Path) -> Graph:
    root = source / "lib.rs"
    exported: dict[str, str] = {}
    for match in IMPORT.finditer(source_of(root)):
        for path in paths(match.group(1).removeprefix("self::")):
            exported.setdefault(path[-1], path[0])
    graph: Graph = {}
    for path in sorted(source.rglob("*.rs")):
        module = module_of(path, source)
        if is_test(path.relative_to(source)) or path == root or module[0] in ("main", "bin"):
            continue
        used = graph.setdefault(module[0], {})
        for name in named(source_of(path), module):
            first = exported.get(name[0], name[0]) if name else ""
            if first != module[0]:
                used.setdefault(first, set()).add(str(path.relative_to(source)))
    return {module: {name: files for name, files in used.items() if name in graph} for module, used in graph.items()}


def defined(name: tuple[str, ...], exported: dict[tuple[str, ...], tuple[str, ...]]) -> tuple[str, ...]:
    """Where it is defined: through all re-exports, of it or of a module that it is in."""
    for _ in exported:  # no name is re-exported more often
        shown = next((head for head in heads(name) if head in exported), None)
        if shown is None:
            break
        name = (*exported[shown], *name[len(shown) :])
    return name


def heads(name: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (name[:length] for length in range(len(name), 0, -1))


def files_of(source: Path, without: str) -> dict[str, dict[str, set[str]]]:
    """Which file of a crate depends on which, by module paths. What is re-exported counts where it is defined, and a
    re-export is no dependency. `without`: a name of the root that counts for nothing."""
    texts = {
        module_of(path, source): source_of(path)
        for path in sorted(source.rglob("*.rs"))
        if not is_test(path.relative_to(source)) and path != source / "lib.rs"
    }
    exported: dict[tuple[str, ...], tuple[str, ...]] = {}
    for module, text in [((), source_of(source / "lib.rs")), *texts.items()]:
        for match in EXPORT.finditer(text):
            for path in paths(match.group(1)):
                whole = absolute(path, module)
                if path[-1] != "*" and (*module, path[-1]) not in texts:
                    exported[(*module, path[-1])] = whole
    graph: dict[str, dict[str, set[str]]] = {"::".join(module): {} for module in texts}
    for module, text in texts.items():
        text = EXPORT.sub("", text)
        children = [(*module, *path) for path in child_paths(text)]
        for name in [*named(text, module), *children]:
            if name == (without,):
                continue
            place = next((head for head in heads(defined(name, exported)) if head in texts), module)
            if place != module:
                graph["::".join(module)].setdefault("::".join(place), set()).add("::".join(name))
    return graph


def absolute(path: tuple[str, ...], module: tuple[str, ...]) -> tuple[str, ...]:
    levels = sum(name == "super" for name in path)
    if path[0] == "crate":
        return path[1:]
    return (*module[: len(module) - levels], *path[levels + (path[0] == "self") :])


def child_paths(text: str) -> Iterator[tuple[str, ...]]:
    """What a file names of the modules that it declares itself."""
    for child in CHILD.findall(text):
        for match in re.finditer(rf"(?<![\w:]){child}::", text):
            yield from paths(tree_at(text, match.start()))


def cycles(graph: Graph) -> list[list[str]]:
    """Modules that depend on each other, in sets as large as they can be."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            left.extend(new := graph[left.pop()].keys() - seen)
            seen.update(new)
        return seen

    reach = {module: reached(module) for module in graph}
    found = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return sorted(sorted(group) for group in found if group)


def main(arguments: list[str]) -> int:
    verbose = "-v" in arguments
    crates = [Path(argument) for argument in arguments if argument != "-v"]
    crates = crates or sorted(path.parent for path in Path("rust").glob("*/Cargo.toml"))
    failed = False
    for crate in crates:
        if not (crate / "src/lib.rs").exists():
            continue
        graph = graph_of(crate / "src")
        for group in cycles(graph):
            failed = True
            print(f"{crate}: {len(group)} modules depend on each other: {' '.join(group)}")
            for module in group if verbose else ():
                for other in group:
                    if files := graph[module].get(other):
                        print(f"  {module} -> {other}: {', '.join(sorted(files))}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
