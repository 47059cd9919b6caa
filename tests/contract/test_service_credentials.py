"""Services that know each other: real certificates and tokens, real servers and channels.

A caller without what is asked for is refused, counted and logged once; what is mounted anew is used
without a restart.
"""

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.geometry import Unit
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.common.process.service_process import create_service_server
from services.common.security.credentials import (
    NO_CREDENTIALS,
    Credentials,
    TokenFile,
    watch_certificates,
)
from services.common.security.rpc_credentials import PeerCheck
from services.common.transport.rpc import create_channel
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.pods import PodDialer
from services.gateway.clients.served_model import ServedModel
from services.gateway.metrics import GatewayMetrics
from tests.certificates import Authority, mount
from tests.fake_fetch import FakeFetchServicer, embedding_bytes
from tests.fakes import FakeDecoder, FakeEncoder
from tests.noise import PATIENCE_S
from tests.stubs import EncoderStub
from triptych.probes import grpc_ready

TOKEN, OTHER_TOKEN = "a-token-of-the-services", "a-token-of-somebody-else"
CALLERS = "gateway", "decoder"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def foreign() -> Authority:
    return Authority("foreign")


@dataclass
class Server:
    """An encoder, what it counted, and where it listens."""

    address: str
    registry: CollectorRegistry
    encoder: FakeEncoder

    def refused(self, reason: str) -> float:
        found = self.registry.get_sample_value(
            "triptych_encoder_peers_refused_total", {"reason": reason}
        )
        return found or 0.0


