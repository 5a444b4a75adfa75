"""A config class as text, section by section and field by field: for help, `primerl config` and the reference page."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from primerl.config.describe.field_docs import field_doc, owner_of
from primerl.config.schema.base import Bound, Section
from primerl.process.setting_checks import LONGEST_S, MOST_COUNT, MOST_LARGE_COUNT

ANY_NAME = ".NAME"
"""Stands for the name of a section in a table of sections, whose names are the user's."""
UNSET, REQUIRED = "unset", "required"
UNSAID = (MOST_COUNT, MOST_LARGE_COUNT, LONGEST_S)
"""Bounds that no run meets; the reference page names them once."""
PLAIN: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "booleans"),
    SecretStr: ("string", "strings"),
    int: ("integer", "integers"),
    float: ("number", "numbers"),
    str: ("string", "strings"),
    Any: ("any value", "any values"),
}


@dataclass(frozen=True, slots=True)
class Knob:
    """One field. All texts are for people; `path` is dotted, with `[]` behind a list of tables."""

    path: str
    kind: str
    is_choice: bool
    """Whether `kind` lists the values."""
    default: str
    """The default in TOML; `UNSET` for None, `REQUIRED` where there is none."""
    bound: str
    """Empty where the type says it all."""
    meaning: str
    owner: type[BaseModel]
    """The class that declares it: fields of one owner and name are one setting in several forms."""

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class Table:
    """One section; that of the whole file has the path '', one of a table of sections ends with `NAME`."""

    path: str
    cls: type[BaseModel]
    meaning: str
    optional: bool
    """It is unset unless given."""
    has_none: bool = False
    """None is a value of it: `--no-` unsets it, whether it is set by default or not."""
    variant: str = ""
    """Its `type`, where several sections are to be chosen from for one path."""
    knobs: list[Knob] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def all_tables(self) -> Iterator[Table]:
        yield self
        for table in self.tables:
            yield from table.all_tables()

    def all_knobs(self) -> Iterator[Knob]:
        for table in self.all_tables():
            yield from table.knobs


def table_of(
    cls: type[BaseModel],
    path: str = "",
    *,
    meaning: str = "",
    optional: bool = False,
    has_none: bool = False,
    given: Any = None,
    variant: str = "",
) -> Table:
    """The section and all below it.

    Args:
        given: An instance whose values are the defaults, where they are not the class's own.
    """
    table = Table(path, cls, meaning or first_paragraph(cls.__doc__), optional, has_none, variant)
    # What several commands share is inherited, and would come before what a command is for.
    last = cls.listed_last() if issubclass(cls, Section) else frozenset()
    for name, info in sorted(cls.model_fields.items(), key=lambda field: field[0] in last):
        where = f"{path}.{name}" if path else name
        sections = models(info.annotation)
        default = getattr(given, name) if given is not None else info.default
        if not sections:
            table.knobs.append(_knob(cls, name, where, info, default))
            continue
        is_list, is_dict = list in origins(info.annotation), dict in origins(info.annotation)
        if is_list or is_dict or len(sections) > 1:
            table.knobs.append(_knob(cls, name, where, info, default))
        for section in sections:
            # For a list, or a choice of several, the field's own row has the text.
            described = one_line(field_doc(cls, name)) if len(sections) == 1 and not (is_list or is_dict) else ""
            instance = default if isinstance(default, section) else None
            kind = section.model_fields["type"].default if len(sections) > 1 else ""
            inner = where + ("[]" if is_list else ANY_NAME if is_dict else "")
            table.tables.append(
                table_of(
                    section,
                    inner,
                    meaning=described,
                    optional=default is None,
                    has_none=default is None or type(None) in get_args(info.annotation),
                    given=instance,
                    variant=kind,
                )
            )
    return table


def _knob(cls: type[BaseModel], name: str, path: str, info: FieldInfo, default: Any) -> Knob:
    if info.default_factory is not None and not isinstance(default, list | dict):
        default = info.get_default(call_default_factory=True)
    text = REQUIRED if info.is_required() else literal(default)
    found = bounds(info.metadata) or bounds(_inner_metadata(info.annotation))
    if list in origins(info.annotation):
        found = found.replace("not empty", "at least 1 entry")
    return Knob(
        path,
        type_text(info.annotation),
        is_choice(info.annotation),
        text,
        found,
        one_line(field_doc(cls, name)),
        owner_of(cls, name),
    )


def models(annotation: Any) -> list[type[BaseModel]]:
    """Sections within an annotation: of `Section`, `Section | None`, `list[Section]` and unions of several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return models(get_args(annotation)[0])
    return [model for part in get_args(annotation) if part is not annotation for model in models(part)]


def origins(annotation: Any) -> set[Any]:
    found = {get_origin(annotation)}
    return found.union(*(origins(part) for part in get_args(annotation)))


def is_choice(annotation: Any) -> bool:
    """Whether it is one of a few values, or the first of its alternatives is."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return is_choice(parts[0])
    if origin in (Union, types.UnionType):
        return is_choice(next(part for part in parts if part is not type(None)))
    return origin is Literal


