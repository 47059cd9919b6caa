"""Usage of a tenant's limits by a request, from arrival to end.

A request that would exceed a limit is refused with 429 and the time after which it may be sent
again. The request itself is counted at its arrival. Tokens are counted once all prompts are known:
the prompts' tokens and as many as the completions may have. When the request ends, the tokens that
it did not use are given back. A line of a batch may only use half of each limit.
"""

from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.quota import (
    PIXELS,
    RUNNING,
    SEQUENCES,
    TOKENS,
    Amounts,
    Charge,
    Quota,
)
from services.gateway.tenancy.tenants import Tenant

# Amounts that have to fit when a request arrives, and amounts that it then takes. A request whose
# tenant has no token or sequence left is refused before its body is parsed.
_ARRIVAL_REQUIRED, _ARRIVAL = (1, 1, 0, 1, 0), (1, 0, 0, 1, 0)


@dataclass(slots=True)
class Usage:
    """Amounts that a request has taken of the tenant's quota.

    Valid inside an `async with`, which counts the request at its beginning. See `counting`.

    Attributes:
        quota: quota of the request's tenant.
        leases: leases of this gateway, which admit charges.
        is_background: true for a line of a batch, which may only use half of each limit.
    """

    quota: Quota
    leases: Leases
    is_background: bool = False
    _charges: list[Charge] = field(default_factory=list[Charge])
    # The charge for bytes of videos whose prompt is not charged yet.
    _files: Charge | None = None

    async def __aenter__(self) -> "Usage":
        try:
            await self._charge(_ARRIVAL, _ARRIVAL_REQUIRED)
        except BaseException:
            self.end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    async def charge_file(self, num_bytes: int) -> None:
        """Counts the bytes of a video's file as pixels, before an encoder reads the file.

        So a file that the encoder refuses counts, too. If the prompt's pixels are more than the
        bytes, `charge` counts them in place of the bytes. Waits as `charge` does.

        Raises:
            RateLimited: the tenant has too few pixels left in this minute.
        """
        amounts = (0, 0, self._release_files() + num_bytes, 0, 0)
        self._files = self._new_charge(amounts, amounts, entry_of=PIXELS)
        await self.leases.charge(self._files)

    def _release_files(self) -> int:
        """Returns the bytes of files that were counted, and gives them back.

        The bytes have to be counted anew together with the amount that follows: a request that is
        larger than the limit fits into an empty window, and only if it is counted at once.
        """
        files, self._files = self._files, None
        if files is None or not files.is_taken:
            return 0
        if files.entry is not None:
            self.quota.pixels.correct(files.entry, 0)
        return files.amounts[PIXELS]

    async def charge(self, tokens: int, num_choices: int, num_pixels: int) -> None:
        """Counts all prompts of the request, before any image is encoded.

        A request calls it once: an amount that is larger than the limit fits into an empty window,
        and after a part of the amount was counted, the window is no longer empty. Waits for a lease
        if the amounts do not fit into this gateway's, for `Times.wait` at most.

        Args:
            tokens: number of tokens of the prompts and of all completions that they may have.
            num_choices: number of sequences.
            num_pixels: number of pixels of the images and frames.

        Raises:
            RateLimited: the amounts do not fit at the moment.
            InvalidRequest: the request has more sequences than the tenant may ever have.
        """
        most, wanted = self.quota.limits[SEQUENCES], self._taken(SEQUENCES) + num_choices
        if most is not None and wanted > most:
            message = f"the tenant may have {most} sequences at a time, the request has {wanted}"
            raise InvalidRequest(message, param="n")
        num_pixels = max(num_pixels, self._release_files())
        amounts = (0, tokens, num_pixels, 0, num_choices)
        await self._charge(amounts, amounts)

    def correct(self, used_tokens: int) -> None:
        """Gives back the tokens of the charge that were not used.

        Args:
            used_tokens: number of prompt and completion tokens of all prompts of the request.
        """
        for charge in self._charges:
            if charge.entry is not None:
                self.quota.tokens.correct(charge.entry, used_tokens)

    def end(self) -> None:
        """Gives back the request and its sequences, which no longer run."""
        for kind in (RUNNING, SEQUENCES):
            self.quota.meters[kind].add(-self._taken(kind))

    async def _charge(self, amounts: Amounts, required: Amounts) -> None:
        charge = self._new_charge(amounts, required)
        self._charges.append(charge)
        await self.leases.charge(charge)

    def _new_charge(self, amounts: Amounts, required: Amounts, entry_of: int = TOKENS) -> Charge:
        return Charge(self.quota, amounts, required, entry_of, self.is_background)

    def _taken(self, kind: int) -> int:
        return sum(charge.amounts[kind] for charge in self._charges if charge.is_taken)


def counting(leases: Leases, tenant: Tenant) -> Usage:
    """Returns a block for an `async with`, which counts one request for its duration. Its beginning
    waits as `Usage.charge` does.

    Raises:
        RateLimited: the tenant has as many requests as it may have, or has used all its tokens. It
            is raised when the block begins.
    """
    return Usage(leases.quota(tenant), leases, tenant.is_background)
