"""The chat page and the page of the OpenAPI document, with the files that they load."""

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Pages load files of this server and nothing else; no script or style stands in a page itself.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


class Pages:
    """The views."""

    def __init__(self) -> None:
        self._files = _static_files(Path(__file__).parents[1] / "static")

    def table(self) -> list[Route]:
        return [
            Route("/docs", self.docs, methods=["GET"]),
            Route("/", self.page, methods=["GET"]),
            Route("/static/{name}", self.static, methods=["GET"]),
        ]

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
