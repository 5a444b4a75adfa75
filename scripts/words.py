"""Finds phrases that CONTRIBUTING.md ("Style") replaces with plain English, in docs, comments and string literals.

    python scripts/words.py                 # checks the files below CHECKED; `make check-format` runs this
    python scripts/words.py rust python     # checks these instead
    python scripts/words.py --count rust    # the number of findings in each folder: which ones are clean

A folder that is clean belongs in CHECKED, so that it stays clean. A line that has to keep a phrase has the comment
`words: allow` (Markdown: `<!-- words: allow -->`). Code in backticks and output in fenced blocks are not checked.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKED = [
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs",
    "examples/reverse-classic/README.md",
    "examples/reverse-text/README.md",
    "examples/sort-letters/README.md",
    "fuzz/README.md",
    "python/primerl",
    "rust/primerl-core",
    "rust/primerl-engines",
    "rust/primerl-gateway",
    "rust/primerl-orchestrator",
    "rust/primerl-py",
    "rust/primerl-record",
    "rust/primerl-service",
    "scripts/words.py",
]
# The page of the current state.
SKIPPED = ["docs/status.md"]
ALLOWED = "words: allow"


@dataclass(frozen=True)
class Phrase:
    pattern: str
    instead: str
    is_opening: bool = False
    """Only at the beginning of a comment, a docstring, a paragraph or a table cell."""


PHRASES = [
    Phrase(r"\b(?:go|goes|going|gone|went) on(?! (?:an?|the|its|each|every|disk|top|[GC]PUs?)\b)", "continue, resume"),
    Phrase(r"\bnobody(?:'s)?\b", "no one, unused, no such"),
    Phrase(r"\b(?:is|are|was|were|be|been|being) (?:told|said)\b(?! apart\b)", "is reported, logs, warns"),
    Phrase(r"\b(?:tells?|told) of\b", "reports, shows"),
    Phrase(r"\b(?:hears?|heard) of\b", "heartbeat from, receives"),
    Phrase(r"\bbeside\b", "next to, alongside, in addition to, in the folder of"),
    Phrase(r"Of (?!course\b)", "a noun phrase: 'HTTP status code.'", is_opening=True),  # words: allow
    Phrase(r"\bmend(?:s|ed|ing)?\b", "fix, repair, hint"),
    Phrase(r"\bleft (?:out|alone)\b", "omitted, unset, skipped, defaults to"),
    Phrase(r"\b(?:leave|leaves|leaving)(?: \w+)? out\b", "omit, skip, drop"),
    Phrase(r"\banew\b", "again, new"),
    Phrase(r"\b(?:of|from) elsewhere\b", "other, on another machine"),
    Phrase(r"\b[Ww]hoever\b", "the process that, anyone who"),
    Phrase(r"\bfates?\b", "status, end"),
    Phrase(r"\bfor want of\b", "for lack of"),
    Phrase(r"\b(?:come|comes|came) to nothing\b", "fails, gives no result"),
    Phrase(r"\b(?:take|takes|took) (?:\w+ ){1,3}along\b", "also ends, also fails"),
    Phrase(r"\bstands? in(?! for\b)\b", "is in, appears in"),
    Phrase(r"\bthe ones? before\b", "the previous one"),
    Phrase(r"\ban own\b", "its own, a separate"),
    Phrase(r"\bas ever\b", "unchanged, as usual"),
    Phrase(r"\bwithout a (?:\w+ )?word\b", "silently, without output"),
    Phrase(r"\b(?:first|worker's|reporter's) word\b", "the first registration wins, the worker's report"),
    Phrase(r"\bspeaks? against\b", "is blamed on, rules out"),
    Phrase(r"\bthat (?:is|are) none\b", "that is not one, an invalid"),
]
OPENING = r"(?:\A\W*|\n\n\W*|\| )"
COMPILED = [
    (re.compile((OPENING if phrase.is_opening else "") + phrase.pattern.replace(" ", r"\s+")), phrase)
    for phrase in PHRASES
]


@dataclass(frozen=True)
class Text:
    """A comment block, a string literal or a page, with the line where it begins."""

    line: int
    text: str


def texts_of(file: Path, source: str) -> Iterator[Text]:
    if file.suffix == ".py":
        yield from joined(python_texts(source))
    elif file.suffix == ".rs":
        yield from joined(rust_texts(source))
    elif file.suffix == ".md":
        yield Text(1, markdown_prose(source))


def python_texts(source: str) -> Iterator[tuple[Text, bool]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string.lstrip("#:! ")), True
        elif token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            yield Text(token.start[0], without_code(re.sub(r"^\w*[\"']+|[\"']+$", "", token.string))), False


RUST = re.compile(
    r"""(?P<line>//[/!]?[^\n]*)
      | (?P<block>/\*.*?\*/)
      | (?P<raw>\bb?r(?P<hashes>\#*)".*?"(?P=hashes))
      | (?P<string>\bb?"(?:[^"\\]|\\.)*"|"(?:[^"\\]|\\.)*")
      | (?P<char>b?'(?:[^'\\\n]|\\[^\n]{1,9}?)')""",
    re.VERBOSE | re.DOTALL,
)


def rust_texts(source: str) -> Iterator[tuple[Text, bool]]:
    line, seen = 1, 0
    for match in RUST.finditer(source):
        line, seen = line + source.count("\n", seen, match.start()), match.start()
        if match["line"]:
            yield Text(line, match[0].lstrip("/! ")), True
        elif not match["char"]:
            yield Text(line, without_code(match[0].strip('"'))), False


def joined(found: Iterator[tuple[Text, bool]]) -> Iterator[Text]:
    """Comments on consecutive lines as one text, so that a phrase may run over the end of a line."""
    block: list[str] = []
    first = 0
    for text, is_comment in found:
        if block and (not is_comment or text.line != first + len(block)):
            yield Text(first, without_code("\n".join(block)))
            block = []
        if is_comment:
            first = first if block else text.line
            block.append(text.text)
        else:
            yield text
    if block:
        yield Text(first, without_code("\n".join(block)))


FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(`+)(?:(?!\n\n).)*?\1", re.DOTALL)


def without_code(text: str) -> str:
    return INLINE.sub(blank, text)


def markdown_prose(source: str) -> str:
    """Prose, and the comments of fenced blocks, on the lines where they were."""
    return without_code(FENCE.sub(lambda fence: "\n".join(map(comment_in, fence[0].split("\n"))), source))


def comment_in(line: str) -> str:
    _, hash_sign, comment = line.partition("# ")
    return comment if hash_sign else ""


def blank(match: re.Match[str]) -> str:
    return "`" + "\n" * match[0].count("\n") + "`"


@dataclass(frozen=True)
class Finding:
    file: Path
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words!r}: write {self.instead}"


def check(file: Path, source: str) -> Iterator[Finding]:
    lines = source.split("\n")
    for text in texts_of(file, source):
        found: set[int] = set()
        for pattern, phrase in COMPILED:
            for match in pattern.finditer(text.text):
                words = " ".join(match[0].split()).lstrip("|\"' ")
                start = match.end() - len(match[0].lstrip())
                line = text.line + text.text.count("\n", 0, start)
                last = text.line + text.text.count("\n", 0, match.end())
                if match.end() not in found and not any(ALLOWED in kept for kept in lines[line - 1 : last]):
                    yield Finding(file, line, words, phrase.instead)
                found.update(range(match.start(), match.end() + 1))


def files_below(paths: list[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        place = REPOSITORY / path
        if not place.exists():
            raise SystemExit(f"scripts/words.py: there is no {path}; change CHECKED or the argument")
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            name = file.relative_to(REPOSITORY)
            if file.suffix in (".md", ".py", ".rs") and name.as_posix() not in SKIPPED:
                yield name


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", action="store_true", help="print the number of findings in each folder")
    parser.add_argument("paths", nargs="*", default=CHECKED, help="files and folders of the repository")
    given = parser.parse_args(arguments)
    found = [
        finding
        for file in files_below(given.paths)
        for finding in check(file, (REPOSITORY / file).read_text(encoding="utf-8"))
    ]
    if given.count:
        folders = Counter(finding.file.parent.as_posix() for finding in found)
        for folder in sorted({file.parent.as_posix() for file in files_below(given.paths)}):
            print(f"{folders[folder]:5} {folder}")
    else:
        for finding in found:
            print(finding, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
