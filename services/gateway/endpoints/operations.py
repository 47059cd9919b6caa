"""The routes for operators: health, readiness, version, metrics, load, and a reset of the decoders'
prefix caches.
"""

import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import Unavailable
from services.common.metrics_registry import exported, package_version
from services.gateway.endpoints.openapi import openapi_document
from services.gateway.http.exchange import JsonResponse
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.admission import Admission


class Operations:
    """The handlers of the routes for operators.

    Args:
        service: service that answers chat requests.
        admission: admission control, which knows the number of running requests.
        metrics: metrics of the gateway.
        absent_s: seconds after which services that do not answer are assumed to be scaled to zero.
    """

    def __init__(
        self,
        service: ChatService,
        admission: Admission,
        metrics: GatewayMetrics,
        absent_s: float,
    ) -> None:
        self._service = service
        self._admission = admission
        self._metrics = metrics
        self._was_ready = False
        self._patient_until = time.monotonic() + absent_s

    async def health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": package_version()})

    async def openapi(self, request: Request) -> Response:
        """Returns the OpenAPI document."""
        return JsonResponse(openapi_document(package_version()))

    async def ready(self, request: Request) -> Response:
        """Returns 200 once the gateway answers requests, and 503 before.

        At its start, the gateway waits some seconds for the other services. If they disappear
        later, it stays ready: clients then get a 503 that says when to try again, while they could
        not even connect to a gateway that is not ready.
        """
        if self._admission.draining:
            return JsonResponse({"status": "draining"}, 503)
        is_ready = self._service.ready()
        if is_ready or time.monotonic() > self._patient_until:
            self._was_ready = True
        needs = "a decoder" if self._service.images is None else "an encoder and a decoder"
        status = "ready" if is_ready else f"waiting for {needs}"
        answer: dict[str, object] = {"status": status}
        # Healthy pods of another model. The log has their addresses; a caller may have no key.
        if misfits := self._service.encoders.misfits() | self._service.decoders.misfits():
            answer["left_out"] = len(misfits)
        return JsonResponse(answer, 200 if self._was_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics that the metrics port serves, too."""
        return Response(
            generate_latest(exported(self._metrics.registry)), media_type=CONTENT_TYPE_LATEST
        )

    async def load(self, request: Request) -> Response:
        """Returns the number of requests that the gateway serves now."""
        return JsonResponse({"server_load": self._admission.num_running})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empties the prefix caches of all decoders, for measurements."""
        count = await self._service.decoders.reset_prefix_caches()
        if not count:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return JsonResponse({"decoders": count})
