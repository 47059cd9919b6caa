"""Keys and their tenants; quotas, exact over any minute."""

import hashlib
import json
import os
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.common.errors import InvalidRequest, Overloaded, RateLimited
from services.common.settings import SettingsError
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.tenants import Identity, Keyring, Limits, Tenant, bind_identity
from services.gateway.tenancy.usage import counting
from tests.unit.gateway.test_admission import slot_of


def entry(name: str, key: str, **more: object) -> dict[str, object]:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"id": f"{name}-key", "tenant": name, "sha256": digest, **more}


def write(path: Path, *keys: dict[str, object], **tenants: dict[str, object]) -> Path:
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"keys": keys, "tenants": tenants}))
    os.replace(new, path)
    return path


def limited(**limits: object) -> Tenant:
    return Tenant("t", Limits(**limits), shares_caches=False)


async def one(leases: Leases, tenant: Tenant) -> None:
    """A request that asks for nothing."""
    async with counting(leases, tenant):
        pass


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_without_keys_everybody_is_served_as_one_tenant():
    identity = Keyring().identify(b"")
    assert identity is not None and identity.tenant.name == ""
    assert identity.tenant.cache_salt("x") == b"x"


def test_keys_name_their_tenants(tmp_path: Path):
    path = write(
        tmp_path / "keys", entry("a", "one"), entry("a", "two", id="second"), entry("b", "three"),
        a={"weight": 2.0, "max_requests": 3},
    )  # fmt: skip
    keyring = Keyring(["fixed"], path)
    found = [keyring.identify(b"Bearer " + key) for key in (b"one", b"two", b"three", b"fixed")]
    assert [i and i.tenant.name for i in found[:3]] == ["a", "a", "b"]
    assert found[0] and found[0].tenant.limits.max_requests == 3
    assert found[3] and found[3].tenant.name.startswith("key-")
    for wrong in (b"", b"Bearer", b"Bearer four", b"Basic one", b"one"):
        assert keyring.identify(wrong) is None


def test_an_expired_key_opens_nothing(tmp_path: Path):
    path = write(
        tmp_path / "keys",
        entry("a", "old", expires="2020-01-01T00:00:00Z"),
        entry("b", "new", expires="2999-01-01T00:00:00Z"),
        entry("c", "last", expires="9999-12-31T23:59:59-05:00"),
    )
    keyring = Keyring((), path)
    assert keyring.identify(b"Bearer old") is None
    assert keyring.identify(b"Bearer new") is not None
    assert keyring.identify(b"Bearer last") is not None


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    path = write(tmp_path / "keys", entry("a", "one"))
    keyring = Keyring((), path)
    write(path, entry("a", "two"))
    clock.now += 2
    assert keyring.identify(b"Bearer one") is None and keyring.identify(b"Bearer two")
    path.write_text("{")
    clock.now += 2
    assert keyring.identify(b"Bearer two") is not None
    clock.now += 2
    assert keyring.identify(b"Bearer two") is not None
    assert len([r for r in caplog.records if "previous content stays in use" in r.message]) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"keys": []}', '{"keys": [{"id": "x"}]}', '{"keys": [], "more": 1}'],
)
def test_a_bad_file_is_refused_at_start(tmp_path: Path, content: str):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(SettingsError, match="GATEWAY_API_KEYS"):
        Keyring((), path)


@pytest.mark.parametrize("wrong", [{"tenant": "a\n"}, {"id": "a\n"}, {"sha256": "0" * 64 + "\n"}])
def test_a_line_break_is_in_no_name(tmp_path: Path, wrong: dict[str, str]):
    with pytest.raises(SettingsError, match="GATEWAY_API_KEYS"):
        Keyring((), write(tmp_path / "keys", entry("a", "one") | wrong))


def test_equal_keys_are_refused(tmp_path: Path):
    path = write(tmp_path / "keys", entry("a", "one"), entry("b", "one"))
    with pytest.raises(SettingsError, match="equal"):
        Keyring((), path)


def test_caches_are_apart_unless_they_are_shared():
    first, second = (Tenant(name, Limits(), shares_caches=False) for name in "ab")
    salts = {t.cache_salt(given) for t in (first, second) for given in ("", "x")}
    assert len(salts) == 4 and b"" not in salts
    shared = Tenant("a", Limits(), shares_caches=True)
    assert shared.cache_salt("") == b""
    ring = Keyring(["x", "y"])
    one, two = (ring.identify(b"Bearer " + key) for key in (b"x", b"y"))
    assert one.tenant.cache_salt("") != two.tenant.cache_salt("")
    assert Keyring(["x"]).identify(b"Bearer x").tenant.cache_salt("") == b""


