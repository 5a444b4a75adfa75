"""`--help` of the commands that read a config: short, readable at 80 columns, and where the rest is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from primerl.config.describe.fields import REQUIRED, UNSET, Knob, Table, find, first_clause, first_sentence, nearest
from primerl.config.describe.forms import FORMS, tree

WIDTH = 80


class UnknownFieldError(Exception):
    """There is no such key or section; the message has the nearest ones."""


def explain(asked: str, form: str | None = None) -> str:
    """What a dotted path means, in the form that is named or in all that have it.

    Raises:
        UnknownFieldError: No form has it.
    """
    forms = [form] if form is not None else list(FORMS)
    found = [(name, match) for name in forms if (match := find(tree(name), asked)) is not None]
    if not found:
        raise UnknownFieldError(_unknown(asked, forms))
    told: set[object] = set()
    blocks = []
    for name, match in found:
        # A key that several forms inherit from one class is one key: told once, with the places it has.
        same = (match.owner, match.name) if isinstance(match, Knob) else match.cls
        if same not in told:
            told.add(same)
            blocks.append(_of_knob(name, match) if isinstance(match, Knob) else of_table(name, match))
    return "\n\n".join(blocks)


def _unknown(asked: str, forms: list[str]) -> str:
    near = nearest(map(tree, forms), asked)
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(_top(forms))}"
    of = f" of `{FORMS[forms[0]].title}`" if len(forms) == 1 else ""
    return f"there is no key or section {asked!r}{of}; {hint}"


def _top(forms: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(table.path for name in forms for table in tree(name).tables))


def _of_knob(name: str, knob: Knob) -> str:
    form = FORMS[name]
    rows = {
        "type": knob.kind,
        "default": knob.default if knob.default != REQUIRED else "none: it has to be set",
        "bound": knob.bound,
        "read by": form.read_by(knob.path),
        "in a file": _in_file(knob.path),
        "or": f"--{knob.path.replace('[]', '.0').replace('_', '-')} on the command line",
        "also": "; ".join(also(name, knob)),
    }
    lines = [f"{knob.path}  ({form.title})", *wrapped(knob.meaning, "  "), ""]
    for label, text in rows.items():
        if text:
            lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13)
    return "\n".join(lines)


def _in_file(path: str) -> str:
    section, _, key = path.rpartition(".")
    return f"{header(section)} {key} = .." if section else f"{key} = .."


def header(section: str) -> str:
    """The section's header in a file: `env[].limits` -> `[env.limits]`, `env[]` -> `[[env]]`."""
    name = section.replace("[]", "")
    return f"[[{name}]]" if section.endswith("[]") else f"[{name}]"


def also(name: str, knob: Knob) -> list[str]:
    """Where else the same key can be set: `primerl sft: optim.lr`."""
    places = []
    for other, form in FORMS.items():
        for same in tree(other).all_knobs():
            is_itself = other == name and same.path == knob.path
            if same.owner is knob.owner and same.name == knob.name and not is_itself:
                places.append(f"{form.title}: {same.path}")
    return places


def of_table(name: str, table: Table) -> str:
    """A section: its keys with their first sentences, and the sections below it."""
    optional = " Left out unless a key of it is given." if table.optional else ""
    title = f"{header(table.path)}  ({FORMS[name].title})" if table.path else FORMS[name].title
    lines = [title, *wrapped(table.meaning + optional, "  ")]
    if table.knobs:
        lines += ["", *rows_of(table.knobs)]
    if table.tables:
        lines += ["", "  sections", *sections_of(table.tables)]
    return "\n".join(lines)


def rows_of(knobs: Iterable[Knob]) -> list[str]:
    """Two lines a key at least: name, type and default; what it means."""
    lines = []
    for knob in knobs:
        facts = f"{knob.kind}{', ' + knob.bound if knob.bound else ''}; {knob.default}"
        lines += textwrap.wrap(f"  {knob.name}  {facts}", WIDTH, subsequent_indent=" " * 8)
        lines += wrapped(first_sentence(knob.meaning), "      ")
    return lines


def sections_of(tables: Iterable[Table]) -> list[str]:
    by_header = {header(table.path): first_sentence(table.meaning) for table in tables}
    column = max(map(len, by_header)) + 4
    lines = []
    for title, meaning in by_header.items():
        begin = f"  {title}".ljust(column)
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=begin, subsequent_indent=" " * column) or [begin.rstrip()]
    return lines


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


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
        f"usage: {program} @ FILE.toml [--dotted.key VALUE ..]{found.flags}",
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
    default = {REQUIRED: " (required)", UNSET: ""}.get(knob.default, f" ({knob.default})")
    # Where the words are about one choice after the other, the choices are shorter.
    about_choices = knob.is_choice and (knob.meaning.startswith("`") or len(knob.kind) < COLUMNS)
    meaning = (knob.kind if about_choices else first_clause(knob.meaning)) + default
    indent = " " * KEY_COLUMN
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(flag) >= KEY_COLUMN - 1:
        return [flag, *wrapper.wrap(meaning)]
    wrapper.initial_indent = flag.ljust(KEY_COLUMN)
    return wrapper.wrap(meaning)


__all__ = ["UnknownFieldError", "short", "text"]
