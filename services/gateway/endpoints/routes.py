"""Health. `surfaces` has the other routes."""

import time
from collections.abc import Callable
from importlib import metadata

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.chat import ChatService
from services.gateway.http.exchange import JsonResponse

# After so long, services that are not there are taken to be scaled to zero.
_PATIENCE_S = 10.0


class Routes:
    """Health of one gateway."""

    def __init__(self, service: ChatService, is_draining: Callable[[], bool]) -> None:
        self._service = service
        self._is_draining = is_draining
        self._was_ready = False
        self._patient_until = time.monotonic() + _PATIENCE_S

    def table(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
        ]

    async def health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": package_version()})

    async def ready(self, request: Request) -> Response:
        """Readiness: requests get an answer here. So it waits for the services, but not for ever,
        and not again later on: without services a request gets a 503 that says when to retry, while
        clients of a gateway that is not ready find nothing to connect to.
        """
        if self._is_draining():
            return JsonResponse({"status": "draining"}, 503)
        status = "ready"
        if not self._service.ready():
            status = f"waiting for {self._service.needs}"
        if status == "ready" or time.monotonic() > self._patient_until:
            self._was_ready = True
        return JsonResponse({"status": status, **self._left_out()}, 200 if self._was_ready else 503)

    def _left_out(self) -> dict[str, int]:
        """How many pods are healthy but serve another model, if any; the log has their addresses,
        which a caller without a key is not told.
        """
        found = len(self._service.encoders.misfits()) + len(self._service.decoders.misfits())
        return {"left_out": found} if found else {}


def package_version() -> str:
    """Of `triptych`."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
