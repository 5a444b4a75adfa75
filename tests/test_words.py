"""scripts/words.py finds its phrases where readers see them, and nothing in code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", REPOSITORY / "scripts" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


PYTHON = '''"""The run goes on."""

# A comment over two lines is told
# in one block, and the run goes
# on.
text = f"{name} is left out"  # Of the run.
nobody = goes_on(beside)  # `nobody` is a name
kept = "mend"  # words: allow
'''
RUST = r"""//! Of HTTP.
fn nobody<'a>(beside: &'a str) -> char {
    /* it is
       told */
    let quoted = "a \" mark, then anew";
    let raw = r#"a "quoted" fate"#;
    '"' // heard
        // of it
}
"""
MARKDOWN = """# Of course

Of the run. `nobody` is code, and ``so `is` anew``.

```sh
primerl go on   # goes on until Ctrl-C
```

| a | Of b |
|---|---|
It stands for that, goes on the disk, and goes
on.
A quote: is told <!-- words: allow -->
"""


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("x.py", PYTHON, [(1, "goes on"), (3, "is told"), (4, "goes on"), (6, "left out"), (6, "Of")]),
        ("x.rs", RUST, [(1, "Of"), (3, "is told"), (5, "anew"), (6, "fate"), (7, "heard of")]),
        ("x.md", MARKDOWN, [(3, "Of"), (6, "goes on"), (9, "Of"), (11, "goes on")]),
        ("x.toml", "# nobody", []),
    ],
)
def test_phrases_are_found_where_they_are_read(
    words: ModuleType, name: str, source: str, expected: list[tuple[int, str]]
) -> None:
    found = [(finding.line, finding.words) for finding in words.check(Path(name), source)]
    assert sorted(found) == sorted(expected)


def test_a_finding_says_what_to_write(words: ModuleType) -> None:
    [finding] = words.check(Path("x.md"), "The key is left out.\n")
    assert str(finding) == "x.md:1: 'left out': write omitted, unset, skipped, defaults to"


def test_paths_are_checked_or_refused(words: ModuleType) -> None:
    names = {file.as_posix() for file in words.files_below(["docs", "scripts/words.py"])}
    assert {"docs/concepts.md", "scripts/words.py"} <= names
    assert not names & set(words.SKIPPED)
    with pytest.raises(SystemExit, match="there is no docs/missing"):
        list(words.files_below(["docs/missing"]))


def test_folders_that_are_clean_stay_clean(words: ModuleType) -> None:
    assert words.main([]) == 0
