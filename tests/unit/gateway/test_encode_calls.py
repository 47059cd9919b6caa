"""Encode calls of a request with many units: in which order they begin and are sent."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.geometry import Run, Unit
from services.common.pb.encoder_pb2 import DescribeEncoderResponse
from services.gateway.request.encode_calls import EncodeCalls

NUM_UNITS = 20


class Image:
    """An image whose key is its number."""

    file = None

    def __init__(self, number: int) -> None:
        self.number = number

    async def key(self, prefix: bytes, unit: Unit, salt: bytes) -> bytes:
        return b"%d" % self.number


def calls(events: list[tuple[str, int]]) -> EncodeCalls:
    """Calls that record when they begin, and when gRPC would send them, and never end."""
    pod = SimpleNamespace(address="unix:/encoder")

    class Recorded(EncodeCalls):
        def _choose(self, description: Any, missing: Any) -> Any:
            return dict.fromkeys(missing, pod)

        async def _outcome(self, pod: Any, key: bytes, image: Any, run: Run) -> Any:
            events.append(("begun", int(key)))
            # A call of gRPC is a task of its own, which sends the message when it first runs.
            asyncio.get_running_loop().call_soon(events.append, ("sent", int(key)))
            await asyncio.Event().wait()

    runs = [Run(4 * n, 4, Unit((1, 4, 4)), image=n) for n in range(NUM_UNITS)]
    request = SimpleNamespace(
        prompt=SimpleNamespace(runs=runs), images=list(map(Image, range(NUM_UNITS))),
        adapter=SimpleNamespace(digest=b"", adapts_tower=False), cache_salt=b"", shares_media=False,
    )  # fmt: skip
    encoders: Any = SimpleNamespace(description=lambda adapter: DescribeEncoderResponse())
    unused: Any = None
    return Recorded(request, encoders, unused, unused, unused, 1.0)  # type: ignore[arg-type]


async def test_the_first_calls_are_sent_before_the_last_calls_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.request.encode_calls._CALLS_AT_ONCE", 8)
    events: list[tuple[str, int]] = []
    made = calls(events)
    refs = await made.assign()
    assert [ref.image_key for ref in refs] == [b"%d" % n for n in range(NUM_UNITS)]
    assert {ref.encoder_address for ref in refs} == {"unix:/encoder"}
    assert len(made._calls) == NUM_UNITS  # a lost encoder's calls are cancelled before they begin
    assert [event for event in events if event[0] == "begun"] == [("begun", n) for n in range(8)]
    for _ in range(NUM_UNITS):
        await asyncio.sleep(0)
    for kind in ("begun", "sent"):
        assert [n for each, n in events if each == kind] == list(range(NUM_UNITS))
    for first, later in ((7, 8), (15, 16)):
        assert events.index(("sent", first)) < events.index(("begun", later))
    made.close()


async def test_calls_that_are_cancelled_do_not_begin() -> None:
    events: list[tuple[str, int]] = []
    made = calls(events)
    await made.assign()
    begun = len(events)
    made.close()
    for _ in range(NUM_UNITS):
        await asyncio.sleep(0)
    assert [event for event in events[begun:] if event[0] == "begun"] == []
