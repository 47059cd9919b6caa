"""Leases of all gateways in a Redis hash, changed by a script in a single round trip.

The hash has a field `<tenant>:<gateway>` for each lease, with an amount of each kind of
`quota.KINDS`, and a field `@` with the time at which the hash was created and the time at which
each gateway reported last. A gateway reports its whole usage each time, so a report may be lost or
arrive twice. The amounts of a window count for a window after the gateway's last report, because
the requests that caused them do; the amounts at a time count for `Times.alive` after the report.

All leases are in one key, so they exist or are lost as a whole: a Redis that evicts or loses
the key starts from nothing, and the script's reply gives the age of the hash.

A gateway is *refusing* if it refused a request of the tenant since its last report. While any other
gateway is refusing, a gateway that holds its fair share or more gets no more, so that busy gateways
converge to equal shares. An equal share is also what each gateway falls back to without Redis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.redis_script import RedisScript
from services.gateway.tenancy.lease_script import LEASE_SCRIPT
from services.gateway.tenancy.quota import KINDS

KEY = "triptych:limits"
_NUM_KINDS = len(KINDS)
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """Usage of one tenant on a gateway, and the leases that the gateway wants.

    Attributes:
        tenant: name of the tenant.
        limits: limit of each kind. -1 for a kind without a limit.
        held: amount of each kind that this gateway keeps, even if others hold the rest.
        wanted: amount of each kind that this gateway would like to hold.
        has_refused: true if a request was refused since the last report.
    """

    tenant: str
    limits: Sequence[int]
    held: Sequence[int]
    wanted: Sequence[int]
    has_refused: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """Redis's reply to reports.

    Attributes:
        gateways: number of gateways that reported in the last seconds, this gateway included.
        age_s: seconds since the first lease was written.
        rows: amounts of each report, in the same order: amounts that this gateway may use, and the
            amounts that all other gateways hold. A gateway that may use less than it holds has to
            refuse requests.
        held_by_others: amounts that all other gateways hold, for each tenant. None if they were not
            asked for.
    """

    gateways: int
    age_s: float
    rows: list[tuple[list[int], list[int]]]
    held_by_others: dict[str, list[int]] | None


class LeaseStore:
    """Access of one gateway to the hash of leases.

    Args:
        url: URL of Redis: `redis://`, `rediss://` or `unix://`.
        gateway: name of this gateway, which no other gateway has.
        window_s: length of the windows, in seconds.
        alive_s: seconds without a report after which a gateway counts as dead, `Times.alive`.
        password_file: file with the password of the URL's user, read at each connection. None if
            the URL contains the password.
    """

    def __init__(
        self,
        url: str,
        gateway: str,
        window_s: float,
        alive_s: float,
        password_file: Path | None = None,
    ) -> None:
        self._gateway = gateway
        self._times = str(round(window_s * 1e3)), str(round(alive_s * 1e3))
        # The caller bounds the time that it waits for a reply.
        self._redis = RedisScript(
            url, password_file, LEASE_SCRIPT, connect_timeout_s=_CONNECT_TIMEOUT_S, timeout_s=None
        )

    async def report(
        self, reports: Sequence[LeaseReport], *, all_tenants: bool = False
    ) -> LeaseReply:
        """Reports the usage of this gateway, and obtains its leases.

        Args:
            reports: reports about each tenant whose usage has changed.
            all_tenants: true if the reply is to have the amounts of all tenants at other gateways.

        Raises:
            RedisError: Redis refused the command.
            OSError: the connection failed.
        """
        arguments = [self._gateway, "1" if all_tenants else "0", *self._times]
        for row in reports:
            numbers = (*row.limits, *row.held, *row.wanted, int(row.has_refused))
            arguments += [row.tenant, " ".join(map(str, numbers))]
        reply: list[Any] = await self._redis.run(KEY, *arguments)
        starts = range(2, 2 + 2 * _NUM_KINDS * len(reports), 2 * _NUM_KINDS)
        rows = [
            (reply[at : at + _NUM_KINDS], reply[at + _NUM_KINDS : at + 2 * _NUM_KINDS])
            for at in starts
        ]
        held_by_others = self._held_by_others(reply[-1]) if all_tenants else None
        return LeaseReply(reply[0], reply[1] / 1e3, rows, held_by_others)

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.close()

    def _held_by_others(self, pairs: Sequence[bytes]) -> dict[str, list[int]]:
        """Returns the sums over the other gateways, for each tenant.

        Args:
            pairs: fields and values of the hash in turn.
        """
        sums: dict[str, list[int]] = {}
        for field, value in zip(pairs[::2], pairs[1::2], strict=True):
            tenant, _, gateway = field.decode().partition(":")
            if gateway and gateway != self._gateway:
                found = sums.setdefault(tenant, [0] * _NUM_KINDS)
                for kind, number in enumerate(value.split()[:_NUM_KINDS]):
                    found[kind] += int(number)
        return sums
