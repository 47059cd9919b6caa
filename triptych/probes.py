"""What is asked of the stack's processes: whether they are ready.

`plan` and `serve` attach the checks to the processes, `stack` polls them. A check never raises.
"""

import asyncio
import json

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
