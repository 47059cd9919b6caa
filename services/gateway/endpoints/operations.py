"""What those who run the gateway ask it beside their requests: GET /metrics and /load, and
POST /reset_prefix_cache.
"""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.errors import Unavailable
from services.gateway.chat import ChatService
from services.gateway.http.exchange import JsonResponse
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.admission import Admission


class Operations:
    """The views."""

    def __init__(self, service: ChatService, admission: Admission, metrics: GatewayMetrics) -> None:
        self._service = service
        self._admission = admission
        self._metrics = metrics

    def table(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]

    async def metrics(self, request: Request) -> Response:
        """This gateway's metrics, as its metrics port has them."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def load(self, request: Request) -> Response:
        """How many requests this gateway serves now."""
        return JsonResponse({"server_load": self._admission.num_running})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empties the prefix caches of all decoders, for measurements."""
        count = await self._service.decoders.reset_prefix_caches()
        if not count:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return JsonResponse({"decoders": count})
