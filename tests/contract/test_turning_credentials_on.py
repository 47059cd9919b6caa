"""Certificates and tokens are turned on, and off, while calls are served.

Stages follow each other: nothing, accepted, shown, required. Between two steps, services of both
stages run side by side and call each other.
"""

import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.common.pb import encoder_pb2 as pb
from services.common.process.service_process import create_service_server
from services.common.security.credentials import (
    NO_CREDENTIALS,
    Credentials,
    TokenFile,
    watch_certificates,
)
from services.common.security.rpc_credentials import PeerCheck
from services.common.settings import PeerSettings, SettingsError
from services.common.transport.both_transports import listening
from services.common.transport.rpc import create_channel, create_server
from tests.certificates import Authority, mount
from tests.fakes import FakeEncoder
from tests.noise import PATIENCE_S
from tests.stubs import EncoderStub

STAGES = "nothing", "accepted", "shown", "required"
KINDS = "tls", "token", "both"
OK, UNAUTHENTICATED = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED


class Installation:
    """Credentials of each service at each stage."""

    def __init__(self, kind: str, directory: Path) -> None:
        authority = Authority()
        (directory / "token").write_text("a-token-of-the-services")
        self._of = {
            name: Credentials(
                certificates=None
                if kind == "token"
                else watch_certificates(mount(authority.issue(name), directory / name)),
                token=None if kind == "tls" else TokenFile(directory / "token"),
            )
            for name in ("encoder", "gateway")
        }

    def at(self, stage: str, name: str) -> Credentials:
        if stage == "nothing":
            return NO_CREDENTIALS
        return replace(self._of[name], stage=stage)  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=KINDS)
def installation(request: pytest.FixtureRequest, tmp_path: Path) -> Installation:
    return Installation(request.param, tmp_path)


@asynccontextmanager
async def serving(
    credentials: Credentials, registry: CollectorRegistry | None = None
) -> AsyncIterator[str]:
    check = PeerCheck(credentials, "encoder", ("gateway",), registry or CollectorRegistry())
    server, _ = await create_service_server(FakeEncoder(), check=check if credentials else None)
    async with listening(server, check, credentials, "127.0.0.1:0") as port:
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def status(address: str, credentials: Credentials) -> grpc.StatusCode:
    async with create_channel(address, credentials.shown, peer="encoder") as channel:
        try:
            describe = EncoderStub(channel).Describe
            await describe(pb.DescribeEncoderRequest(), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as failure:
            return failure.code()
        return OK


@pytest.mark.parametrize(("before", "after"), list(pairwise(STAGES)))
async def test_services_of_neighbouring_stages_call_each_other(
    installation: Installation, before: str, after: str
) -> None:
    for server, caller in ((before, after), (after, before), (before, before), (after, after)):
        async with serving(installation.at(server, "encoder")) as address:
            shown = installation.at(caller, "gateway")
            assert await status(address, shown) == OK, f"{caller} calls {server}"


async def test_a_step_that_is_left_out_is_an_outage(installation: Installation) -> None:
    """The other test can fail; and `required` does refuse."""
    async with serving(installation.at("required", "encoder")) as address:
        assert await status(address, NO_CREDENTIALS) != OK
        assert await status(address, installation.at("accepted", "gateway")) != OK


async def test_what_is_wrong_is_refused_at_each_stage(
    tmp_path: Path, installation: Installation
) -> None:
    """Only nothing at all passes for a while."""
    wrong = Authority("foreign")
    (tmp_path / "wrong").write_text("a-token-of-somebody-else")
    certificates = watch_certificates(mount(wrong.issue("gateway"), tmp_path / "foreign"))
    for stage in ("accepted", "shown"):
        own = installation.at(stage, "encoder")
        shown = Credentials(
            certificates=None if own.certificates is None else certificates,
            token=None if own.token is None else TokenFile(tmp_path / "wrong"),
        )
        async with serving(own) as address:
            assert await status(address, shown) != OK


@pytest.mark.parametrize("stage", ["accepted", "shown"])
async def test_whole_images_pass_with_and_without_tls(tmp_path: Path, stage: str) -> None:
    installation, registry = Installation("tls", tmp_path), CollectorRegistry()
    image = bytes(range(256)) * (24 << 12)  # 24 MiB
    async with serving(installation.at(stage, "encoder"), registry) as address:
        for credentials in (NO_CREDENTIALS, installation.at("required", "gateway")):
            async with create_channel(address, credentials, peer="encoder") as channel:
                call = EncoderStub(channel).Encode
                request = pb.EncodeRequest(image=image)
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await call(request, timeout=PATIENCE_S)
                # The fake has read all of it, and it is no image.
                assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for reason in ("name", "token"):
        count = registry.get_sample_value(
            "triptych_encoder_peers_refused_total", {"reason": reason}
        )
        assert not count


async def test_a_port_that_is_taken_leaves_no_sockets_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = Installation("tls", tmp_path).at("accepted", "encoder")
    check = PeerCheck(credentials, "encoder", ("gateway",), CollectorRegistry())
    with (
        tempfile.TemporaryDirectory() as directory,  # its path has to fit a socket's
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        monkeypatch.setattr(tempfile, "tempdir", directory)
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            async with listening(create_server(check), check, credentials, address):
                pass
        assert not os.listdir(directory)


def test_a_stage_without_credentials_is_refused() -> None:
    with pytest.raises(SettingsError, match="peer_tls_directory or peer_token_file"):
        Credentials.from_settings(PeerSettings(peer_credentials="accepted"))
