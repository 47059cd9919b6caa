"""A gateway that needs no key answers programs and its own pages, not the web pages that a browser
visits.

A page of another site can send a POST to loopback without asking (a "simple" request), and with a
name of its own that resolves to the gateway's address even read the answers (DNS rebinding). So a
foreign `Host` is refused, and on loopback so is a request that a browser sends for another site,
unless CORS allows it.
"""

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from services.common.errors import Forbidden


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if is_address(host):
        return ip_address(host.strip("[]")).is_loopback
    return host == "localhost" or host.endswith(".localhost")


# Names under these are given out by a local network or a cluster, never on the internet.
_LOCAL_SUFFIXES = (".local", ".internal", ".svc", ".localhost", ".lan", ".home.arpa")


def is_address(host: str) -> bool:
    """Whether a host is an IP address, which no page can make its own name point to."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def is_local_name(host: str) -> bool:
    """Whether a host is an address, or a name that no stranger on the internet can register."""
    return is_address(host) or "." not in host or host.endswith(_LOCAL_SUFFIXES)


def served_hosts(
    listens_on: str, allowed: Sequence[str], *, needs_key: bool
) -> Callable[[str], bool] | None:
    """Which hosts of requests are answered; None: all.

    Args:
        listens_on: address of the gateway.
        allowed: names that the operator gives; `.example.com`: all names under it.
        needs_key: a page of another site has no key, so it may call under any name.
    """
    exact = frozenset(name for name in allowed if not name.startswith("."))
    suffixes = tuple(name for name in allowed if name.startswith("."))
    if is_loopback(listens_on):
        others = is_loopback
    elif allowed or not needs_key:
        others = is_address if allowed else is_local_name
    else:
        return None
    return lambda host: others(host) or host in exact or host.endswith(suffixes)


class SameSite:
    """What the middleware asks before it serves a request.

    Args:
        is_served: whether requests for a host are answered.
        allowed_origins: of web pages that may call, as for CORS; `*`: any. None: pages of any
            origin may.
    """

    def __init__(
        self, is_served: Callable[[str], bool], allowed_origins: Sequence[str] | None = None
    ) -> None:
        self._is_served = is_served
        self._allowed = frozenset(("*",) if allowed_origins is None else allowed_origins)
        self._last_host = ""  # that was served: most requests have the same

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Forbidden if a request is not answered."""
        host = headers.get(b"host", b"").decode("latin-1")
        if host != self._last_host:
            try:
                name = urlsplit(f"//{host}").hostname or ""
            except ValueError:  # it is malformed
                name = ""
            if host and not (name and self._is_served(name)):
                shown = (name or host)[:100]
                raise Forbidden(f"the host {shown!r} is not served: see GATEWAY_ALLOWED_SITES")
            self._last_host = host
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or origin in self._allowed or "*" in self._allowed:
            return
        if origin.partition("://")[2] != host:
            raise Forbidden(
                f"pages of {origin[:100]!r} may not call: GATEWAY_ALLOWED_SITES does not name it"
            )
