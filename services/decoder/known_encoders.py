"""The encoders that a decoder dials. Gateways name them; one that the settings do not know is not
dialled.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

log = logging.getLogger(__name__)

_DNS = "dns:"
# Without a setting: encoders of this machine.
LOOPBACK = "127.0.0.0/8", "::1/128"
# A name is looked up once in this time at most, and again when an unknown address comes.
_RESOLVE_PERIOD_S = 1.0
_RESOLVE_TIMEOUT_S = 2.0
# An encoder that has left its name may still be draining.
_KEPT_S = 600.0
_MAX_LOGGED = 1000


@dataclass(frozen=True, slots=True)
class _Range:
    network: IPv4Network | IPv6Network
    port: int | None

    def holds(self, host: str, port: int) -> bool:
        try:
            return self.port in (None, port) and ip_address(host) in self.network
        except ValueError:
            return False  # a name


class KnownEncoders:
    """Where encoders may be.

    Args:
        entries: `host:port` or `unix:path`, literally; `dns:///name:port`, any address of the name;
            `10.0.0.0/8` or `10.0.0.0/8:50051`, any address of the range. None: this machine.

    Raises:
        ValueError: an entry has none of these forms.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        self._literal: set[str] = set()
        self._ranges: list[_Range] = []
        self._names: list[tuple[str, int]] = []
        self._resolved: dict[str, float] = {}  # address → when it was last seen
        self._next_resolve = 0.0
        self._resolving: asyncio.Task[None] | None = None
        self._logged: set[str] = set()
        for entry in entries or LOOPBACK:
            self._add(entry)

    async def admits(self, address: str) -> bool:
        """Whether an encoder may be dialled there; logs the first refusal of an address."""
        if self._holds(address):
            return True
        if self._names:
            await self._resolve()
            if self._holds(address):
                return True
        if address not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(address)
            log.warning(
                "not dialled: %s is no encoder of DECODER_ENCODER_ADDRESSES "
                "(said once, counted always)", address[:256],
            )  # fmt: skip
        return False

    def _add(self, entry: str) -> None:
        if entry.startswith("unix:"):
            self._literal.add(entry)
            return
        if entry.startswith(_DNS):
            self._names.append(_host_and_port(entry.removeprefix(_DNS).removeprefix("///")))
        elif "/" in entry:
            address, _, rest = entry.partition("/")
            bits, _, port = rest.partition(":")
            self._ranges.append(
                _Range(ip_network(f"{address.strip('[]')}/{bits}"), _port(port) if port else None)
            )
        else:
            _host_and_port(entry)
            self._literal.add(entry)

    def _holds(self, address: str) -> bool:
        if address in self._literal:
            return True
        try:
            host, port = _host_and_port(address)
        except ValueError:
            return False
        if any(known.holds(host, port) for known in self._ranges):
            return True
        seen = self._resolved.get(address)
        return seen is not None and asyncio.get_running_loop().time() - seen < _KEPT_S

    async def _resolve(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._resolving is None or (self._resolving.done() and now >= self._next_resolve):
            self._next_resolve = now + _RESOLVE_PERIOD_S
            self._resolving = asyncio.create_task(self._look_up())
        await asyncio.shield(self._resolving)

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        for name, port in self._names:
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except (OSError, TimeoutError) as error:
                log.warning("cannot resolve %s: %s", name, error)
                continue
            for family, _, _, _, place in found:
                host = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
                self._resolved[f"{host}:{port}"] = loop.time()
        stale = loop.time() - _KEPT_S
        self._resolved = {a: seen for a, seen in self._resolved.items() if seen > stale}


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text[:256]!r} is not host:port")
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise ValueError(f"{text[:256]!r} is not a port")
    return int(text)
