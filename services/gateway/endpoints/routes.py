"""Health and the pages. `surfaces` has the other routes."""

import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from blake3 import blake3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.chat import ChatService
from services.gateway.http.exchange import JsonResponse
from services.gateway.tenancy.admission import Admission

# Pages load files of this server and nothing else; no script or style stands in a page itself.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


# After so long, services that are not there are taken to be scaled to zero.
_PATIENCE_S = 10.0


class Routes:
    """Health and the pages of one gateway."""

    def __init__(self, service: ChatService, admission: Admission) -> None:
        self._service = service
        self._admission = admission
        self._was_ready = False
        self._patient_until = time.monotonic() + _PATIENCE_S
        self._files = _static_files(Path(__file__).parents[1] / "static")

    def table(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/", self.page, methods=["GET"]),
            Route("/static/{name}", self.static, methods=["GET"]),
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
        return self._files["index.html"].response(request)

    async def docs(self, request: Request) -> Response:
        """A page that shows the OpenAPI document."""
        return self._files["docs.html"].response(request)

    async def static(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.response(request)


@dataclass(frozen=True, slots=True)
class _StaticFile:
    """A file of the pages, in memory; a browser that has it already gets 304."""

    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {
            "content-security-policy": _PAGE_POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
            "etag": self.etag,
        }
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _static_files(folder: Path) -> dict[str, _StaticFile]:
    found: dict[str, _StaticFile] = {}
    for path in folder.iterdir():
        content = path.read_bytes()
        etag = f'"{blake3(content).hexdigest(8)}"'
        found[path.name] = _StaticFile(content, _MEDIA_TYPES[path.suffix], etag)
    return found


def package_version() -> str:
    """Of `triptych`."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
