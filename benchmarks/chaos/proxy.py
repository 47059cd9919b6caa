"""A TCP proxy whose connections can be held, delayed, reset, cut and garbled.

Bytes that are held or delayed come later, in order, as TCP would deliver them after a partition. A
`Proxy` stands before one server; faults apply to connections of all clients or of those that a
`Selector` picks.
"""

import asyncio
import os
import random
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

Address = tuple[str, int]
Selector = Callable[[int], bool]  # of a client's port on this machine

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 s
_HIGH_WATER = 1 << 20


def anyone(_port: int) -> bool:
    """Selects all clients."""
    return True


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to selected connections, until `Proxy.heal`.

    Attributes:
        hold: nothing passes in either direction.
        delay_s: of each chunk, in each direction.
        refuse: connections are reset, and new ones, too.
        cut_after: bytes of the answers that still pass before each connection ends.
        garble: every byte of the answers is replaced by a random one.
    """

    hold: bool = False
    delay_s: float = 0.0
    refuse: bool = False
    cut_after: int | None = None
    garble: bool = False


_NO_FAULT = Fault()


class Proxy:
    """Listens for one server. All methods are for the event loop.

    Args:
        listen: its own address.
        server: where connections go.
    """

    def __init__(self, listen: Address, server: Address) -> None:
        self._listen = listen
        self._address = server
        self._pairs: set[_Pair] = set()
        self._fault, self._selects = _NO_FAULT, anyone
        self._server: asyncio.Server | None = None
        self.num_bytes = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Client(self), *self._listen)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for pair in list(self._pairs):
            pair.reset()

    def break_down(self, fault: Fault, selects: Selector = anyone) -> int:
        """Applies to what is connected, and to what connects until `heal`.

        Returns:
            The number of connections that it has hit at once.
        """
        self._fault, self._selects = fault, selects
        hit = [pair for pair in self._pairs if selects(pair.client_port)]
        for pair in hit:
            pair.apply(fault)
        return len(hit)

    def heal(self) -> None:
        """Lets everything pass again; what was held first."""
        self._fault, self._selects = _NO_FAULT, anyone
        for pair in list(self._pairs):
            pair.apply(_NO_FAULT)

    def accept(self, client: asyncio.Transport) -> "_Pair":
        """Connects a client to the server."""
        port = client.get_extra_info("peername")[1]
        pair = _Pair(self._address, client, port, self._forget)
        self._pairs.add(pair)
        if self._fault is not _NO_FAULT and self._selects(port):
            pair.apply(self._fault)
        pair.connect()
        return pair

    def _forget(self, pair: "_Pair") -> None:
        self._pairs.discard(pair)


class _Pair:
    """A client's connection and the one to the server."""

    def __init__(
        self,
        address: Address,
        client: asyncio.Transport,
        client_port: int,
        forget: Callable[["_Pair"], None],
    ) -> None:
        self.client_port = client_port
        self._address = address
        self._forget = forget
        self._fault = _NO_FAULT
        self._left = 0  # bytes that still pass before a cut
        self._to_client = _Flow(client)
        self._to_server = _Flow(None)
        self._task: asyncio.Task[None] | None = None

    def connect(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: _Server(self), *self._address
            )
        except OSError:
            self.reset()
            return
        self._to_server.open(transport)
        self._balance()

    def apply(self, fault: Fault) -> None:
        self._fault = fault
        if fault.refuse:
            self.reset()
            return
        self._left = fault.cut_after or 0
        for flow in (self._to_client, self._to_server):
            flow.set_pace(hold=fault.hold, delay_s=fault.delay_s)
        self._balance()

    def from_client(self, data: bytes) -> None:
        self._to_server.send(data)
        self._balance()

    def from_server(self, data: bytes) -> None:
        if self._fault.garble:
            data = random.randbytes(len(data))
        if self._fault.cut_after is not None:
            data = data[: self._left]
            self._left -= len(data)
            self._to_client.send(data)
            if self._left <= 0:
                self.end()
            return
        self._to_client.send(data)
        self._balance()

    def _balance(self) -> None:
        """Stops reading from a side whose bytes are not taken by the other one."""
        self._to_client.limit(self._to_server.transport)
        self._to_server.limit(self._to_client.transport)

    def end_of_client(self) -> None:
        self._to_server.finish()

    def end_of_server(self) -> None:
        self._to_client.finish()

    def end(self) -> None:
        """Closes both connections after what was sent."""
        for flow in (self._to_client, self._to_server):
            flow.finish()
        self._drop()

    def reset(self) -> None:
        for flow in (self._to_client, self._to_server):
            flow.reset()
        self._drop()

    def lost(self, *, by_client: bool, error: Exception | None) -> None:
        """One side is gone. The other one learns it, unless nothing passes now."""
        other = self._to_server if by_client else self._to_client
        if error is None:
            other.finish()
        elif not self._fault.hold:
            other.reset()
        self._drop()

    def _drop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._forget(self)


