"""What stands at a place of a config, by its classes alone: a key, a section, or nothing that is known."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from primerl.config.fields import models
from primerl.config.lines import Location

Kind = Literal["known", "any", "unknown", "below", "unnumbered"]


@dataclass(frozen=True, slots=True)
class Key:
    """What was found."""

    place: Location
    """With the numbers of entries as numbers, and without the `type` that pydantic adds to the place of a section that
    is one of several. Of a place that leads nowhere, as far as it is known."""
    kind: Kind
    """`any`: below a table whose keys are not ours. `below`: it goes on below a key that has none. `unnumbered`: so it
    does below a list of tables, without the number of an entry."""
    annotation: Any = None
    """Of the field; of an entry of a list, the section's class."""
    sections: tuple[type[BaseModel], ...] = ()
    """Whose keys may stand there; several to be chosen from by their `type`."""

    @property
    def shapes(self) -> set[Any]:
        """What it may be: `list[str] | None` -> list, None."""
        return shapes_of(self.annotation)

    @property
    def is_optional(self) -> bool:
        """Whether it may be left out by saying None."""
        return type(None) in self.shapes

    @property
    def known(self) -> list[str]:
        """The keys that may stand below."""
        return list(dict.fromkeys(name for section in self.sections for name in section.model_fields))

    @property
    def first(self) -> str:
        """The one of them to begin with: that which has to be set."""
        required = (n for section in self.sections for n, field in section.model_fields.items() if field.is_required())
        return next(required, self.known[0])


def look_up(cls: type[BaseModel], parts: Sequence[int | str]) -> Key:
    """By names as Python has them; numbers of entries may be digits."""
    rest, place = list(parts), list[int | str]()
    annotation: Any = cls
    sections: tuple[type[BaseModel], ...] = (cls,)
    while rest:
        name = rest.pop(0)
        chosen = tuple(section for section in sections if len(sections) > 1 and _type_of(section) == name)
        if chosen:
            sections = chosen
            continue
        place.append(name)
        field = next((section.model_fields[str(name)] for section in sections if name in section.model_fields), None)
        if field is None:
            is_any = any(section.model_config.get("extra") == "allow" for section in sections)
            return Key((*place, *rest), "any" if is_any else "unknown")
        annotation, sections = field.annotation, tuple(models(field.annotation))
        shapes = shapes_of(annotation)
        if not rest:
            break
        if not sections:
            free = dict in shapes
            return Key((*place, *rest) if free else tuple(place), "any" if free else "below", annotation)
        if list in shapes:
            if not str(rest[0]).isdigit():
                return Key(tuple(place), "unnumbered", annotation, sections)
            place.append(int(rest.pop(0)))
        elif dict in shapes:
            place.append(rest.pop(0))
        if not rest and shapes & {list, dict}:
            annotation = sections[0]
    return Key(tuple(place), "known", annotation, sections)


def shapes_of(annotation: Any) -> set[Any]:
    """Each type of a union, a generic one without what it is of."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return shapes_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set[Any]().union(*map(shapes_of, get_args(annotation)))
    return {origin or annotation}


def _type_of(section: type[BaseModel]) -> Any:
    field = section.model_fields.get("type")
    return None if field is None else field.default
