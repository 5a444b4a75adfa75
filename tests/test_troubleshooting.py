"""Every stable name in the sources is on the page that explains it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from primerl.config.describe import fields, forms

SOURCES = [f"rust/primerl-{crate}/src" for crate in ("service", "engines", "gateway", "orchestrator")]
CODE = re.compile(
    r"(?:\.code\(|ApiError::(?:conflict|gone|unavailable|not_found)\(|code: Some\()"
    r"\s*(?:\"(\w+)\"|(?:\w+::)*([A-Z_]{4,}))"
)


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "troubleshooting.md").read_text()


def explained(page: str) -> set[str]:
    """The code in the first columns of tables."""
    return {
        name
        for line in page.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def without_tests(repository: Path) -> dict[Path, str]:
    folders = [repository / folder for folder in SOURCES]
    files = [file for folder in folders for file in folder.rglob("*.rs") if "test" not in str(file.relative_to(folder))]
    return {file: file.read_text().split("#[cfg(test)]\nmod tests")[0] for file in files}


def test_every_code_of_the_gateway_is_explained(repository: Path, page: str) -> None:
    sources = without_tests(repository)
    text = "\n".join(sources.values())
    constants = dict(re.findall(r"const ([A-Z_]+): &(?:'static )?str =\s*\"([a-z_]+)\"", text))
    found = {literal or constants[constant] for literal, constant in CODE.findall(text)}
    assert len(found) > 25, "the pattern has lost them"
    assert found <= explained(page), found - explained(page)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("rust/primerl-core/src/counters.rs", r"CancelReason::\w+ => \"(\w+)\""),
        ("rust/primerl-render/src/renderer/extend.rs", r"NotExtendable::\w+(?: \{ \.\. \}|\(_\))? => \"(\w+)\""),
    ],
)
def test_every_named_reason_is_explained(file: str, pattern: str, repository: Path, page: str) -> None:
    found = set(re.findall(pattern, (repository / file).read_text()))
    assert len(found) >= 6
    assert found <= explained(page), found - explained(page)


def test_every_fork_is_explained(repository: Path, page: str) -> None:
    source = (repository / "rust/primerl-core/src/turn.rs").read_text()
    variants = re.findall(r"^    (\w+),$", source.split("pub enum ForkReason {")[1].split("\n}")[0], flags=re.MULTILINE)
    names = {re.sub(r"(?<!^)(?=[A-Z])", "_", variant).lower() for variant in variants}
    assert len(names) >= 6
    assert names <= explained(page), names - explained(page)


def test_every_failure_of_a_run_is_explained_in_its_own_words(repository: Path, page: str) -> None:
    source = (
        (repository / "rust/primerl-orchestrator/src/failure.rs")
        .read_text()
        .split("pub enum RunError {")[1]
        .split("\n}")[0]
    )
    messages = re.findall(r'#\[error\(\s*"((?:[^"\\]|\\.)*)"', source, flags=re.DOTALL)
    assert len(messages) >= 14
    words = " ".join(page.split())
    for message in messages:
        constant = [part.strip() for part in re.split(r"\{[^}]*\}", " ".join(message.replace("\\\n", " ").split()))]
        telling = [part for part in constant if len(part) > 12]
        assert not telling or any(part.strip("; ,:") in words for part in telling), message


def test_keys_that_the_page_names_exist(page: str) -> None:
    root = forms.tree("rl")
    for key in re.findall(r"`((?:orchestrator|inference|trainer|ckpt)\.\w[\w.]*)`", page):
        assert fields.find(root, key) is not None, key
    for flag in re.findall(r"--((?:log|ckpt|orchestrator|trainer)\.[\w.-]+)", page):
        assert fields.find(root, flag) is not None, flag
