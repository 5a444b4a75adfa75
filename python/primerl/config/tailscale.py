"""`[tailscale]`: the tailnet that env workers join, the same table in both forms of a run's config."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator

from primerl.config.base import Bound, Seconds, Section

KEY_PREFIX = "tskey-auth-"
PREFIX_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,29}")
LONGEST_NAME = 63
"""Characters of a label of DNS, which a node's name is."""
LONGEST_RUN = 16


class Tailscale(Section):
    """A tailnet that environments reach private services over: each env worker of this machine is a node of it."""

    enabled: bool = False
    """Start `tailscaled` with each env worker that the run starts, without root; both programs have to be installed
    (docs/hosted.md)."""
    # Never dumped: the run's config is written down, and shown by services.
    auth_key: SecretStr | None = Field(default=None, exclude=True)
    """Key that begins with `tskey-auth-`, reusable where there are several workers. Better in the environment, as
    TAILSCALE_AUTH_KEY, or in a file of variables or a secret of that name, than in the config."""
    hostname_prefix: Annotated[str, Bound("1 to 30 of a-z, 0-9 and -, the first a letter")] = "primerl"
    """Begin of the nodes' names, `<prefix>-env-<worker>-<run>`."""
    login_s: Seconds = 30.0
    """How long a worker's node has to join the tailnet, in seconds, before the run fails."""

    # Here, of the whole section, since a message about a field shows its value.
    @model_validator(mode="after")
    def _as_told(self) -> Self:
        if self.auth_key is not None and not self.auth_key.get_secret_value().startswith(KEY_PREFIX):
            raise ValueError(f"auth_key does not begin with {KEY_PREFIX!r}; give an auth key of Tailscale, no API key")
        if not PREFIX_PATTERN.fullmatch(self.hostname_prefix):
            raise ValueError(
                f"hostname_prefix ({self.hostname_prefix!r}) must be 1 to 30 of a-z, 0-9 and -, and begin with a letter"
            )
        return self


class TailnetNode(Section):
    """What an env worker is in a tailnet; the key is in no file."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    """Name of the node."""
    log: str = Field(min_length=1)
    """File that the log of its `tailscaled` is appended to."""
    login_s: Seconds = 30.0
    """How long it has to join, in seconds."""


def node_name(prefix: str, index: int, run: str) -> str:
    """Name of an env worker in the tailnet: `{prefix}-env-{index}-{run}`.

    Args:
        run: The run's id; of a run that has none, the name of its folder, made a part of a name.
    """
    return f"{prefix}-env-{index}-{re.sub('[^a-z0-9]+', '-', run.lower())[:LONGEST_RUN].strip('-') or 'run'}"
