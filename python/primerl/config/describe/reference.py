"""The reference page of all configs, `docs/configuration.md`: what `primerl config reference` prints."""

from __future__ import annotations

import re

from pydantic import BaseModel

from primerl.config.describe.fields import REQUIRED, UNSET, Knob, Table
from primerl.config.describe.forms import FORMS, Form, tree
from primerl.config.describe.help import header

INTRODUCTION = """\
# Configuration reference

Written by `make reference` from the classes that check the configs; edit those, not this page. In a terminal,
`primerl config explain trainer.optim.lr` tells the same of one key, `primerl rl --help trainer.optim` of a section.
`primerl config schema` prints a JSON schema of `primerl rl`'s config, `primerl config schema --of sft` another one's:
an editor with a TOML language server completes and checks by it when a file begins with `#:schema ./rl.schema.json`.

## How a config is given
```sh
primerl rl @ rl.toml                                  # a file
primerl rl @ base.toml @ mine.toml                    # several: tables are merged, of one key the later file's counts
primerl rl @ rl.toml --trainer @ trainer.toml         # a file for one section; wins over those of the whole
primerl rl @ rl.toml --trainer.optim.lr 3e-4          # single keys, dotted, with dashes or underscores; win over files
primerl rl @ rl.toml --trainer.optim.lr=3e-4          # the same; so a value may be empty, or begin with two dashes
primerl rl @ rl.toml --clean-output-dir               # a switch on, and off:
primerl rl @ rl.toml --no-orchestrator.buffer.online-difficulty-filtering
primerl rl @ rl.toml --ckpt                           # an optional section with its defaults, and without it:
primerl rl @ rl.toml --no-ckpt
primerl rl @ rl.toml --orchestrator.train.env.0.num-workers 2     # one entry of a list of tables, counted from 0
primerl rl @ rl.toml --orchestrator.engines http://a:1 http://b:2 # a whole list, its values one after the other,
primerl rl @ rl.toml --orchestrator.engines '["http://a:1"]'      # or as JSON, which tables need
primerl rl @ rl.toml --dry-run                        # check everything, write <output_dir>/configs/, start nothing
```
Paths are relative to the folder that the command is started in, not to the file (those of `env_files` are looked up in
the file's folder first). Lists are replaced, not joined. TOML has no null: an unset key (`-` below) is not in the file,
and `--key None` unsets one that a file has.
Where a type names no upper bound, an integer goes up to 2^32 - 1 (counts) or 2^63 - 1 (steps, bytes), and a time to a
year (31536000 s).
`<output_dir>/configs/` has the config of each process (`primerl trainer @ ..` takes it) and the whole in `rl.toml`.

A table such as `[[orchestrator.train.env]]` may be given several times. Optional sections are unset unless a key of
theirs is given.
"""


def page() -> str:
    """The whole page; the same text for the same classes."""
    where: dict[type[BaseModel], tuple[str, str, str]] = {}
    parts = [INTRODUCTION, "## Contents", *_contents(), ""]
    for name, form in FORMS.items():
        parts += [f'<a id="{name}"></a>', f"## `{form.command}`{f', {form.called}' if form.called else ''}", ""]
        for table in tree(name).all_tables():
            parts += [*_section(name, form, table, where), ""]
    return "\n".join(parts).rstrip() + "\n"


def _contents() -> list[str]:
    lines = []
    for name, form in FORMS.items():
        paths = dict.fromkeys(table.path for table in tree(name).tables)
        links = ", ".join(f"[`{path}`](#{anchor(name, path)})" for path in paths)
        called = f", {form.called}" if form.called else ""
        lines.append(f"- [`{form.command}`](#{name}){called}{': ' + links if links else ''}")
    return lines


def anchor(form: str, path: str, variant: str = "") -> str:
    """`("rl", "orchestrator.train.env[]")` -> `rl-orchestrator-train-env`"""
    return re.sub(r"[^a-z0-9]+", "-", f"{form}.{path}.{variant}".lower()).strip("-")


def _section(name: str, form: Form, table: Table, where: dict[type[BaseModel], tuple[str, str, str]]) -> list[str]:
    lines = []
    if table.path:
        heading = header(table.path)
        of_type = f" of type `{table.variant}`" if table.variant else ""
        lines += [f'<a id="{anchor(name, table.path, table.variant)}"></a>', f"### `{heading}`{of_type}"]
    lines.append(f"{'Optional. ' if table.optional else ''}{table.meaning}")
    if table.cls in where:
        command, path, link = where[table.cls]
        link = f"[`{path}`](#{link})" + (f" of `{FORMS[command].command}`" if command != name else "")
        return [*lines, "", f"The keys are those of {link}."]
    if table.path:
        where[table.cls] = (name, table.path, anchor(name, table.path, table.variant))
    return [*lines, "", *_rows(form, table.knobs)] if table.knobs else lines


def _rows(form: Form, knobs: list[Knob]) -> list[str]:
    read_by = bool(form.readers) and len({form.read_by(knob.path) for knob in knobs}) > 1
    head = ["key", "type", "default", "meaning", *(["read by"] if read_by else [])]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for knob in knobs:
        kind = _code_literals(knob.kind) + (f", {_code_bound(knob.bound)}" if knob.bound else "")
        default = {REQUIRED: "**required**", UNSET: "-"}.get(knob.default, f"`{knob.default}`")
        cells = [f"`{knob.name}`", kind, default, knob.meaning, *([form.read_by(knob.path)] if read_by else [])]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return lines


def _code_literals(text: str) -> str:
    return re.sub(r'"[^"]*"', lambda found: f"`{found[0]}`", text)


def _code_bound(text: str) -> str:
    """`>` begins a quotation, and `_` emphasis, where it is no code."""
    return text if "`" in text else re.sub(r"(?<![\w.])[<>]=? [\d.^e-]+", lambda found: f"`{found[0]}`", text)
