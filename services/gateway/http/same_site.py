"""A gateway on loopback answers this machine's programs and pages, not the web pages it visits.

A page of another site can send a POST to loopback without asking (a "simple" request), and with a
name of its own that resolves to 127.0.0.1 even read the answers (DNS rebinding). So a foreign
`Host` is refused, and so is a request that a browser sends for another site, unless CORS allows it.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.forms.error_answers import error_body
from services.gateway.http.exchange import JsonResponse


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class SameSite:
    """ASGI middleware.

    Args:
        app: that is protected.
        allowed_origins: of web pages that may call, as for CORS; `*`: any.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)
        self._last_host = ""  # that was served: most requests have the same

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(dict(scope["headers"])) if scope["type"] == "http" else ""
        if not refused:
            await self._app(scope, receive, send)
            return
        body = error_body(refused, kind="permission_error", param=None, code="forbidden")
        await JsonResponse(body, 403)(scope, receive, send)

    def _refused(self, headers: dict[bytes, bytes]) -> str:
        """Why a request is not answered, or ""."""
        host = headers.get(b"host", b"").decode("latin-1")
        if host != self._last_host:
            name = urlsplit(f"//{host}").hostname or ""
            if host and not is_loopback(name):
                return f"the host {name[:100]!r} is not served on loopback"
            self._last_host = host
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or origin in self._allowed or "*" in self._allowed:
            return ""
        if urlsplit(origin).netloc == host:
            return ""
        return (
            f"pages of {origin[:100]!r} may not call: GATEWAY_CORS_ALLOW_ORIGINS does not name it"
        )
