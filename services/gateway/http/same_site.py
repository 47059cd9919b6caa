"""Protection of a gateway without keys against the web pages that a user's browser visits.

A page of another site can send a POST to loopback without asking first (a "simple" request in
CORS). With a name of its own that resolves to the gateway's address, it can even read the answers
(DNS rebinding). So a request for a foreign `Host` is refused. On loopback, a request that a browser
sends for a page of another site is refused, too, unless CORS allows the page's origin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from services.common.errors import Forbidden

# A local network or a cluster gives out names with these suffixes; the internet's DNS does not.
_LOCAL_SUFFIXES = (".local", ".internal", ".svc", ".localhost", ".lan", ".home.arpa")


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is one of this machine itself."""
    if is_address(host):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def is_address(host: str) -> bool:
    """Returns whether a host is an IP address, which no page can make its own name point to."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_local_name(host: str) -> bool:
    """Returns whether a host is an address, or a name that no stranger on the internet can
    register.
    """
    return is_address(host) or "." not in host or host.endswith(_LOCAL_SUFFIXES)


@dataclass(frozen=True, slots=True)
class ServedHosts:
    """The hosts for which requests are served. `host in served_hosts` tests one.

    Attributes:
        kind: hosts that are served without being named by the operator: those of this machine,
            all IP addresses, or all addresses and local names.
        names: hosts that the operator has named.
        suffixes: suffixes of hosts that the operator has named, such as `.example.com`.
    """

    kind: Literal["loopback", "addresses", "local names"]
    names: frozenset[str]
    suffixes: tuple[str, ...]

    def __contains__(self, host: str) -> bool:
        match self.kind:
            case "loopback":
                is_served = is_loopback(host)
            case "addresses":
                is_served = is_address(host)
            case "local names":
                is_served = is_local_name(host)
        return is_served or host in self.names or host.endswith(self.suffixes)


def served_hosts(listens_on: str, allowed: Sequence[str], *, needs_key: bool) -> ServedHosts | None:
    """Returns the hosts for which requests are served. None if there is no restriction.

    Args:
        listens_on: address on which the gateway listens.
        allowed: names that the operator has given. `.example.com` stands for all names under
            `example.com`.
        needs_key: true if requests need an API key. A page of another site has none, so a page may
            then use any name.
    """
    names = frozenset(name for name in allowed if not name.startswith("."))
    suffixes = tuple(name for name in allowed if name.startswith("."))
    if is_loopback(listens_on):
        return ServedHosts("loopback", names, suffixes)
    if allowed:
        return ServedHosts("addresses", names, suffixes)
    return None if needs_key else ServedHosts("local names", names, suffixes)


class SameSite:
    """The check of a request's `Host` and `Origin`, made before the request is served.

    Args:
        hosts: hosts for which requests are served.
        allowed_origins: origins of web pages that may call, as for CORS; `*` stands for all. None
            if pages of any origin may call.
    """

    def __init__(self, hosts: ServedHosts, allowed_origins: Sequence[str] | None = None) -> None:
        self._hosts = hosts
        self._allowed = frozenset(("*",) if allowed_origins is None else allowed_origins)
        self._last_served = ""  # most requests have the same host

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Checks the headers of a request.

        Raises:
            Forbidden: the host is not served, or the origin may not call.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if host != self._last_served:
            try:
                name = urlsplit(f"//{host}").hostname or ""
            except ValueError:  # a malformed address, such as "[::1"
                name = ""
            if host and not (name and name in self._hosts):
                shown = (name or host)[:100]
                raise Forbidden(f"the host {shown!r} is not served: see GATEWAY_ALLOWED_SITES")
            self._last_served = host
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or origin in self._allowed or "*" in self._allowed:
            return
        if origin.partition("://")[2] != host:
            raise Forbidden(
                f"pages of {origin[:100]!r} may not call: GATEWAY_ALLOWED_SITES does not name them"
            )
