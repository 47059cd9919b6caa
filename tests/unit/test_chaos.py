"""The chaos run finds what it looks for: its proxy breaks links, its checker sees failures."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from benchmarks.chaos import clients
from benchmarks.chaos.clients import Answer, Client
from benchmarks.chaos.history import Ask, History, ProcessEnd, Window
from benchmarks.chaos.proxy import Fault, Proxy, port_owner
from benchmarks.chaos.questions import questions
from benchmarks.chaos.report import add_up, text
from benchmarks.chaos.stack import Pod
from benchmarks.client import Sample
from tests.noise import PATIENCE_S
from tests.ports import free_port

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """A server that sends everything back, and a proxy before it."""

    def __init__(self) -> None:
        self.address = ("127.0.0.1", free_port())
        self.proxy: Proxy
        self._server: asyncio.Server

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._echo, "127.0.0.1", 0)
        server = self._server.sockets[0].getsockname()[:2]
        self.proxy = Proxy(self.address, server)
        await self.proxy.start()

    async def stop(self) -> None:
        await self.proxy.close()
        self._server.close()

    async def connect(self) -> Streams:
        return await asyncio.open_connection(*self.address)

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    made = Link()
    await made.start()
    yield made
    await made.stop()


async def said(streams: Streams, data: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    reader, writer = streams
    writer.write(data)
    async with asyncio.timeout(timeout_s):
        return await reader.readexactly(len(data))


async def test_bytes_pass_in_order(link: Link) -> None:
    data = bytes(range(256)) * 20_000
    streams = await link.connect()
    writing = asyncio.create_task(said(streams, data))
    assert await writing == data
    streams[1].close()


async def test_a_partition_holds_bytes_and_loses_none(link: Link) -> None:
    streams = await link.connect()
    assert await said(streams, b"before") == b"before"
    link.proxy.break_down(Fault(hold=True))
    with pytest.raises(TimeoutError):
        await said(streams, b"during", 0.1)
    link.proxy.heal()
    assert await streams[0].readexactly(6) == b"during"
    streams[1].close()


async def test_delayed_bytes_come_late(link: Link) -> None:
    streams = await link.connect()
    link.proxy.break_down(Fault(delay_s=0.1))
    start = time.monotonic()
    assert await said(streams, b"abc") == b"abc"
    assert time.monotonic() - start >= 0.2
    streams[1].close()


def test_delayed_bytes_stay_in_order() -> None:
    """In uvloop, in which the run's proxies are."""

    async def say_much() -> None:
        link = Link()
        await link.start()
        streams = await link.connect()
        link.proxy.break_down(Fault(delay_s=0.02))
        expected = bytes(range(200))
        for value in expected:
            streams[1].write(bytes([value]))
            await asyncio.sleep(0.0005)
        async with asyncio.timeout(PATIENCE_S):
            assert await streams[0].readexactly(len(expected)) == expected
        streams[1].close()
        await link.stop()

    uvloop.run(say_much())


async def test_a_reset_ends_old_and_new_connections(link: Link) -> None:
    streams = await link.connect()
    await said(streams, b"x")
    link.proxy.break_down(Fault(refuse=True))
    for each in (streams, await link.connect()):
        with pytest.raises(OSError):
            await said(each, b"y")
            raise AssertionError
        each[1].close()


async def test_a_truncated_answer_ends_after_its_bytes(link: Link) -> None:
    streams = await link.connect()
    link.proxy.break_down(Fault(cut_after=3))
    streams[1].write(b"abcdef")
    assert await streams[0].read() == b"abc"
    streams[1].close()


async def test_only_selected_clients_are_hit(link: Link) -> None:
    hit, spared = await link.connect(), await link.connect()
    port = hit[1].get_extra_info("sockname")[1]
    link.proxy.break_down(Fault(hold=True), lambda client: client == port)
    assert await said(spared, b"x") == b"x"
    with pytest.raises(TimeoutError):
        await said(hit, b"x", 0.1)
    for each in (hit, spared):
        each[1].close()


async def test_the_owner_of_a_connection_is_found(link: Link) -> None:
    dual = socket.socket(socket.AF_INET6)  # as gRPC connects
    dual.setblocking(False)
    host, port = link.address
    await asyncio.get_running_loop().sock_connect(dual, (f"::ffff:{host}", port))
    assert port_owner(dual.getsockname()[1], [1, os.getpid()]) == os.getpid()
    dual.close()
    streams = await link.connect()
    port = streams[1].get_extra_info("sockname")[1]
    assert port_owner(port, [1, os.getpid()]) == os.getpid()
    assert port_owner(port, [1]) is None
    streams[1].close()


