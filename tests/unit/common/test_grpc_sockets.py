"""Which of gRPC's sockets the services use; gRPC says so itself when it is traced."""

import os
import subprocess
import sys

CALL = """
import asyncio
import services
import grpc
from services.common.transport.rpc import create_channel, create_server

async def main():
    server = create_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with create_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
    await server.stop(None)

asyncio.run(main())
"""


def traced(**variables: str) -> str:
    """What gRPC prints of a process in which a channel and a server meet."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("GRPC_")}
    variables |= {"GRPC_TRACE": "event_engine_endpoint,tcp", "GRPC_VERBOSITY": "debug"}
    run = subprocess.run(
        [sys.executable, "-c", CALL], env=inherited | variables, timeout=60, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    return run.stderr.decode()


def test_services_do_without_the_event_engine() -> None:
    """ADR 0014."""
    said = traced()
    assert "TCP:" in said and "Endpoint[" not in said
    assert "Unknown experiment" not in said


def test_the_environment_overrides_it() -> None:
    said = traced(GRPC_EXPERIMENTS="event_engine_client,event_engine_listener")
    assert "Endpoint[" in said
