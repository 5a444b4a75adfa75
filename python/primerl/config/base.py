"""The base of every section: unknown keys refused, the sentence under each field is its help."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic_config
from pydantic import ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
# Also a folder name and a metric name.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
LogLevel = Literal["trace", "debug", "info", "warn", "error"]


class Section(pydantic_config.BaseConfig):
    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Log(Section):
    """What is written to the process's log."""

    level: LogLevel = "info"
    """Least severe level that is logged."""
