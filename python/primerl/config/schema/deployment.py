"""Where a run starts its processes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from primerl.config.schema.base import Section, Settings

TYPE_PATTERN = r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$"


class Deployment(Section):
    """Which placement starts the processes of the run, and where."""

    type: Annotated[str, Field(pattern=TYPE_PATTERN)] = "local"
    """`local`: this machine. Else the name of an installed placement (entry point group `primerl.placements`), or one
    of your own as `module:Class`."""
    args: Settings = {}
    """What that placement is made with."""
