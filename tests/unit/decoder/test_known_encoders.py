"""Which encoders a decoder dials."""

import asyncio
import socket
from typing import Any

import pytest

from services.common.settings import SettingsError
from services.decoder.images.known_encoders import KnownEncoders
from services.decoder.settings import DecoderSettings


@pytest.mark.parametrize(
    ("entries", "admitted", "refused"),
    [
        ((), "127.0.0.1:50051 127.8.0.1:1 [::1]:50051",
         "10.0.0.1:50051 localhost:1 unix:/tmp/x [::2]:1 dns:///encoder:50051 127.0.0.1 :1 x "
         "127.0.0.1:0 127.0.0.1:99999 127.1:1 ::1:5 169.254.169.254:80 "),
        (("encoder-0:50051", "10.1.2.3:7"), "encoder-0:50051 10.1.2.3:7",
         "encoder-1:50051 encoder-0:50052 10.1.2.3:8 127.0.0.1:50051 dns:///encoder-0:50051"),
        (("unix:/run/a.sock",), "unix:/run/a.sock",
         "unix:/run/b.sock unix:///run/a.sock unix:/run/../run/a.sock 127.0.0.1:1"),
        (("10.42.0.0/16",), "10.42.0.1:1 10.42.255.255:50051",
         "10.43.0.1:1 [::ffff:10.42.0.1]:1 10.42.0.1 encoder:1"),
        (("10.42.0.0/16:50051", "[fd00::]/8:50051"), "10.42.7.7:50051 [fd00::7]:50051",
         "10.42.7.7:50052 [fe00::7]:50051"),
    ],
)  # fmt: skip
async def test_addresses_are_compared_with_the_setting(
    entries: tuple[str, ...], admitted: str, refused: str
) -> None:
    known = KnownEncoders(entries)
    assert [a for a in admitted.split() if not await known.admits(a)] == []
    assert [a for a in refused.split() if await known.admits(a)] == []
    assert not await known.admits("")


def resolve_with(getaddrinfo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the look-up of names of the running event loop."""
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_name_admits_its_addresses_and_those_that_have_just_left_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses, questions = ["10.0.0.1"], 0

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        nonlocal questions
        questions += 1
        if not addresses:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, None, None, "", (address, port)) for address in addresses]

    resolve_with(getaddrinfo, monkeypatch)
    known = KnownEncoders(("dns:///encoder:50051",), resolve_period_s=0.0)
    assert await known.admits("10.0.0.1:50051") and questions == 1
    assert await known.admits("10.0.0.1:50051") and questions == 1
    assert not await known.admits("10.0.0.1:50052")
    assert not await known.admits("10.0.0.2:50051")
    addresses[:] = ["10.0.0.2"]
    assert await known.admits("10.0.0.2:50051")
    assert await known.admits("10.0.0.1:50051")  # it drains
    addresses.clear()
    assert not await known.admits("10.0.0.3:50051")  # and a failed look-up forgets nothing
    assert await known.admits("10.0.0.2:50051")


async def test_unknown_addresses_ask_for_the_name_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = 0

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        nonlocal questions
        questions += 1
        await asyncio.sleep(0)
        return []

    resolve_with(getaddrinfo, monkeypatch)
    known = KnownEncoders(("dns:encoder:50051",), resolve_period_s=3600.0)
    await asyncio.gather(*(known.admits(f"10.0.0.{i}:50051") for i in range(50)))
    assert questions == 1


async def test_a_refusal_is_logged_once_for_each_address(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownEncoders(())
    for _ in range(3):
        assert not await known.admits("10.0.0.1:1")
    assert not await known.admits("10.0.0.2:1")
    assert [r.args[0] for r in caplog.records] == ["10.0.0.1:1", "10.0.0.2:1"]  # type: ignore[index]


@pytest.mark.parametrize(
    "wrong", ["encoder", "10.0.0.0/33", "dns:///encoder", "a:b", "::1:5", ":5"]
)
def test_a_malformed_setting_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(SettingsError, match="DECODER_ENCODER_ADDRESSES"):
        DecoderSettings.from_environment(
            {"DECODER_MODEL": "/m", "DECODER_ENCODER_ADDRESSES": f"127.0.0.1:1,{wrong}"}
        )