class _Flow:
    """Bytes in one direction, towards `transport`, which may not be open yet."""

    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.transport = transport
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._num_waiting = 0
        self._hold, self._delay_s = False, 0.0
        self._ends = False
        self._wakes = False  # a timer is set
        self._limits = False

    def open(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._flush()

    def set_pace(self, *, hold: bool, delay_s: float) -> None:
        self._hold, self._delay_s = hold, delay_s
        self._flush()

    def send(self, data: bytes) -> None:
        if not data:
            return
        self._waiting.append((asyncio.get_running_loop().time() + self._delay_s, data))
        self._num_waiting += len(data)
        self._flush()

    def finish(self) -> None:
        self._ends = True
        self._flush()

    def reset(self) -> None:
        self._waiting.clear()
        if self.transport is not None and not self.transport.is_closing():
            connection = cast("socket.socket", self.transport.get_extra_info("socket"))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    def limit(self, source: asyncio.Transport | None) -> None:
        """Pauses reading from `source` while too much waits here."""
        if source is None or source.is_closing():
            return
        waiting = self._num_waiting
        if self.transport is not None and not self.transport.is_closing():
            waiting += self.transport.get_write_buffer_size()
        if self._limits is (waiting > _HIGH_WATER):
            return
        self._limits = waiting > _HIGH_WATER
        if self._limits:
            source.pause_reading()
            asyncio.get_running_loop().call_later(0.05, self._retry, source)
        else:
            source.resume_reading()

    def _retry(self, source: asyncio.Transport) -> None:
        self.limit(source)
        if self._limits and not source.is_closing():
            asyncio.get_running_loop().call_later(0.05, self._retry, source)

    def _flush(self) -> None:
        if self._hold or self.transport is None:
            return
        now = asyncio.get_running_loop().time()
        while self._waiting and (self._waiting[0][0] <= now or not self._delay_s):
            _, data = self._waiting.popleft()
            self._num_waiting -= len(data)
            if not self.transport.is_closing():
                self.transport.write(data)
        if self._waiting:
            if not self._wakes:
                self._wakes = True
                asyncio.get_running_loop().call_at(self._waiting[0][0], self._wake)
        elif self._ends:
            self.transport.close()

    def _wake(self) -> None:
        self._wakes = False
        self._flush()


class _Client(asyncio.Protocol):
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._pair: _Pair | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pair = self._proxy.accept(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        assert self._pair is not None
        self._proxy.num_bytes += len(data)
        self._pair.from_client(data)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._pair is not None
        self._pair.lost(by_client=True, error=exc)


class _Server(asyncio.Protocol):
    def __init__(self, pair: _Pair) -> None:
        self._pair = pair

    def data_received(self, data: bytes) -> None:
        self._pair.from_server(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pair.lost(by_client=False, error=exc)


def port_owner(port: int, pids: list[int]) -> int | None:
    """Which of the processes has a TCP socket of this machine bound to `port`; None: none of them.

    Takes about a millisecond a process, so it is asked while a fault is on, not before.
    """
    names = {f"socket:[{inode}]" for inode in _inodes_of(port)}
    if not names:
        return None
    for pid in pids:
        directory = Path(f"/proc/{pid}/fd")
        try:
            for entry in directory.iterdir():
                if _target(entry) in names:
                    return pid
        except OSError:
            continue
    return None


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""


def _inodes_of(port: int) -> set[str]:
    """Of the client's end of a connection to this proxy; gRPC's sockets are those of IPv6. Sockets
    of other addresses may have the same port, and those that wait for late packets have no inode.
    """
    local = re.compile(rf"^\s*\d+: [0-9A-F]+:{port:04X} .*$", re.MULTILINE)
    found: set[str] = set()
    for table in ("tcp6", "tcp"):
        for line in local.findall(Path(f"/proc/net/{table}").read_text()):
            fields = line.split()
            if fields[3] != "0A" and fields[9] != "0":  # listening
                found.add(fields[9])
    return found
