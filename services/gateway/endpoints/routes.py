"""The routes: chat, models, health, the pages, and what `app` adds to them.

`app` mounts the table. Views translate between HTTP and `ChatService`; errors they raise become
responses in `exchange`.
"""

import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.chat import ChatService
from services.gateway.endpoints.chat_endpoint import ChatEndpoint
from services.gateway.endpoints.endpoint import Endpoint
from services.gateway.endpoints.models import ModelRoutes
from services.gateway.http.exchange import JsonResponse
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission

# The page contains its own script and style and loads nothing else.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


# After so long, services that are not there are taken to be scaled to zero.
_PATIENCE_S = 10.0


class Routes:
    """The views of one gateway.

    Args:
        service: that answers.
        admission: of requests.
        metrics: of the gateway.
        endpoints: those that generate, beside chat, by their paths; see `surfaces`.
        others: routes beside those of this file.

    Attributes:
        endpoints: all that generate, by their paths.
    """

    def __init__(
        self,
        service: ChatService,
        admission: Admission,
        metrics: GatewayMetrics,
        endpoints: Mapping[str, Endpoint],
        others: Sequence[Route],
        other_gateways: Sequence[str] = (),
    ) -> None:
        self._service = service
        self._admission = admission
        self._was_ready = False
        self._patient_until = time.monotonic() + _PATIENCE_S
        self._models = ModelRoutes(service, other_gateways, int(time.time()))
        pages = Path(__file__).parents[1] / "static"
        self._page = (pages / "index.html").read_bytes()
        self._docs_page = (pages / "docs.html").read_bytes()
        chat = ChatEndpoint(service, admission, metrics)
        self.endpoints: dict[str, Endpoint] = {"/v1/chat/completions": chat, **endpoints}
        self._others = others

    def table(self) -> list[Route]:
        """Every route."""
        return [
            *[Route(path, found, methods=["POST"]) for path, found in self.endpoints.items()],
            *self._models.table(),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/", self.page, methods=["GET"]),
            *self._others,
        ]

    async def health(self, request: Request) -> Response:
        """Liveness: the process answers."""
        return JsonResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """The version of this package."""
        return JsonResponse({"version": package_version()})

    async def ready(self, request: Request) -> Response:
        """Readiness: requests get an answer here. So it waits for the services, but not for ever,
        and not again later on: without services a request gets a 503 that says when to retry, while
        clients of a gateway that is not ready find nothing to connect to.
        """
        if self._admission.draining:
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

    async def page(self, request: Request) -> Response:
        """The chat page."""
        return _page(self._page)

    async def docs(self, request: Request) -> Response:
        """A page that shows the OpenAPI document."""
        return _page(self._docs_page)


def _page(html: bytes) -> Response:
    headers = {
        "content-security-policy": _PAGE_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(html, media_type="text/html", headers=headers)


def package_version() -> str:
    """Of `triptych`."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
