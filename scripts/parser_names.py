"""Writes the names of the parsers that are compiled in, for commands that do not load the extension: `make reference`.

python scripts/parser_names.py
"""

from __future__ import annotations

from pathlib import Path

from primerl import _core

FILE = Path(__file__).parents[1] / "python/primerl/config/schema/parser_names.py"
TEXT = '''"""Names of the parsers in `primerl._core`, which is slow to import. Written by `make reference`."""

from typing import Literal

ToolParserName = Literal[
{tools}
]
ReasoningParserName = Literal[
{reasoning}
]
'''


def text() -> str:
    lists = {"tools": _core.TOOL_PARSERS, "reasoning": _core.REASONING_PARSERS}
    return TEXT.format(**{key: "\n".join(f'    "{name}",' for name in names) for key, names in lists.items()})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
