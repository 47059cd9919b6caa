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
_PAGES = {"/": "index.html", "/docs": "docs.html"}
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


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


def page_routes() -> list[Route]:
    """The pages, and the files that they load."""
    files: dict[str, _StaticFile] = {}
    for path in (Path(__file__).parents[1] / "static").iterdir():
        content = path.read_bytes()
        etag = f'"{blake3(content).hexdigest(8)}"'
        files[path.name] = _StaticFile(content, _MEDIA_TYPES[path.suffix], etag)

    async def file(request: Request) -> Response:
        found = files.get(_PAGES.get(request.scope["path"]) or request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return found.response(request)

    return [Route(path, file, methods=["GET"]) for path in (*_PAGES, "/static/{name}")]
