"""Readiness checks of the stack's processes.

`plan` and `serve` attach a check to each process, and `stack` polls the checks. A check never
raises an exception.
"""

import asyncio
import json

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 1.0


async def gateway_ready(host: str, port: int) -> bool:
    """Returns whether a gateway and the services behind it are ready.

    The status code of `/ready` is not enough: a gateway without services is also ready, in order to
    answer requests with an error.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                # HTTP/1.0 needs no `Host` header, which the gateway might refuse.
                writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
                body = (await reader.read()).partition(b"\r\n\r\n")[2]
                return json.loads(body)["status"] == "ready"
            finally:
                writer.close()
    except (OSError, ValueError, KeyError):
        return False


async def grpc_ready(address: str, service: str) -> bool:
    """Returns whether the standard health service reports SERVING for `service`."""
    # A proxy of the environment is never used.
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
    """Returns whether the Redis server at a Unix socket answers. NOAUTH is also an answer."""
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
