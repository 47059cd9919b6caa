"""What one request takes of its tenant's limits, from its arrival to its end.

A request that would go over a limit is a 429 that says when to come back. Tokens are counted when
the prompt is known: the prompt's, and as many as the completion may have. When the request ends,
those that it did not use are given back.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.quota import RUNNING, SEQUENCES, Amounts, Entry, Quota
from services.gateway.tenancy.tenants import Tenant


@dataclass(slots=True)
class Usage:
    """What one request has taken of its tenant's quota. Valid inside the `with` that made it."""

    quota: Quota
    leases: Leases
    num_sequences: int = 0
    # Of each charge; None: tokens have no limit.
    _tokens: list[Entry | None] = field(default_factory=list[Entry | None])

    async def charge(self, tokens: int = 0, num_choices: int = 0, num_pixels: int = 0) -> None:
        """Counts the request, its sequences, the pixels of its images, and the tokens of its prompt
        and of the completions that it may have; before anything is encoded. Called again for each
        further prompt. Waits for other gateways' leases, `leases.WAIT_S` at most.

        Raises:
            RateLimited: they are too many for now.
            InvalidRequest: the tenant may never have so many sequences.
        """
        most, wanted = self.quota.limits[SEQUENCES], self.num_sequences + num_choices
        if most is not None and wanted > most:
            message = f"the tenant may have {most} sequences at a time, the request has {wanted}"
            raise InvalidRequest(message, param="n")
        own = 0 if self._tokens else 1
        amounts = (own, tokens, num_pixels, own, num_choices)
        await self.leases.charge(self.quota, self._take, amounts)

    def _take(self, amounts: Amounts) -> None:
        """Counts amounts that fit."""
        if not self._tokens:
            self.quota.early -= 1
        self._tokens.append(self.quota.take(amounts))
        self.num_sequences += amounts[SEQUENCES]

    def correct(self, used_tokens: Sequence[int]) -> None:
        """Gives back what was not used: prompt and completion tokens, charge by charge."""
        for index, entry in enumerate(self._tokens):
            if entry is not None:
                used = used_tokens[index] if index < len(used_tokens) else 0
                self.quota.tokens.correct(entry, used)

    def end(self) -> None:
        """Gives back what counts at a time. A request that failed before its charge counts, too."""
        meters = self.quota.meters
        if self._tokens:
            meters[RUNNING].add(-1)
            meters[SEQUENCES].add(-self.num_sequences)
        else:
            self.quota.early -= 1
            self.leases.report(self.quota, (1, 0, 0, 0, 0))


@contextmanager
def counting(leases: Leases, tenant: Tenant) -> Generator[Usage]:
    """Counts one request for the duration of a `with`.

    Raises:
        RateLimited: the tenant has as many as it may have.
    """
    quota = leases.quota(tenant)
    leases.check_early(quota)
    quota.early += 1
    usage = Usage(quota, leases)
    try:
        yield usage
    finally:
        usage.end()
