"""`python -m services.gateway`: reads the settings and serves until a signal.

`triptych serve` gives it arguments: where several gateways of one machine listen together, and
where metrics are.
"""

import argparse
import asyncio
import logging
import sys

import uvloop

from services.common.model_spec import ModelSpecError
from services.common.process.pod_limits import raise_descriptor_limit
from services.common.process.process_memory import freeze_gc, return_large_buffers
from services.common.settings import SettingsError
from services.common.telemetry import serve_metrics, setup_logging
from services.common.tracing import setup_tracing
from services.gateway.app import create_gateway
from services.gateway.server import GatewayServer
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# How long a thread keeps the interpreter lock that the event loop waits for. By default 5 ms, each
# time: a request passes the loop some twenty times.
_SWITCH_INTERVAL_S = 0.5e-3


async def _serve(settings: GatewaySettings, arguments: argparse.Namespace) -> None:
    gateway = create_gateway(settings)
    server = GatewayServer(gateway, settings, arguments.shared_port)
    freeze_gc()
    if settings.shutdown_grace_s < settings.request_timeout_s:
        log.info(
            "requests that take longer than GATEWAY_SHUTDOWN_GRACE_S (%g s) are cut at shutdown; "
            "they may take %g s", settings.shutdown_grace_s, settings.request_timeout_s,
        )  # fmt: skip
    host = arguments.metrics_host or settings.host
    serve_metrics(gateway.metrics.registry, host, settings.metrics_port)
    await server.serve()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m services.gateway")
    parser.add_argument(
        "--shared-port", type=int, metavar="PORT",
        help="a second port, on which several gateways listen; each has one of its own for probes",
    )  # fmt: skip
    parser.add_argument("--metrics-host", metavar="ADDRESS", help="default: GATEWAY_HOST")
    return parser.parse_args()


def main() -> int:
    """Runs it; the exit status: 0 after a signal, 2 if the settings or the model are refused."""
    arguments = _arguments()
    try:
        settings = GatewaySettings.from_environment()
        setup_logging("gateway", settings.log_level)
        setup_tracing("gateway")
        return_large_buffers()
        raise_descriptor_limit()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, arguments))
    except (SettingsError, ModelSpecError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
