"""The docstrings under the fields of config classes, read from the source when help or a schema asks for them.

pydantic's own `use_attribute_docstrings` reads them as each class is defined: a quarter of the time that importing the
configs takes, for texts that a run never shows.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def field_doc(cls: type[BaseModel], name: str) -> str | None:
    """The field's `description`, or the docstring under it in the class that declares it."""
    given = cls.model_fields[name].description
    if given is not None:
        return given
    owner = owner_of(cls, name)
    return _docs_of_module(owner.__module__).get(owner.__qualname__, {}).get(name)


def owner_of(cls: type[BaseModel], name: str) -> type[BaseModel]:
    """The class of its bases that declares the field."""
    declaring = [base for base in cls.__mro__ if name in inspect.get_annotations(base)]
    return declaring[0] if declaring else cls


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """By class and field. Empty where there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    return {node.name: _docs_of_class(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for annotated, below in pairwise(node.body):
        if (
            isinstance(annotated, ast.AnnAssign)
            and isinstance(annotated.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                docs[annotated.target.id] = inspect.cleandoc(text)
    return docs
