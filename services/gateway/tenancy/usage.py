"""What one request takes of its tenant's limits, from its arrival to its end.

A request that would go over a limit is a 429 that says when to come back. It counts from its
arrival; tokens are counted when the prompt is known: the prompt's, and as many as the completion
may have. When the request ends, those that it did not use are given back.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.quota import PIXELS, RUNNING, SEQUENCES, Amounts, Entry, Quota
from services.gateway.tenancy.tenants import Tenant

# What has to fit when a request arrives, and what it takes: one that has no token is not read.
_ROOM, _ONE = (1, 1, 0, 1, 0), (1, 0, 0, 1, 0)


@dataclass(slots=True)
class Usage:
    """What one request has taken of its tenant's quota. Valid inside the `with` that made it."""

    quota: Quota
    leases: Leases
    num_requests: int = 0
    num_sequences: int = 0
    _tokens: list[Entry] = field(default_factory=list[Entry])  # of each prompt, if they are limited
    _file_bytes: int = 0  # of videos whose prompt is not charged yet
    _files: Entry | None = None  # of these bytes, if pixels are limited

    async def charge_file(self, num_bytes: int) -> None:
        """Counts the bytes of a video's file as pixels before an encoder reads the file, so that a
        file that is refused counts, too. The prompt's pixels then count in place of the bytes, if
        they are more. Waits as `charge`.

        Raises:
            RateLimited: the bytes are too many for now.
        """
        amounts = (0, 0, self._uncounted_bytes() + num_bytes, 0, 0)
        await self.leases.charge(self.quota, self._take_files, amounts)

    def _take_files(self, amounts: Amounts) -> None:
        self._file_bytes = amounts[PIXELS]
        self._files = self.quota.take(amounts, PIXELS)

    def _uncounted_bytes(self) -> int:
        """The bytes of files, which are no longer counted: they are to be counted at once with what
        comes to them. A request that is larger than the limit fits into an empty window only so.
        """
        if self._files is not None:
            self.quota.pixels.correct(self._files, 0)
        num_bytes, self._file_bytes, self._files = self._file_bytes, 0, None
        return num_bytes

    async def charge(self, tokens: int, num_choices: int, num_pixels: int) -> None:
        """Counts a prompt's sequences, the pixels of its images, its tokens and those of the
        completions that it may have; before anything is encoded. Waits for other gateways' leases,
        `Times.wait` at most.

        Raises:
            RateLimited: they are too many for now.
            InvalidRequest: the tenant may never have so many sequences.
        """
        most, wanted = self.quota.limits[SEQUENCES], self.num_sequences + num_choices
        if most is not None and wanted > most:
            message = f"the tenant may have {most} sequences at a time, the request has {wanted}"
            raise InvalidRequest(message, param="n")
        num_pixels = max(num_pixels, self._uncounted_bytes())
        amounts = (0, tokens, num_pixels, 0, num_choices)
        await self.leases.charge(self.quota, self.take, amounts)

    def take(self, amounts: Amounts) -> None:
        """Counts amounts that fit."""
        if (entry := self.quota.take(amounts)) is not None:
            self._tokens.append(entry)
        self.num_requests += amounts[RUNNING]
        self.num_sequences += amounts[SEQUENCES]

    def correct(self, used_tokens: Sequence[int]) -> None:
        """Gives back what was not used: prompt and completion tokens, charge by charge."""
        for index, entry in enumerate(self._tokens):
            used = used_tokens[index] if index < len(used_tokens) else 0
            self.quota.tokens.correct(entry, used)


@asynccontextmanager
async def counting(leases: Leases, tenant: Tenant) -> AsyncGenerator[Usage]:
    """Counts one request for the duration of a `with`; waits as `Usage.charge`.

    Raises:
        RateLimited: the tenant has as many as it may have, or has used all its tokens.
    """
    quota = leases.quota(tenant)
    usage = Usage(quota, leases)
    try:
        await leases.charge(quota, lambda _: usage.take(_ONE), _ROOM)
        yield usage
    finally:
        quota.meters[RUNNING].add(-usage.num_requests)
        quota.meters[SEQUENCES].add(-usage.num_sequences)
