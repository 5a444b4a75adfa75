"""The parts of the documentation's pages: fenced blocks with the marks before them, links, headings."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SHELL = ("", "sh", "bash", "console")
"""Languages of blocks that hold commands. Other text is labelled `text`."""
LANGUAGES = (*SHELL, "text", "toml", "json", "python", "ini", "yaml", "jinja", "mermaid")
MARKS = ("not run", "run by", "trains with", "fragment of")
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- *([^:>]+?): *(.*?) *-->", re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:toml|py|jsonl|json))\n")


class PageError(Exception):
    """The message names the page, the line, and what to write instead."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    before: str
    """The page's text right before the block."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @cached_property
    def marks(self) -> dict[str, str]:
        """The comments on the lines right before the block."""
        comments = re.search(r"(?:^ *<!--(?:(?!-->).)*--> *\n)+\Z", self.before, re.MULTILINE | re.DOTALL)
        found = dict(MARK.findall(comments[0])) if comments else {}
        unknown = found.keys() - set(MARKS)
        if unknown:
            raise PageError(f"{self.place}: unknown mark {unknown.pop()!r}; there are {', '.join(MARKS)}")
        return {name: " ".join(value.split()) for name, value in found.items()}

    @property
    def file(self) -> str | None:
        """The file that the block contains: its first line is a comment with the name."""
        named = FILE.match(self.text) if self.language in ("toml", "python", "json") else None
        return named[1] if named else None

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL

    def commands(self) -> list[Command]:
        """Without comments, with continued lines joined. Where lines begin with `$ `, only these are commands."""
        lines = self.text.replace("\\\n", " ").splitlines()
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = [Command.read(line, self) for line in (prompted or lines)]
        return [command for command in found if command is not None]

    @property
    def is_run(self) -> bool:
        return not {"not run", "run by"} & self.marks.keys()


@dataclass(frozen=True)
class Command:
    line: str
    words: list[str]
    block: Block

    @classmethod
    def read(cls, line: str, block: Block) -> Command | None:
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            if not block.is_run and not line.startswith("primerl"):  # `<the model's name>` to be filled in
                return None
            raise PageError(f"{block.place}: {line!r} is no command: {error}; label other text `text`") from None
        # As bash reads it: `#` begins a comment at the beginning of a word, outside quotes.
        bare = re.sub(r"""^((?:"[^"]*"|'[^']*'|[^"'#]|(?<=\S)#)*)(?<!\S)#.*$""", r"\1", line).strip()
        return cls(bare, words, block) if words else None

    @property
    def is_primerl(self) -> bool:
        return self.words[0] == "primerl"

    def __str__(self) -> str:
        return f"{self.block.place}: {self.line}"


@dataclass(frozen=True)
class Page:
    path: Path
    name: str
    """As seen from the repository."""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in FENCE.finditer(self.text):
            before = self.text[: match.start()]
            line, language = before.count("\n") + 1, match[3].strip()
            if language not in LANGUAGES:
                raise PageError(f"{self.name}:{line}: unknown language {language!r}; there are {', '.join(LANGUAGES)}")
            found.append(Block(self.name, line, language, textwrap.dedent(match[4]), before))
        return found

    def shell(self) -> Iterator[Block]:
        return (block for block in self.blocks if block.is_shell)

    @cached_property
    def prose(self) -> str:
        """Without blocks, comments and code, which hold no links."""
        text = re.sub(r"<!--.*?-->", "", FENCE.sub("", self.text), flags=re.DOTALL)
        return re.sub(r"(`+).*?\1", lambda code: re.sub(r"[\[\]()]", " ", code[0]), text, flags=re.DOTALL)

    @cached_property
    def links(self) -> list[str]:
        return re.findall(r"\]\(<?([^()\s>]+)>?\)", self.prose)

    @cached_property
    def anchors(self) -> set[str]:
        """As GitHub makes them of headings, and those that the page sets itself."""
        found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", self.text))
        for heading in re.findall(r"^#+ +(.*?) *#*$", FENCE.sub("", self.text), re.MULTILINE):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            same = (slug if number == 0 else f"{slug}-{number}" for number in range(len(found) + 1))
            found.add(next(anchor for anchor in same if anchor not in found))
        return found


def pages(repository: Path) -> list[Page]:
    files = [
        *(repository / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((repository / "docs").rglob("*.md")),
        *sorted((repository / "examples").rglob("README.md")),
    ]
    return [Page(file, file.relative_to(repository).as_posix()) for file in files]


def page_of(name: str) -> Page:
    """`name`: as seen from the repository, `docs/lora.md`."""
    return Page(REPOSITORY / name, name)


def shown(test: str, name: str, replaced: Mapping[str, str | None] | None = None) -> list[list[str]]:
    """The words of each command in the page's blocks that are marked with the test.

    Args:
        test: `__file__` of the test.
        name: The page, `docs/lora.md`.
        replaced: Words that the test replaces, such as paths, ids and addresses; None removes the word.

    Raises PageError if the page has no such block, or no longer contains a word to replace.
    """
    blocks = [block for block in page_of(name).shell() if block.marks.get("run by") == f"tests/{Path(test).name}"]
    commands = [command.words for block in blocks for command in block.commands()]
    replaced = replaced or {}
    missing = replaced.keys() - {word for words in commands for word in words}
    if missing or not commands:
        raise PageError(f"{name}: {', '.join(missing) or 'commands'} for {Path(test).name} are not there")
    meant = [[replaced.get(word, word) for word in words] for words in commands]
    return [[word for word in words if word is not None] for words in meant]


def reads(source: str, name: str) -> bool:
    """Whether the source of a test takes its commands from the page: it has a call `shown(__file__, name, ..)`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    given = [call.args[:2] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "shown"]
    return ["__file__", repr(name)] in [[ast.unparse(argument) for argument in arguments] for arguments in given]