def type_text(annotation: Any, *, plural: bool = False) -> str:
    """`list[float] | None` -> `list of numbers`; None is shown as the default."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0], plural=plural)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(part, plural=plural) for part in parts if part is not type(None)))
    if origin is Literal:
        return "one of " + ", ".join(literal(choice) for choice in parts)
    if origin is list:
        return f"list of {_items(parts[0])}"
    if origin is tuple:
        return f"{len(parts)} {_items(parts[0])}"
    if origin is dict:
        return "table" if parts[1] is Any else f"table of {_items(parts[1])}"
    if models(annotation):
        return "tables" if plural else "table"
    if annotation in PLAIN:
        return PLAIN[annotation][plural]
    return str(getattr(annotation, "__name__", annotation))


def _items(annotation: Any) -> str:
    bound = bounds(get_args(annotation)[1:]) if get_origin(annotation) is Annotated else ""
    return type_text(annotation, plural=True) + (f", each {bound}" if bound else "")


def _inner_metadata(annotation: Any) -> list[Any]:
    """Metadata of the parts of a union, such as `Annotated[int, Ge(1)] | None`, where pydantic leaves the bounds."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    parts = [part for part in get_args(annotation) if get_origin(part) is Annotated]
    return [item for part in parts for item in get_args(part)[1:]]


def bounds(metadata: Any) -> str:
    """`> 0`, `0 to 1`, `at least 1 entry`; empty without any."""
    found: dict[str, Any] = {}
    for item in metadata:
        if isinstance(item, Bound):
            return item.text
        for source in (item, *getattr(item, "metadata", [])):
            for name in ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern"):
                if getattr(source, name, None) is not None:
                    found[name] = getattr(source, name)
    if found.get("le") in UNSAID:
        del found["le"]
    if {"ge", "le"} <= found.keys():
        texts = [f"{number(found['ge'])} to {number(found['le'])}"]
    else:
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        texts = [f"{sign} {number(found[name])}" for name, sign in signs.items() if name in found]
    if "min_length" in found:
        texts.append("not empty" if found["min_length"] == 1 else f"at least {found['min_length']} long")
    if "max_length" in found:
        texts.append(f"at most {found['max_length']} characters")
    if "pattern" in found:
        texts.append(f"matches `{found['pattern']}`")
    return ", ".join(texts)


def number(value: float) -> str:
    """A bound as text: `86400.0` -> `86400`, 2**62 -> `2^62`."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int) and value >= 2**24 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return literal(value)


def literal(value: Any) -> str:
    """The value in TOML; `UNSET` for None."""
    if value is None:
        return UNSET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return str(re.sub(r"e\+?(-?)0*", r"e\1", repr(value)))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, BaseModel):
        return literal({"type": getattr(value, "type", None), **value.model_dump(exclude_defaults=True)})
    return str(value)


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def first_paragraph(text: str | None) -> str:
    return one_line((text or "").strip().split("\n\n")[0])


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, not one within `0.5` or `e.g. `."""
    found = re.match(r".*?[.;:](?=\s+[A-Z`0-9]|$)", text)
    return (found[0] if found else text).rstrip(".;:")


def first_clause(text: str) -> str:
    """The first sentence without what it adds in brackets, after a semicolon or after a colon."""
    plain = re.sub(r"\s*\([^)]*\)", "", text)
    return re.split(r"[;:] |, (?:so that|each) |\. ", plain)[0].rstrip(".;:")


@cache
def plain_path(asked: str) -> str:
    """`--orchestrator.train.env[0].max-concurrent` -> `orchestrator.train.env.max_concurrent`."""
    text = re.sub(r"\[\w*\]", "", asked.strip().removeprefix("--").removeprefix("no-")).replace("-", "_")
    return ".".join(part for part in text.split(".") if part and not part.isdigit())


def find(root: Table, asked: str) -> Knob | Table | None:
    """By dotted path, with or without brackets, numbers, dashes and the names of sections that are the user's."""
    wanted = plain_path(asked)
    known: list[Knob | Table] = [*(table for table in root.all_tables() if table.path), *root.all_knobs()]
    paths = [plain_path(one.path) for one in known]
    for path, one in zip(paths, known, strict=True):
        if path.replace(ANY_NAME, "") == wanted:
            return one
    for path, one in zip(paths, known, strict=True):
        if ANY_NAME in path and re.fullmatch(re.escape(path).replace(re.escape(ANY_NAME), r"\.\w+"), wanted):
            return one
    return None


def nearest(roots: Iterable[Table], asked: str, most: int = 4) -> list[str]:
    """Paths that end as the one asked for; without any, those that look like it."""
    wanted = plain_path(asked)
    paths: dict[str, str] = {}
    for root in roots:
        everything = [table.path for table in root.all_tables() if table.path] + [one.path for one in root.all_knobs()]
        paths |= {plain_path(path): path for path in everything}
    last = wanted.rsplit(".", 1)[-1]
    ends = [path for plain, path in paths.items() if f".{plain}".endswith(f".{wanted}")]
    same = [path for plain, path in paths.items() if plain.rsplit(".", 1)[-1] == last]
    alike = [paths[plain] for plain in difflib.get_close_matches(wanted, paths, n=most, cutoff=0.6)]
    return list(dict.fromkeys([*ends, *same] or alike))[:most]
