"""What is asked of the stack's processes: whether they are ready, and their metrics.

`plan` and `serve` attach the checks to the processes, `stack` polls them. A check never raises.
"""

import asyncio
import json
import urllib.request

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 1.0


async def gateway_ready(host: str, port: int) -> bool:
    """True when a gateway and the services behind it serve: a gateway without services is ready,
    too, to say so.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                # 1.0 needs no `Host`, of which a gateway may refuse the name that it listens on.
                writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
                body = (await reader.read()).partition(b"\r\n\r\n")[2]
                return json.loads(body)["status"] == "ready"
            finally:
                writer.close()
    except (OSError, ValueError, KeyError):
        return False


async def grpc_ready(address: str, service: str) -> bool:
    """True when the standard health service says that `service` is SERVING."""
    # Never through a proxy of the environment's.
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            check = stub.Check  # pyright: ignore[reportAttributeAccessIssue] - made at run time
            answer = await check(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


async def redis_ready(socket_path: str) -> bool:
    """True when the Redis server at a Unix socket answers, if only to ask who calls."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket_path)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith((b"+PONG", b"-NOAUTH"))
            finally:
                writer.close()
    except OSError:
        return False


def fetch(url: str, timeout_s: float = 5.0) -> str:
    """What an endpoint of this machine answers; never through a proxy of the environment's.

    Raises:
        OSError, http.client.HTTPException: it does not.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout_s) as answer:
        return answer.read().decode()


def metric_value(url: str, name: str) -> float:
    """The sum of a metric's samples at a Prometheus endpoint.

    Raises:
        KeyError: the endpoint has no such metric.
    """
    families = text_string_to_metric_families(fetch(url))
    found = [s.value for family in families for s in family.samples if s.name == name]
    if not found:
        raise KeyError(name)
    return sum(found)
