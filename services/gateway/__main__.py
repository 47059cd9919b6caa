"""`python -m services.gateway`: reads the settings and serves until a signal.

`triptych serve` passes arguments: the port that several gateways of one machine share, and the
address on which metrics are served.
"""

import argparse
import asyncio
import logging
import sys

import uvloop

from services.common.metrics_registry import serve_metrics
from services.common.model_spec import ModelSpecError
from services.common.process.pod_limits import raise_descriptor_limit
from services.common.process.process_memory import freeze_gc, return_large_buffers
from services.common.settings import SettingsError
from services.common.telemetry import setup_logging
from services.common.tracing import setup_tracing
from services.gateway.app import create_gateway
from services.gateway.server import GatewayServer
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# Seconds for which another thread keeps the interpreter lock while the event loop waits for it. By
# Python's default of 5 ms, a request would wait 5 ms at each of its some twenty turns in the loop.
_SWITCH_INTERVAL_S = 0.5e-3


async def _serve(settings: GatewaySettings, arguments: argparse.Namespace) -> None:
    gateway = create_gateway(settings)
    server = GatewayServer(gateway, settings, arguments.shared_port)
    freeze_gc()
    if settings.shutdown_grace_s < settings.request_timeout_s:
        log.info(
            "a shutdown ends requests that run for longer than GATEWAY_SHUTDOWN_GRACE_S (%g s), "
            "although GATEWAY_REQUEST_TIMEOUT_S allows a request %g s",
            settings.shutdown_grace_s,
            settings.request_timeout_s,
        )
    host = arguments.metrics_host or settings.host
    serve_metrics(gateway.metrics.registry, host, settings.metrics_port)
    await server.serve()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m services.gateway")
    parser.add_argument(
        "--shared-port",
        type=int,
        metavar="PORT",
        help="second port, which several gateways of one machine share; GATEWAY_PORT is then each "
        "gateway's own port, for probes",
    )
    parser.add_argument(
        "--metrics-host",
        metavar="ADDRESS",
        help="address on which metrics are served (default: GATEWAY_HOST)",
    )
    return parser.parse_args()


def main() -> int:
    """Runs the gateway. Returns the exit status: 0 after a signal, 2 if the settings or the model
    cannot be used.
    """
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
