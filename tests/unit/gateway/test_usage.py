"""What a request takes of its tenant's limits: a video's file and its frames count once."""

from collections.abc import AsyncIterator

import pytest

from services.common.errors import RateLimited
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.quota import PIXELS
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