async def test_tokens_per_minute_are_exact():
    """Whatever sizes arrive whenever: no 60 seconds have more than the limit, and a tenant that
    asks all the time gets at least 99 % of it.
    """
    clock, rng = Clock(), random.Random(3)
    leases, tenant = Leases(clock=clock), limited(tokens_per_minute=100_000)
    admitted: list[tuple[float, int]] = []
    for _ in range(60_000):
        clock.now += rng.expovariate(100.0)
        size = rng.randrange(100, 900)
        try:
            async with counting(leases, tenant) as usage:
                await usage.charge(size + 100, 1, 0)
                usage.correct(size + 50)
        except RateLimited as refused:
            assert refused.retry_after_s and 0 < refused.retry_after_s <= 60
        else:
            admitted.append((clock.now, size + 50))
    start = 0
    total = 0
    for at, size in admitted:
        total += size
        while admitted[start][0] <= at - 60:
            total -= admitted[start][1]
            start += 1
        assert total <= 100_000
    minutes = (admitted[-1][0] - admitted[0][0]) / 60
    assert sum(size for _, size in admitted) >= 0.99 * 100_000 * int(minutes)


async def test_a_refused_request_succeeds_after_its_retry_after():
    clock = Clock()
    leases, tenant = Leases(clock=clock), limited(requests_per_minute=2)
    for _ in range(2):
        async with counting(leases, tenant):
            clock.now += 7
    with pytest.raises(RateLimited) as refused:
        await one(leases, tenant)
    assert refused.value.http_status == 429
    clock.now += refused.value.retry_after_s or 0
    await one(leases, tenant)


async def test_limits_at_a_time():
    leases, tenant = Leases(), limited(max_requests=2, max_sequences=5)
    async with counting(leases, tenant) as first, counting(leases, tenant) as second:
        with pytest.raises(RateLimited, match="2 requests at a time"):
            await one(leases, tenant)
        await first.charge(5, 4, 0)
        with pytest.raises(RateLimited, match="5 sequences at a time"):
            await second.charge(3, 2, 0)
    async with counting(leases, tenant) as third:
        await third.charge(6, 5, 0)


async def test_a_tenant_without_tokens_is_refused_as_it_arrives():
    leases, tenant = Leases(), limited(tokens_per_minute=100)
    async with counting(leases, tenant) as usage:
        await one(leases, tenant)  # which takes none
        await usage.charge(100, 1, 0)
        with pytest.raises(RateLimited, match="100 tokens per minute"):
            await one(leases, tenant)


@pytest.mark.parametrize("charges", [(6,), (3, 3)])
async def test_more_sequences_than_a_tenant_may_ever_have_are_a_mistake(charges: tuple[int, ...]):
    """A 429 would have the client come back for ever."""
    leases, tenant = Leases(), limited(max_sequences=5)
    async with counting(leases, tenant) as usage:
        for count in charges[:-1]:
            await usage.charge(1, count, 0)
        with pytest.raises(InvalidRequest, match="5 sequences at a time, the request has 6"):
            await usage.charge(1, charges[-1], 0)
    async with counting(leases, tenant) as usage:  # nothing is left of it
        await usage.charge(1, 5, 0)


async def test_headers_say_what_is_left():
    clock = Clock()
    leases, tenant = Leases(clock=clock), limited(requests_per_minute=10, tokens_per_minute=1000)
    async with counting(leases, tenant) as usage:
        await usage.charge(400, 1, 0)
    clock.now += 20
    found = dict(leases.headers(tenant))
    assert found[b"x-ratelimit-remaining-requests"] == b"9"
    assert found[b"x-ratelimit-remaining-tokens"] == b"600"
    assert found[b"x-ratelimit-reset-tokens"] == b"40.000s"
    assert not leases.headers(Tenant("free", Limits(), shares_caches=False))


async def test_one_tenant_cannot_take_all_slots():
    admission = Admission(8)
    flood, other = (
        Identity(Tenant(name, Limits(), shares_caches=False)) for name in ("flood", "other")
    )
    bind_identity(flood)
    async with AsyncExitStack() as held:
        for _ in range(6):
            await held.enter_async_context(slot_of(admission))
        with pytest.raises(Overloaded):
            await held.enter_async_context(slot_of(admission))
        bind_identity(other)
        await held.enter_async_context(slot_of(admission))
        await held.enter_async_context(slot_of(admission))
        assert admission.num_running == 8
