"""The encoders that a decoder may dial. Gateways name the encoder of each image, and the decoder
refuses to dial an encoder that its settings do not list.
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
# Encoders on this machine, which are known if the setting is empty.
LOOPBACK = "127.0.0.0/8", "::1/128"
# An unknown address causes a look-up of the names, at most once in this time.
_RESOLVE_PERIOD_S = 1.0
_RESOLVE_TIMEOUT_S = 2.0
# An address remains known for this time after it has left its DNS name, because an encoder that was
# removed may still drain.
_REMEMBERED_S = 600.0
_MAX_LOGGED = 1000


class KnownEncoders:
    """The set of addresses at which encoders may be dialled.

    Args:
        entries: addresses. An entry `host:port` or `unix:path` is one address. An entry
            `dns:///name:port` stands for all addresses of the name. An entry `10.0.0.0/8` or
            `10.0.0.0/8:50051` stands for all addresses of the range. If there are no entries,
            encoders on this machine are known.
        resolve_period_s: shortest time between two look-ups of the names, in seconds.

    Raises:
        ValueError: an entry has none of these forms.
    """

    def __init__(
        self, entries: Sequence[str] = (), *, resolve_period_s: float = _RESOLVE_PERIOD_S
    ) -> None:
        self._resolve_period_s = resolve_period_s
        self._literal: set[str] = set()
        self._ranges: list[tuple[IPv4Network | IPv6Network, int | None]] = []
        self._names: list[tuple[str, int]] = []
        self._resolved: dict[str, float] = {}  # address → time at which its name last had it
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
        """Returns whether an encoder at this address may be dialled. Logs the first refusal of each
        address.
        """
        if not self._holds(address) and self._names:
            await self._resolve()
        admitted = self._holds(address)
        if not admitted:
            self._log_once(
                "the encoder %s is not dialled, because DECODER_ENCODER_ADDRESSES does not list it "
                "(logged once per address)",
                address[:256],
            )
        return admitted

    @property
    def has_names(self) -> bool:
        """True if a name is listed, which may stand for other addresses later."""
        return bool(self._names)

    async def addresses(self) -> list[str]:
        """Returns the addresses of single encoders and of names, in order. The addresses of ranges
        are unknown.
        """
        if self._names:
            await self._resolve()
        return sorted(self._literal | self._resolved.keys())

    def _holds(self, address: str) -> bool:
        seen = self._resolved.get(address, -math.inf)
        if address in self._literal or asyncio.get_running_loop().time() - seen < _REMEMBERED_S:
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
                    log.warning("the name %s of encoders cannot be resolved: %s", name, error)
                    continue
                for family, _, _, _, place in found:
                    host = f"[{place[0]}]" if family == socket.AF_INET6 else str(place[0])
                    self._resolved[f"{host}:{port}"] = loop.time()
            now = loop.time()
            self._resolved = {
                a: seen for a, seen in self._resolved.items() if now - seen < _REMEMBERED_S
            }
            self._next_resolve = now + self._resolve_period_s


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text[:256]!r} is not host:port")
    return host.strip("[]"), _port(port)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 65535:
        raise ValueError(f"{text[:256]!r} is not a port")
    return int(text)
