"""Images from the web over TLS: valid certificates alone, and connections that end with a fetch."""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess

import pytest
import uvloop

from services.common.errors import Unavailable
from tests.noise import PATIENCE_S
from tests.unit.gateway.test_web_media import ok, origin, web


@pytest.fixture
def certificate(tmp_path):
    """Of h.example: the file and a server's context."""
    key, file = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=h.example", "-addext",
         "subjectAltName=DNS:h.example", "-keyout", str(key), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    return file, context


async def test_images_come_encrypted_from_hosts_with_a_valid_certificate(certificate):
    file, context = certificate
    body = bytes(range(256)) * 4000
    async with origin(ok(body), tls=context) as (port, _), web(max_bytes=1 << 20) as (media, _):
        with pytest.raises(Unavailable):  # nobody vouches for it
            await media.fetch(f"https://h.example:{port}/")
        trusting = ssl.create_default_context(cafile=str(file))
        async with web(max_bytes=1 << 20, tls=trusting) as (media, _):
            assert await media.fetch(f"https://h.example:{port}/") == body
            with pytest.raises(Unavailable):
                await media.fetch(f"https://other.example:{port}/")


def test_an_origin_that_never_ends_its_connection_keeps_none_of_ours(certificate):
    """TLS by itself would wait half a minute for the origin to agree to the end."""
    file, context = certificate
    options = {"tls": ssl.create_default_context(cafile=str(file))}

    def serve() -> None:
        accepted, _ = listening.accept()
        with (
            socket.socket(fileno=os.dup(accepted.fileno())) as bare,
            context.wrap_socket(accepted, server_side=True) as connection,
        ):
            connection.recv(65536)
            connection.sendall(ok(b"abc"))
            bare.settimeout(PATIENCE_S / 4)
            with contextlib.suppress(ConnectionResetError):
                while bare.recv(65536):  # what TLS says about its end is not answered
                    pass

    async def fetch() -> None:
        async with web(**options) as (media, _):
            ended = asyncio.create_task(asyncio.to_thread(serve))
            port = listening.getsockname()[1]
            assert await media.fetch(f"https://h.example:{port}/") == b"abc"
            await ended

    with socket.create_server(("127.0.0.1", 0)) as listening:
        uvloop.run(fetch())
