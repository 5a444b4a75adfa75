"""By which address a process of this machine is reached from another one. Standard library only."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit, urlunsplit

from primerl.process.problems import ProblemError


class UnreachableError(ProblemError, ValueError):
    """A process listens where the one that is to reach it cannot. The message says what to set."""


def address_towards(url: str) -> str:
    """This machine's address on the way to `url`, by which others on that network reach it.

    Raises OSError where the host's name is not known, or no route leads to it.
    """
    return _way(url)[0]


def told_to(url: str, peer: str) -> str:
    """`url`, at which a server of this machine listens, as the one that listens at `peer` can reach it: a server that
    listens at all addresses (`0.0.0.0`, `::`) is named by this machine's address on the way there.

    Raises:
        UnreachableError: it listens on this machine's loopback, and `peer` is another machine.
        OSError: the way to `peer` is not known.
    """
    parts = urlsplit(url)
    own = _literal(parts.hostname or "")
    if own is None or not (own.is_unspecified or own.is_loopback):
        return url
    here, there = _way(peer)
    if own.is_loopback:
        if here != there:
            raise UnreachableError.at(
                "host",
                f"{own} is reached from this machine alone, and {peer}, which is to reach it, is on another one; "
                f"set host to 0.0.0.0, or to an address of this machine such as {here}",
            )
        return url
    host = f"[{here}]" if ":" in here else here
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))


def url_of(host: str, port: int | None) -> str:
    """`http://HOST:PORT`, an address of IPv6 in brackets."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def _way(url: str) -> tuple[str, str]:
    """This machine's address on the way to the host, and the host's own."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    # Nothing is sent: connecting only chooses a route.
    with socket.socket(family, kind) as asking:
        asking.connect(address)
        return str(asking.getsockname()[0]), str(asking.getpeername()[0])


def is_reached_from_elsewhere(host: str) -> bool:
    """Whether a server that listens there can be reached from other machines; not where the name is not known."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        return False
    address = ipaddress.ip_address(str(found).split("%")[0])
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine's loopback."""
    own = _literal(host)
    return own is not None and own.is_loopback


def is_unspecified(host: str) -> bool:
    """Whether who listens there listens at all addresses."""
    own = _literal(host)
    return own is not None and own.is_unspecified


def is_own_name(header: str) -> bool:
    """Whether a `Host` header names this machine's loopback. A page of another site, whose name was made to lead here,
    sends its own name."""
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if host == "localhost":
        return ipaddress.ip_address("127.0.0.1")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
