"""Which callers a gateway on loopback answers."""

import pytest

from services.common.errors import Forbidden
from services.gateway.http.same_site import SameSite, is_loopback, served_hosts


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


def is_answered(host: str, origin: str | None = None, allowed: tuple[str, ...] = ()) -> bool:
    hosts = served_hosts("127.0.0.1", (), needs_key=False)
    assert hosts is not None
    headers = {b"host": host.encode()} | ({} if origin is None else {b"origin": origin.encode()})
    try:
        SameSite(hosts, allowed).check(headers)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "origin", "allowed", "expected"),
    [
        ("localhost:8000", None, (), True),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", (), True),
        ("[::1]:8000", None, (), True),
        ("evil.example:8000", None, (), False),  # DNS rebinding
        ("evil.example:8000", "http://evil.example:8000", (), False),
        ("localhost:8000", "https://evil.example", (), False),
        ("localhost:8000", "null", (), False),  # a page in a sandboxed frame
        ("localhost:8000", "http://localhost:3000", (), False),
        ("localhost:8000", "http://localhost:3000", ("http://localhost:3000",), True),
        ("localhost:8000", "https://evil.example", ("*",), True),
        ("[", None, (), False),
        ("[::1", None, (), False),
        (":8000", None, (), False),
        ("localhost:8000", "http://[", (), False),
    ],
)
def test_foreign_hosts_and_sites_are_refused(host, origin, allowed, expected) -> None:
    assert is_answered(host, origin, allowed) is expected


@pytest.mark.parametrize(
    ("listens_on", "allowed", "needs_key", "served", "refused"),
    [
        ("127.0.0.1", (), False, ["localhost", "127.0.0.1"], ["evil.example", "10.0.0.1", "host"]),
        ("127.0.0.1", ("api.example",), True, ["localhost", "api.example"], ["b.example"]),
        # Without keys, names that a stranger can register are refused.
        ("0.0.0.0", (), False,
         ["10.0.0.1", "::1", "gateway", "gateway.triptych.svc.cluster.local", "box.lan"],
         ["evil.example", "10.0.0.1.evil.example"]),
        ("0.0.0.0", ("api.example", ".corp.example"), False,
         ["10.0.0.1", "api.example", "a.corp.example"],
         ["evil.example", "gateway", "corp.example.evil.example", "x.api.example"]),
    ],
)  # fmt: skip
def test_hosts_that_are_answered(listens_on, allowed, needs_key, served, refused) -> None:
    hosts = served_hosts(listens_on, allowed, needs_key=needs_key)
    assert hosts is not None
    assert all(host in hosts for host in served)
    assert not any(host in hosts for host in refused)


def test_with_keys_any_host_is_answered_off_loopback() -> None:
    assert served_hosts("0.0.0.0", (), needs_key=True) is None
