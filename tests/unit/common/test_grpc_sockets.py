"""Which of gRPC's sockets and handlers the services use; gRPC says so itself when it is traced."""

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


FORK = """
import asyncio, os
import services
from services.common.transport.rpc import create_channel

async def main():
    async with create_channel("unix:/nowhere.sock") as channel:
        call = asyncio.ensure_future(channel.unary_unary("/a/b")(b"", timeout=0.1))
        await asyncio.sleep(0.01)
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        await asyncio.wait([call])

asyncio.run(main())
"""


def traced(program: str = CALL, **variables: str) -> str:
    """What gRPC prints of a process that runs a program."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("GRPC_")}
    variables |= {"GRPC_TRACE": "event_engine_endpoint,tcp", "GRPC_VERBOSITY": "debug"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=inherited | variables, timeout=60, capture_output=True
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


def test_a_child_process_runs_none_of_grpcs_handlers() -> None:
    """gRPC's handlers of fork() crash a process that forks while a channel dials, now and then."""
    assert "fork() handlers" not in traced(FORK)
    assert "fork() handlers" in traced(FORK, GRPC_ENABLE_FORK_SUPPORT="1")
