"""What a request takes of its tenant's limits: a video's file and its frames count once."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from services.common.errors import RateLimited
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.quota import PIXELS, TOKENS
from services.gateway.tenancy.tenants import Limits, Tenant
from services.gateway.tenancy.usage import Usage, counting


class Requests:
    """Requests of a tenant with a limit of pixels, one after another."""

    def __init__(self, limit: int | None) -> None:
        self.now_s = 1000.0
        self.leases = Leases(clock=lambda: self.now_s)
        self.tenant = Tenant("t", Limits(pixels_per_minute=limit), shares_caches=False)

    @property
    def used(self) -> int:
        return self.leases.quota(self.tenant).used()[PIXELS]

    async def send(self, files: tuple[int, ...], pixels: int | None) -> None:
        """A request with files of so many bytes; None for `pixels`: it ends before its prompt."""
        async with counting(self.leases, self.tenant) as usage:
            for file in files:
                await usage.charge_file(file)
            if pixels is not None:
                await usage.charge(1, 1, pixels)


@pytest.fixture
async def usage() -> AsyncIterator[tuple[Requests, Usage]]:
    requests = Requests(100)
    async with counting(requests.leases, requests.tenant) as usage:
        yield requests, usage


@pytest.mark.parametrize(
    ("files", "pixels", "used"),
    [
        ((), 30, 30),
        ((10,), 30, 30),  # the frames' pixels cover the file
        ((30,), 10, 30),  # the file has more bytes than its frames have pixels
        ((10, 20), 30, 30),
        ((10, 20), 25, 30),
        ((40,), None, 40),  # a file that is refused
        ((40, 20), None, 60),
        ((40,), 0, 40),
    ],
)
async def test_a_file_counts_its_bytes_or_its_pixels(
    files: tuple[int, ...], pixels: int | None, used: int
) -> None:
    requests = Requests(100)
    await requests.send(files, pixels)
    assert requests.used == used


async def test_files_count_until_their_minute_is_over() -> None:
    requests = Requests(100)
    for _ in range(2):
        await requests.send((50,), None)
    with pytest.raises(RateLimited, match="pixels per minute") as refusal:
        await requests.send((1,), None)
    assert refusal.value.retry_after_s == pytest.approx(60.0)
    requests.now_s += 60.0
    await requests.send((1,), None)
    assert requests.used == 1


async def test_a_prompt_that_is_refused_gives_the_bytes_back() -> None:
    """Else a client that comes back in time is refused again, for the bytes of its last try."""
    requests = Requests(100)
    await requests.send((), 40)
    requests.now_s += 30.0
    with pytest.raises(RateLimited) as refusal:
        await requests.send((50,), 80)
    assert requests.used == 40 and refusal.value.retry_after_s == pytest.approx(30.0)
    requests.now_s += 30.0
    await requests.send((50,), 80)
    assert requests.used == 80


@pytest.mark.parametrize(("files", "pixels"), [((50,), 500), ((500,), 50), ((80, 80), 500)])
async def test_a_request_larger_than_the_limit_fits_into_an_empty_window(
    files: tuple[int, ...], pixels: int
) -> None:
    requests = Requests(100)
    await requests.send(files, pixels)
    assert requests.used == max(sum(files), pixels)
    with pytest.raises(RateLimited):
        await requests.send((), 1)


async def test_each_prompt_of_a_request_covers_the_files_before_it(
    usage: tuple[Requests, Usage],
) -> None:
    requests, used = usage
    await used.charge_file(20)
    await used.charge(1, 1, 30)
    await used.charge(1, 1, 30)
    await used.charge_file(25)
    await used.charge(1, 1, 10)
    assert requests.used == 30 + 30 + 25


async def test_without_a_limit_nothing_is_counted() -> None:
    requests = Requests(None)
    await requests.send((1 << 30,), 1 << 30)
    assert requests.used == 0


class Lines(AsyncExitStack):
    """Lines of batches and requests of one tenant that run at the same time.

    Args:
        gateways: number of gateways that divide the limits, of which this is one.
        limits: limits of the tenant.
    """

    def __init__(self, gateways: int = 1, **limits: Any) -> None:
        super().__init__()
        self.leases = Leases(gateways=gateways)
        self._request = Tenant("t", Limits(**limits), shares_caches=False)
        self.line_tenant = replace(self._request, is_background=True)

    @property
    def used_tokens(self) -> int:
        return self.leases.quota(self._request).used()[TOKENS]

    async def line(self) -> Usage:
        return await self.enter_async_context(counting(self.leases, self.line_tenant))

    async def request(self) -> Usage:
        return await self.enter_async_context(counting(self.leases, self._request))


@pytest.mark.parametrize(("gateways", "num_taken"), [(1, 12), (2, 6)])
async def test_lines_that_load_at_the_same_time_take_half_of_a_limit(
    gateways: int, num_taken: int
) -> None:
    """All of them have begun before the first one is charged."""
    async with Lines(gateways, tokens_per_minute=100_000) as lines:
        begun, taken = [await lines.line() for _ in range(30)], 0
        for line in begun:
            try:
                await line.charge(4000, 1, 0)
            except RateLimited as error:
                assert "half" in str(error)
            else:
                taken += 1
        assert taken == num_taken
        await (await lines.request()).charge(50_000 // gateways, 1, 0)


@pytest.mark.parametrize("limit", ["requests_per_minute", "max_requests"])
async def test_lines_are_at_most_half_of_a_tenants_requests(limit: str) -> None:
    async with Lines(**{limit: 10}) as lines:
        for _ in range(5):
            assert lines.leases.has_room_for_line(lines.line_tenant)
            await lines.line()
        assert not lines.leases.has_room_for_line(lines.line_tenant)
        with pytest.raises(RateLimited):
            await lines.line()
        for _ in range(5):
            await lines.request()


async def test_a_line_larger_than_the_half_runs_alone() -> None:
    async with Lines(tokens_per_minute=10_000) as lines:
        large, second = await lines.line(), await lines.line()
        await large.charge(8000, 4, 0)
        for tokens in (100, 6000):
            with pytest.raises(RateLimited):
                await second.charge(tokens, 1, 0)
        large.correct(40)
        await second.charge(6000, 1, 0)
        assert lines.used_tokens == 6040


async def test_a_videos_file_counts_toward_the_half() -> None:
    async with Lines(pixels_per_minute=100) as lines:
        line, other = await lines.line(), await lines.line()
        await line.charge_file(40)
        with pytest.raises(RateLimited):
            await other.charge_file(20)
        await line.charge(1, 1, 50)
