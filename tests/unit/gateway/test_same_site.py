"""Which callers a gateway on loopback answers."""

import httpx
import pytest
from starlette.responses import PlainTextResponse

from services.gateway.http.same_site import SameSite, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("a.localhost", True), ("127.0.0.1", True), ("127.9.9.9", True),
        ("[::1]", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.1", False),
        ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def status(host: str, origin: str | None = None, allowed: tuple[str, ...] = ()) -> int:
    app = SameSite(PlainTextResponse("x"), allowed)
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return (await client.post("http://x/", headers=headers)).status_code


@pytest.mark.parametrize(
    ("host", "origin", "allowed", "expected"),
    [
        ("localhost:8000", None, (), 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", (), 200),
        ("[::1]:8000", None, (), 200),
        ("evil.example:8000", None, (), 403),  # DNS rebinding
        ("evil.example:8000", "http://evil.example:8000", (), 403),
        ("localhost:8000", "https://evil.example", (), 403),
        ("localhost:8000", "null", (), 403),  # a page in a sandboxed frame
        ("localhost:8000", "http://localhost:3000", (), 403),
        ("localhost:8000", "http://localhost:3000", ("http://localhost:3000",), 200),
        ("localhost:8000", "https://evil.example", ("*",), 200),
    ],
)
async def test_foreign_hosts_and_sites_are_refused(host, origin, allowed, expected) -> None:
    assert await status(host, origin, allowed) == expected
