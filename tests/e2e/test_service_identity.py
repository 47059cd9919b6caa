"""Services with certificates, as real processes: what they answer, and to whom."""

import asyncio
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from services.common.pb import encoder_pb2 as pb
from services.common.security.credentials import (
    NO_CREDENTIALS,
    Credentials,
    watch_certificates,
)
from services.common.security.watched_files import CHECK_INTERVAL_S
from services.common.transport.rpc import create_channel
from tests.certificates import Authority, mount
from tests.e2e.cluster import Cluster, png, wait_until
from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.stubs import EncoderStub
from triptych.plan import GRPC_SERVICES
from triptych.probes import grpc_ready

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]


async def _status(address: str, shown: Credentials = NO_CREDENTIALS) -> grpc.StatusCode:
    async with create_channel(address, shown, peer="encoder") as channel:
        call = EncoderStub(channel).Describe(pb.DescribeEncoderRequest(), timeout=5)
        return await call.code()


def test_all_calls_use_certificates_and_follow_their_rotation(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    kinds = "encoder", "decoder", "gateway"
    directories = {k: mount(old.issue(k), tmp_path / f"{k}-tls") for k in kinds}
    health = {k: free_port() for k in kinds[:2]}
    settings: dict[str, dict[str, object]] = {
        kind: {"peer_tls_directory": directory} for kind, directory in directories.items()
    }
    for kind, port in health.items():
        settings[kind]["health_port"] = port
    # Without Redis, which may have an image first, the decoder asks the encoder for its bytes.
    settings["decoder"]["redis_url"] = ""
    cluster = Cluster(tmp_path, **settings)  # type: ignore[arg-type]
    (encoder,), (decoder,) = cluster.encoders, cluster.decoders
    known = f"dns:///localhost:{encoder.port}"
    decoder.set(encoder_addresses=known)
    with cluster:
        assert cluster.ask("What do you see?", png(1))
        assert decoder.metric("triptych_decoder_embedding_fetch_bytes_total", path="shm") > 0
        # The kubelet speaks plaintext, to a port of its own.
        for kind, service in GRPC_SERVICES.items():
            assert asyncio.run(grpc_ready(f"127.0.0.1:{health[kind]}", service))
        for service in (encoder, decoder):
            assert asyncio.run(_status(service.address)) is grpc.StatusCode.UNAVAILABLE

        # The authority is replaced in three steps, as docs/adr/0036 says.
        bundle = old.pem + new.pem
        steps = (old, bundle), (new, bundle), (new, new.pem)
        for seed, (issuer, trusted) in enumerate(steps, start=2):
            for kind, directory in directories.items():
                mount(issuer.issue(kind) | {"ca.crt": trusted}, directory)
            time.sleep(CHECK_INTERVAL_S)  # after which everyone reads them
            assert cluster.ask("What do you see?", png(seed))
        for issuer, status in ((new, grpc.StatusCode.OK), (old, grpc.StatusCode.UNAVAILABLE)):
            files = issuer.issue("gateway") | {"ca.crt": new.pem}
            shown = Credentials(watch_certificates(mount(files, tmp_path / issuer.name)))
            wait_until(
                lambda: asyncio.run(_status(encoder.address, shown)) is status,  # noqa: B023
                PATIENCE_S, f"{issuer.name} gets {status}",
            )  # fmt: skip


def test_certificates_are_turned_on_service_by_service(tmp_path: Path) -> None:
    """Each restart leaves services of two stages side by side, and each question is answered."""
    authority = Authority()
    kinds = "encoder", "decoder", "gateway"
    directories = {k: mount(authority.issue(k), tmp_path / f"{k}-tls") for k in kinds}
    cluster = Cluster(tmp_path)
    seed = 0
    with cluster:
        assert cluster.ask("What do you see?", png(seed))
        for stage in ("accepted", "shown", "required"):
            for service in cluster.services:
                service.set(peer_tls_directory=directories[service.kind], peer_credentials=stage)
                cluster.restart(service)
                seed += 1
                assert cluster.ask("What do you see?", png(seed))
        (encoder,) = cluster.encoders
        assert asyncio.run(_status(encoder.address)) is grpc.StatusCode.UNAVAILABLE
