"""`--help` of the commands that read a config: short, readable at 80 columns, and where the rest is."""

from __future__ import annotations

import textwrap

from primerl.config.explain import WIDTH, UnknownFieldError, explain, of_table, sections_of, wrapped
from primerl.config.fields import LEFT_OUT, REQUIRED, Knob, find, first_clause
from primerl.config.forms import FORMS, tree

KEY_COLUMN = 38
COLUMNS = WIDTH - KEY_COLUMN


def text(form: str, arguments: list[str], program: str) -> str:
    """What `--help`, `--help SECTION` or `--help-all` prints.

    Raises:
        UnknownFieldError: There is no such section or key.
    """
    if "--help-all" in arguments:
        return "\n\n".join(of_table(form, table) for table in tree(form).all_tables())
    topic = _topic(arguments)
    return explain(topic, form) if topic is not None else short(form, program)


def _topic(arguments: list[str]) -> str | None:
    for i, argument in enumerate(arguments):
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
        follows = arguments[i + 1] if i + 1 < len(arguments) else "-"
        if argument in ("-h", "--help") and follows != "@" and not follows.startswith("-"):
            return follows
    return None


def short(form: str, program: str) -> str:
    """Usage, the keys that are used most, the sections, and how to see the rest."""
    root, found = tree(form), FORMS[form]
    most_used = [find(root, path) for path in found.most_used]
    shown = [knob for knob in most_used if isinstance(knob, Knob)]
    # What has to be set first.
    shown = shown or sorted(root.knobs, key=lambda knob: knob.default != REQUIRED)
    key = max(shown, key=lambda knob: knob.path.count(".") if "[]" not in knob.path else 0).path
    largest = max(root.tables, key=lambda table: len(list(table.all_knobs())), default=None)
    section = largest.path if largest is not None else ""
    of_section = f" [--{section} @ FILE.toml]" if section else ""
    lines = [
        f"usage: {program} @ FILE.toml [--dotted.key VALUE ..]",
        "",
        *wrapped(root.meaning, ""),
        "",
        "Later files win over earlier ones, the command line over all files:",
        f"  {program} @ FILE.toml [@ MORE.toml ..]{of_section}",
        "--no-KEY switches off; --a-list.0.key sets one entry of a list of tables.",
        "",
        "Most used keys:" if found.most_used else "Keys:",
    ]
    for knob in shown:
        lines += _row(knob)
    if root.tables:
        lines += ["", "Sections:", *sections_of(root.tables)]
    lines += [
        "",
        f"  {program} --help {section or key:<24} the keys of a section",
        f"  {program} --help-all {'':<20} all {len(list(root.all_knobs()))} keys",
        *_other_forms(form, len(program) + 32),
        f"  primerl config explain {key}",
        "docs/configuration.md has every key of every command.",
    ]
    return "\n".join(lines)


def _other_forms(form: str, column: int) -> list[str]:
    """How to see the keys of other forms that the command reads (docs/configuration.md)."""
    others = [other for name, other in FORMS.items() if name != form and other.command == FORMS[form].command]
    return [f"  {other.help_by:<{column}} {other.called}" for other in others if other.help_by]


def _row(knob: Knob) -> list[str]:
    flag = f"  --{knob.path.replace('[]', '.0').replace('_', '-')}"
    default = {REQUIRED: " (required)", LEFT_OUT: ""}.get(knob.default, f" ({knob.default})")
    # Where the words are about one choice after the other, the choices are shorter.
    about_choices = knob.kind.startswith("one of") and (knob.meaning.startswith("`") or len(knob.kind) < COLUMNS)
    meaning = (knob.kind if about_choices else first_clause(knob.meaning)) + default
    indent = " " * KEY_COLUMN
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(flag) >= KEY_COLUMN - 1:
        return [flag, *wrapper.wrap(meaning)]
    wrapper.initial_indent = flag.ljust(KEY_COLUMN)
    return wrapper.wrap(meaning)


__all__ = ["UnknownFieldError", "short", "text"]