@asynccontextmanager
async def serving(credentials: Credentials, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    encoder, registry = FakeEncoder(), CollectorRegistry()
    check = PeerCheck(credentials, "encoder", CALLERS, registry)
    server, _ = await create_service_server(encoder, check=check)
    stream = grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Stream": stream})
    server.add_generic_rpc_handlers((handler,))
    port = check.add_port(server, address)
    await server.start()
    try:
        yield Server(f"127.0.0.1:{port}", registry, encoder)
    finally:
        await server.stop(None)


class Mounts:
    """Directories as pods mount them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def certificates(self, files: dict[str, bytes], name: str = "") -> Credentials:
        self._count += 1
        directory = mount(files, self._directory / (name or f"tls-{self._count}"))
        return Credentials(certificates=watch_certificates(directory, check_interval_s=0.0))

    def token(self, *tokens: str, name: str = "") -> Credentials:
        self._count += 1
        path = self._directory / (name or f"token-{self._count}")
        path.write_text("\n".join(tokens))
        return Credentials(token=TokenFile(path, check_interval_s=0.0))


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    return Mounts(tmp_path)


async def describe(address: str, shown: Credentials, peer: str = "encoder") -> grpc.StatusCode:
    """The status of a call."""
    async with create_channel(address, shown, peer=peer) as channel:
        try:
            await EncoderStub(channel).Describe(pb.DescribeEncoderRequest(), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as failure:
            return failure.code()
        return grpc.StatusCode.OK


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - metrics without an event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("caller", CALLERS)
async def test_certificates_of_our_authority_are_accepted(
    authority: Authority, mounts: Mounts, caller: str
) -> None:
    async with serving(mounts.certificates(authority.issue("encoder"))) as server:
        shown = mounts.certificates(authority.issue(caller))
        assert await describe(server.address, shown) is grpc.StatusCode.OK


@pytest.mark.parametrize("kind", ["plaintext", "no certificate", "foreign authority"])
async def test_other_connections_are_refused(
    authority: Authority, foreign: Authority, mounts: Mounts, kind: str
) -> None:
    async with serving(mounts.certificates(authority.issue("encoder"))) as server:
        match kind:
            case "plaintext":
                status = await describe(server.address, NO_CREDENTIALS)
            case "foreign authority":  # it trusts ours, and shows one of its own
                files = foreign.issue("gateway") | {"ca.crt": authority.pem}
                status = await describe(server.address, mounts.certificates(files))
            case _:
                channel = grpc.aio.secure_channel(
                    server.address,
                    grpc.ssl_channel_credentials(authority.pem),
                    options=[("grpc.ssl_target_name_override", "encoder")],
                )
                async with channel:
                    call = EncoderStub(channel).Describe(pb.DescribeEncoderRequest())
                    status = await call.code()
        assert status is grpc.StatusCode.UNAVAILABLE
        # It still serves those that belong.
        shown = mounts.certificates(authority.issue("gateway"))
        assert await describe(server.address, shown) is grpc.StatusCode.OK


async def test_a_service_that_may_not_call_is_refused_by_name(
    authority: Authority, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(mounts.certificates(authority.issue("encoder"))) as server:
        shown = mounts.certificates(authority.issue("encoder"))
        for _ in range(2):
            assert await describe(server.address, shown) is grpc.StatusCode.UNAUTHENTICATED
        assert server.refused("name") == 2
        assert sum("may not call" in r.getMessage() for r in caplog.records) == 1


async def test_the_caller_refuses_a_server_of_another_authority_or_name(
    authority: Authority, foreign: Authority, mounts: Mounts
) -> None:
    shown = mounts.certificates(authority.issue("gateway"))
    trusting = foreign.issue("encoder") | {"ca.crt": authority.pem}
    async with serving(mounts.certificates(trusting)) as server:
        assert await describe(server.address, shown) is grpc.StatusCode.UNAVAILABLE
        assert not server.encoder.requests
    async with serving(mounts.certificates(authority.issue("encoder"))) as server:
        assert await describe(server.address, shown, "decoder") is grpc.StatusCode.UNAVAILABLE
        assert await describe(server.address, shown, "encoder") is grpc.StatusCode.OK


async def test_a_rotated_authority_is_followed_on_both_sides_without_a_restart(
    authority: Authority, mounts: Mounts
) -> None:
    """First both are trusted, then certificates change, then the old authority goes."""
    new = Authority("new")
    bundle = authority.pem + new.pem
    theirs = mounts.certificates(authority.issue("encoder"), "theirs")
    ours = mounts.certificates(authority.issue("gateway"), "ours")
    old = mounts.certificates(authority.issue("gateway"))
    async with serving(theirs) as server, create_channel(
        server.address, ours, peer="encoder"
    ) as channel:  # fmt: skip
        release = asyncio.Event()
        first = weakref.ref(channel._channel)  # pyright: ignore[reportAttributeAccessIssue]

        async def hold(_: pb.EncodeRequest) -> None:
            await release.wait()

        server.encoder.before = hold
        stub = EncoderStub(channel)
        key = image_key(server.encoder.description.key_prefix, b"", unit=Unit((1, 2, 2)), salt=b"")
        request = pb.EncodeRequest(image_key=key, grid=pb.Grid(t=1, h=2, w=2))
        running = asyncio.ensure_future(stub.Encode(request, timeout=PATIENCE_S))
        await until(lambda: bool(server.encoder.requests))
        for issue, pem in ((authority, bundle), (new, bundle), (new, new.pem)):
            for directory, name in (("theirs", "encoder"), ("ours", "gateway")):
                mounts.certificates(issue.issue(name) | {"ca.crt": pem}, directory)
            await stub.Describe(pb.DescribeEncoderRequest(), timeout=PATIENCE_S)
        assert await describe(server.address, old) is grpc.StatusCode.UNAVAILABLE
        # What ran on the first connection ends there.
        gc.collect()
        assert first() is not None
        release.set()
        assert (await running).num_tokens == 1
        # And that connection ends with it.
        del running, stub
        await until(lambda: (gc.collect(), first() is None)[1])


@pytest.mark.parametrize("method", ["Describe", "Health", "Fetch"])
async def test_calls_without_the_token_are_refused_counted_and_logged_once(
    mounts: Mounts, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(mounts.token(TOKEN)) as server:
        for shown in (NO_CREDENTIALS, mounts.token(OTHER_TOKEN)):
            async with create_channel(server.address, shown, peer="encoder") as channel:
                match method:
                    case "Describe":
                        call = EncoderStub(channel).Describe(pb.DescribeEncoderRequest())
                    case "Health":
                        stub = health_pb2_grpc.HealthStub(channel)
                        call = stub.Check(health_pb2.HealthCheckRequest())
                    case _:
                        call = EncoderStub(channel).Fetch(pb.FetchRequest())
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert server.refused("token") == 2
        warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1 and TOKEN not in caplog.text and OTHER_TOKEN not in caplog.text
        assert await describe(server.address, mounts.token(TOKEN)) is grpc.StatusCode.OK


async def test_a_stream_without_the_token_is_refused_before_its_first_message(
    mounts: Mounts,
) -> None:
    async with serving(mounts.token(TOKEN)) as server, create_channel(server.address) as channel:
        call = channel.stream_stream("/test.Echo/Stream")()
        async with asyncio.timeout(PATIENCE_S):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_rotate_without_a_refused_call(mounts: Mounts) -> None:
    theirs, ours = mounts.token(TOKEN, name="theirs"), mounts.token(TOKEN, name="ours")
    async with serving(theirs) as server, create_channel(
        server.address, ours, peer="encoder"
    ) as channel:  # fmt: skip
        stub = EncoderStub(channel)
        for tokens in ((TOKEN, OTHER_TOKEN), (OTHER_TOKEN, TOKEN), (OTHER_TOKEN,)):
            for name in ("theirs", "ours"):
                mounts.token(*tokens, name=name)
                await stub.Describe(pb.DescribeEncoderRequest(), timeout=PATIENCE_S)
        assert server.refused("token") == 0
        assert await describe(server.address, mounts.token(TOKEN)) is not grpc.StatusCode.OK


@pytest.mark.parametrize("kind", ["certificates", "token"])
async def test_a_decoder_fetches_with_credentials_and_not_without(
    authority: Authority, mounts: Mounts, kind: str
) -> None:
    servicer, registry = FakeFetchServicer(), CollectorRegistry()
    key, spec = b"k" * 32, EmbeddingSpec("bfloat16", 2, 4, 8)
    servicer.sizes[key] = 4
    theirs = mounts.certificates(authority.issue("encoder")) if kind == "certificates" else (
        mounts.token(TOKEN))  # fmt: skip
    ours = mounts.certificates(authority.issue("decoder")) if kind == "certificates" else (
        mounts.token(TOKEN))  # fmt: skip
    check = PeerCheck(theirs, "encoder", CALLERS, registry)
    server, _ = await create_service_server(servicer, check=check)
    address = f"127.0.0.1:{check.add_port(server, '127.0.0.1:0')}"
    await server.start()
    into = memoryview(bytearray(spec.size_bytes))
    known = EncoderFetcher(shared_memory=False, credentials=ours)
    stranger = EncoderFetcher(shared_memory=False)
    try:
        with pytest.raises(EncoderFailed):
            await stranger.fetch(address, key, spec, into)
        await known.fetch(address, key, spec, into)
        assert bytes(into) == embedding_bytes(key, spec)
    finally:
        await known.close()
        await stranger.close()
        await server.stop(None)


@pytest.mark.parametrize("service", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", ["foreign authority", "wrong token"])
async def test_a_gateway_gives_no_work_to_a_pod_it_does_not_know(
    authority: Authority,
    foreign: Authority,
    mounts: Mounts,
    service: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = (
        (mounts.certificates(authority.issue(service)), mounts.certificates(foreign.issue(service)))
        if kind == "foreign authority"
        else (mounts.token(TOKEN), mounts.token(OTHER_TOKEN))
    )
    shown = (
        mounts.certificates(authority.issue("gateway"))
        if kind == "foreign authority"
        else mounts.token(TOKEN)
    )
    fakes = [FakeEncoder() if service == "encoder" else FakeDecoder() for _ in range(2)]
    servers, addresses = [], []
    for fake, theirs in zip(fakes, (good, bad), strict=True):
        check = PeerCheck(theirs, service, ("gateway",), CollectorRegistry())
        server, _ = await create_service_server(fake, check=check)
        addresses.append(f"127.0.0.1:{check.add_port(server, '127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    metrics = GatewayMetrics()

    def refusals() -> dict[str, float]:
        (family,) = metrics.peers_refused.collect()
        samples = [s for s in family.samples if s.name.endswith("_total")]
        return {s.labels["reason"]: s.value for s in samples}

    kind_of_pool = EncoderPool if service == "encoder" else DecoderPool
    pool = kind_of_pool(addresses, ServedModel(), PodDialer(shown, metrics))
    await pool.start()
    try:
        await until(lambda: len(pool.healthy()) == 1 and sum(refusals().values()) >= 2)
        assert [pod.address for pod in pool.healthy()] == addresses[:1]
        assert set(refusals()) == {"certificate" if kind == "foreign authority" else "token"}
        assert sum("gets no calls" in r.getMessage() for r in caplog.records) == 1
    finally:
        await pool.close()
        for server in servers:
            await server.stop(None)


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(NO_CREDENTIALS) as server:
        assert await describe(server.address, NO_CREDENTIALS) is grpc.StatusCode.OK
        assert await grpc_ready(server.address, "triptych.v1.Encoder")
        # gRPC itself would take it.
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = EncoderStub(channel).Describe(pb.DescribeEncoderRequest())
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
