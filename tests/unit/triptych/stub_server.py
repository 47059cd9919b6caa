"""A chat server whose timing and tokens are known."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

VIDEO = {"frames": 4, "fps": 2.0, "tokens": 40, "size": [128, 160], "times": [0.25, 1.25]}


@dataclass
class StubServer:
    """Streams `max_tokens` tokens; `behaviour` breaks it on purpose."""

    behaviour: str = "good"
    caches: bool = True
    bodies: list[dict] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    key: str = ""
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.authorizations += re.findall(r"^Authorization: (.*)\r$", head, re.MULTILINE)
                head = head.lower()
                if self.key and f"authorization: bearer {self.key}\r\n" not in head:
                    await self.refuse(401, "no key", writer)
                    return
                if head.startswith("get "):
                    found = self.page(head.split(" ")[1]).encode()
                    length = f"Content-Length: {len(found)}\r\n\r\n".encode()
                    writer.write(b"HTTP/1.1 200 OK\r\n" + length + found)
                    continue
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self.answer(body, writer)
                finally:
                    self.in_flight -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:  # The test is over, and nobody reads the rest of an answer.
            writer.transport.abort()
            raise
        finally:
            writer.close()

    def page(self, path: str) -> str:
        """What a GET answers: the models, or metrics where each image and clip was encoded once."""
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "stub"}]})
        num_encoded = len(self.images()) if self.caches else sum(map(len, self.per_request()))
        return f"# HELP x\ntriptych_encoder_images_encoded_total {num_encoded}.0\n"

    def per_request(self) -> list[list[str]]:
        """The URLs of images and clips of each request."""
        return [
            [part[part["type"]]["url"] for part in message["content"] if part["type"] != "text"]
            for body in self.bodies
            for message in body["messages"]
        ]

    def images(self) -> set[str]:
        """The distinct URLs of images and clips."""
        return {url for urls in self.per_request() for url in urls}

    async def refuse(
        self, status: int, message: str, writer: asyncio.StreamWriter, headers: str = ""
    ) -> None:
        error = json.dumps({"error": {"message": message}}).encode()
        head = f"HTTP/1.1 {status} No\r\n{headers}Content-Length: {len(error)}\r\n\r\n"
        writer.write(head.encode() + error)
        await writer.drain()

    async def answer(self, body: dict, writer: asyncio.StreamWriter) -> None:
        if self.behaviour == "refuse":
            await self.refuse(503, "full", writer)
            return
        if self.behaviour == "starts":
            self.behaviour = "good"
            await self.refuse(503, "no decoder is available", writer, "Retry-After: 1\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def event(payload: str) -> None:
            data = f"data: {payload}\n\n".encode()
            frame = f"{len(data):x}\r\n".encode() + data + b"\r\n"
            for part in (frame[:7], frame[7:]):  # chunks do not arrive whole
                writer.write(part)
                await writer.drain()

        await event(json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        for _ in range(body.get("max_tokens", 3)):
            await asyncio.sleep(0.002)
            await event(json.dumps({"choices": [{"delta": {"content": "x"}}]}))
        if self.behaviour == "die":
            writer.close()
            return
        broken = {
            "error": json.dumps({"error": {"message": "the decoder died"}}),
            "error as text": json.dumps({"error": "the decoder died"}),
            "words": "upstream went away",
        }
        if self.behaviour in broken:
            await event(broken[self.behaviour])
            writer.write(b"0\r\n\r\n")
            return
        if self.behaviour == "no_done":
            await event(json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        usage = {"prompt_tokens": 9, "completion_tokens": body.get("max_tokens", 3)}
        if "video_url" in json.dumps(body):
            usage["prompt_tokens_details"] = {"video_tokens": 40, "videos": [VIDEO]}
        times = {"stage_times_ms": {"encode": 4.5, "total": 9.0}}
        await event(json.dumps({"choices": [], "usage": usage} | times))
        if self.behaviour not in ("truncate", "no_done"):
            await event("[DONE]")
        writer.write(b"0\r\n\r\n")


@contextmanager
def running_stub() -> Iterator[StubServer]:
    """The server, in a thread of its own."""
    server = StubServer()
    loop = asyncio.new_event_loop()
    started = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{started.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    started.close()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
