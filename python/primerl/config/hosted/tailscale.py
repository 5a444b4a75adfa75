"""`[tailscale]`: checked as told, and refused where it is asked for, since this machine's network is its owner's."""

from __future__ import annotations

import os
import re
from typing import Self

from pydantic import SecretStr, model_validator

from primerl.config.base import Section

KEY_VARIABLE = "TAILSCALE_AUTH_KEY"
KEY_PREFIX = "tskey-auth-"
PREFIX_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,29}")


def node_name(prefix: str, index: int, run_id: str) -> str:
    """Name of a machine of a run in the tailnet: `{prefix}-env-{index}-{run_id}`."""
    return f"{prefix}-env-{index}-{run_id}"


class Tailscale(Section):
    """A tailnet that environments reach private services over."""

    enabled: bool = False
    """Refused: env workers use this machine's network, and its owner joins it to a tailnet (docs/hosted.md)."""
    auth_key: SecretStr | None = None
    """Key that begins with `tskey-auth-`. Better in the environment, as TAILSCALE_AUTH_KEY, than in a file."""
    hostname_prefix: str = "primerl"
    """Begin of the machine's name in the tailnet: 1 to 30 of a-z, 0-9 and -, the first a letter."""

    # Here, of the whole section, since a message about a field shows its value.
    @model_validator(mode="after")
    def _as_told(self) -> Self:
        if self.auth_key is not None and not self.auth_key.get_secret_value().startswith(KEY_PREFIX):
            raise ValueError(f"auth_key does not begin with {KEY_PREFIX!r}; give an auth key of Tailscale, no API key")
        if not PREFIX_PATTERN.fullmatch(self.hostname_prefix):
            raise ValueError(
                f"hostname_prefix ({self.hostname_prefix!r}) must be 1 to 30 of a-z, 0-9 and -, and begin with a letter"
            )
        if not self.enabled:
            return self
        key = self.key()
        if key is None:
            raise ValueError(f"enabled is set, and there is no key; set {KEY_VARIABLE} in the environment, or auth_key")
        if not key.get_secret_value().startswith(KEY_PREFIX):
            raise ValueError(
                f"enabled is set, but {KEY_VARIABLE} of the environment does not begin with {KEY_PREFIX!r}"
            )
        name = node_name(self.hostname_prefix, 0, "RUN")
        raise ValueError(
            "enabled is set, but env workers run on this machine and use its network: to join it to a tailnet is for "
            f"its owner, once, by `tailscale up --auth-key=file:KEYFILE --hostname={name}`; then environments "
            "reach the tailnet, and enabled is left out"
        )

    def key(self) -> SecretStr | None:
        """The environment's before the file's."""
        given = os.environ.get(KEY_VARIABLE)
        return SecretStr(given) if given else self.auth_key
