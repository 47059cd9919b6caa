"""The chat page and the page of the OpenAPI document, with the files that they load."""

from pathlib import Path

from blake3 import blake3
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Pages load files of this server and nothing else; no script or style stands in a page itself.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; media-src data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PAGES = {"/": "index.html", "/docs": "docs.html"}
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


def page_routes() -> list[Route]:
    """Returns the routes of the pages and of the files that the pages load. The files are served
    from memory. A browser that has the present version of a file gets a 304.
    """
    files: dict[str, tuple[bytes, dict[str, str]]] = {}
    for path in (Path(__file__).parents[1] / "static").iterdir():
        content = path.read_bytes()
        files[path.name] = content, {**_HEADERS, "etag": f'"{blake3(content).hexdigest(8)}"'}

    async def file(request: Request) -> Response:
        name: str = _PAGES.get(request.scope["path"]) or request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        content, headers = files[name]
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        media_type = _MEDIA_TYPES[Path(name).suffix]
        return Response(content, media_type=media_type, headers=headers)

    return [Route(path, file, methods=["GET"]) for path in (*_PAGES, "/static/{name}")]