def window(**fields: object) -> Window:
    return Window("SIGKILL decoder", "", 0.0, 10.0, 20.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "windows", "right"),
    [
        ("answered", 0, True),
        ("wrong", 2, False),
        ("wrong status", 2, False),
        ("lost", 2, False),
        ("refused", 0, False),
        ("refused", 1, False),
        ("refused", 2, True),
        ("error event", 1, False),
        ("error event", 2, True),
    ],
)
def test_only_right_outcomes_pass(outcome: str, windows: int, right: bool) -> None:
    history = History([Ask(12.0, 13.0, 0.1, "gateway-0/7", outcome)], [window()] * windows)
    assert (not history.failures()) is right


@pytest.mark.parametrize(
    ("end", "right"),
    [
        (ProcessEnd("gateway-0/7", 12.9, 15.0, -9), True),
        (ProcessEnd("gateway-0/7", 12.9, 13.1, 0), False),
        (ProcessEnd("gateway-1/8", 12.9, 13.1, -9), False),
        (ProcessEnd("gateway-0/7", 10.9, 11.0, -9), False),
        (ProcessEnd("gateway-0/7", 13.1, 13.2, -9), False),
    ],
)
def test_a_request_may_be_lost_with_its_gateway_alone(end: ProcessEnd, right: bool) -> None:
    ask = Ask(12.0, 13.0, 0.0, "gateway-0/7", "lost")
    assert (not History([ask], [window()], [end]).failures()) is right


def test_a_fault_of_before_explains_nothing() -> None:
    late = Ask(30.0, 31.0, 0.0, "gateway-0/7", "refused")
    assert History([late], [window(may_refuse=True)] * 2).failures()


Spoil = Callable[[Answer], None]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.texts.update({0: "rad"}),
        lambda a: a.texts.pop(1),
        lambda a: a.reasons.pop(0),
        lambda a: setattr(a, "completion_tokens", 3),
        lambda a: a.logprobs.update({0: [-0.3]}),
    ],
)
def test_answers_that_differ_are_told_apart(spoil: Spoil) -> None:
    def answer() -> Answer:
        return Answer({0: "red", 1: "blue"}, {0: "stop", 1: "length"}, {}, {0: [-0.1]}, 4)

    found = answer()
    assert not found.differs_from(answer())
    spoil(found)
    assert found.differs_from(answer())


def test_a_seed_repeats_its_questions() -> None:
    assert questions(5, 40) == questions(5, 40)
    assert questions(5, 40) != questions(6, 40)
    assert {q.status for q in questions(5, 100)} == {200, 400}


def test_overlapping_faults_are_counted_apart() -> None:
    alone, first, second = (
        Window("SIGKILL decoder", "", 0.0, start, start + 5.0) for start in (0.0, 50.0, 53.0)
    )
    asks = [Ask(at, at + 1, 0.5, "gateway-0/7", "answered") for at in (2.0, 20.0, 51.0, 54.0, 54.5)]
    report = History(asks, [alone, first, second]).report()
    assert report["normal"] == [0.5]
    assert report["kinds"]["SIGKILL decoder"]["during"] == [0.5]
    assert report["kinds"]["two at once"]["during"] == [0.5] * 3


def test_results_add_up() -> None:
    asks = [Ask(2.0, 3.0, 0.5, "gateway-0/7", "answered")]
    windows = [Window("SIGKILL decoder", "", 1.0, 0.0, 5.0)]
    parts = [
        {
            "seeds": [seed], "commits": ["abc"], "seconds": 10.0, "failures": [], "left": [],
            "growth": [], **History(asks * seed, windows).report(),
        }
        for seed in (1, 2)
    ]  # fmt: skip
    total = add_up(parts)
    assert total["outcomes"] == {"answered": 3}
    assert total["kinds"]["SIGKILL decoder"]["faults"] == 2
    assert len(total["kinds"]["SIGKILL decoder"]["during"]) == 3
    assert "3 requests" in text(total)


async def test_a_loss_belongs_to_the_process_that_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow reader sees it seconds later, when the pod's next process runs."""
    service = cast("Any", SimpleNamespace(pid=1, address="127.0.0.1:9", is_running=lambda: True))
    pod = Pod("gateway", 0, service, service.address, None)
    stopping = asyncio.Event()

    async def ask(*_: object) -> Sample:
        service.pid = 2
        stopping.set()
        return Sample(end=3.0, error="connection lost")

    monkeypatch.setattr(clients.ChaosConnection, "ask", ask)
    monkeypatch.setattr(clients, "_LEAVES", 0.0)
    stack = cast("Any", SimpleNamespace(ready_gateways=lambda: [pod]))
    history = History(ends=[ProcessEnd(f"{pod.name}/1", seen_at=1.0, at=2.0e12, status=-9)])
    catalogue = questions(0, 1)
    await Client(stack, catalogue, [Answer()], history, "0").keep_asking(stopping, 0.0)
    assert [asked.gateway for asked in history.asks] == [f"{pod.name}/1"]
    assert history.failures() == []
