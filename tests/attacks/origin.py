"""A web server of images, some of which come slowly or are large, and names that lead to it.

    python -m tests.attacks.origin PYTHON -m MODULE ...

runs a module with names of its own: `*.images.test` is the loopback address; `*.silent.test` keeps
its caller waiting, as name servers do that do not answer.
"""

import asyncio
import runpy
import socket
import sys
import threading
import time
from contextlib import closing, suppress
from typing import Any

from tests.attacks.images import small

IMAGE_NAMES, SILENT_NAMES = ".images.test", ".silent.test"
IMAGE, DRIP, LARGE = "/image/", "/drip/", "/large/"
_LARGE_BYTES = 16 << 20
_SILENCE_S = 10.0
_DRIP_BYTES, _DRIP_PERIOD_S = 16 << 10, 0.25  # above the least rate: only the deadline ends it


class Origin:
    """The server, in a thread of its own. Use as a context manager.

    Attributes:
        port: on loopback.
    """

    def __enter__(self) -> "Origin":
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)  # connections close


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # Cancelled at the end: Python 3.11's streams would report that as a bug.
    ended = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
    with closing(writer), suppress(*ended):
        line = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: image/png\r\n"
        if line.startswith(IMAGE):
            file = small(int(line.removeprefix(IMAGE)))
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(file) + file)
        elif line.startswith(LARGE):
            writer.write(head + b"\r\n")
            for _ in range(_LARGE_BYTES >> 18):
                writer.write(bytes(1 << 18))
                await writer.drain()
        elif line.startswith(DRIP):
            writer.write(head + b"\r\n")
            while True:
                writer.write(bytes(_DRIP_BYTES))
                await writer.drain()
                await asyncio.sleep(_DRIP_PERIOD_S)
        await writer.drain()


def _install_names() -> None:
    known = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if str(host).endswith(SILENT_NAMES):
            time.sleep(_SILENCE_S)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return known(
            "127.0.0.1" if str(host).endswith(IMAGE_NAMES) else host, *arguments, **options
        )

    socket.getaddrinfo = getaddrinfo


if __name__ == "__main__":
    _install_names()
    module, *sys.argv[1:] = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
