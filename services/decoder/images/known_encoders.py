"""The encoders that a decoder dials. Gateways name them; one that the settings do not know is not
dialled.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Sequence
from functools import lru_cache
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
        self._ranges: list[tuple[IPv4Network | IPv6Network, int | None]] = []
        self._names: list[tuple[str, int]] = []
        self._resolved: dict[str, float] = {}  # address → when it was last seen
        self._next_resolve = 0.0
        self._resolving = asyncio.Lock()
        self._log_once = lru_cache(_MAX_LOGGED)(log.warning)
        for entry in entries or LOOPBACK:
            if entry.startswith(_DNS):
                self._names.append(_host_and_port(entry.removeprefix(_DNS).removeprefix("///")))
            elif "/" in entry and not entry.startswith("unix:"):
                address, _, rest = entry.partition("/")
                bits, _, port = rest.partition(":")
                network = ip_network(f"{address.strip('[]')}/{bits}")
                self._ranges.append((network, _port(port) if port else None))
            else:
                if not entry.startswith("unix:"):
                    _host_and_port(entry)
                self._literal.add(entry)

    async def admits(self, address: str) -> bool:
        """Whether an encoder may be dialled there; logs the first refusal of an address."""
        if not self._holds(address) and self._names:
            await self._resolve()
        admitted = self._holds(address)
        if not admitted:
            self._log_once(
                "not dialled: %s is no encoder of DECODER_ENCODER_ADDRESSES "
                "(said once, counted always)", address[:256],
            )  # fmt: skip
        return admitted

    def _holds(self, address: str) -> bool:
        seen = self._resolved.get(address, -math.inf)
        if address in self._literal or asyncio.get_running_loop().time() - seen < _KEPT_S:
            return True
        try:
            host, port = _host_and_port(address)
            ip = ip_address(host)
        except ValueError:
            return False
        return any(only in (None, port) and ip in network for network, only in self._ranges)

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._resolving:
            if loop.time() < self._next_resolve:
                return
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
            now = loop.time()
            self._resolved = {a: seen for a, seen in self._resolved.items() if now - seen < _KEPT_S}
            self._next_resolve = now + _RESOLVE_PERIOD_S


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text[:256]!r} is not host:port")
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise ValueError(f"{text[:256]!r} is not a port")
    return int(text)
