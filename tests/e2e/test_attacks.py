"""No request takes a service down or makes others wait: each row of `tests.attacks` against real
processes with the memory of their manifests.

`python -m benchmarks.attacks` measures the same more strictly; here the machine may be busy, so
that latencies only show that nobody waits for an attack to end.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.rows import ROWS, Row
from tests.attacks.stack import Stack, Times
from tests.e2e.cluster import wait_until
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]
_SECONDS, _QUIET_S, _ROUNDS = 0.5, 0.3, 3
_FLOOR_S = 0.5
_MOST = 0.6  # of the memory


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(Path(tmp_path_factory.mktemp("attacks"))) as stack:
        stack.quiet(1.0)  # what runs once is not counted
        yield stack


# `make test` bounds bytes, pixels and silence in tests/contract and tests/unit/encoder.
_ROWS = [pytest.param(row, id=row.name) for row in ROWS if not row.by_hand]


@pytest.mark.parametrize("row", _ROWS)
def test_attack_ends_nothing_and_delays_nobody(stack: Stack, row: Row) -> None:
    for _ in range(_ROUNDS):
        cost = stack.run(row, _SECONDS, _QUIET_S)
        wait_until(stack.settled, PATIENCE_S, "all requests have ended")
        print(
            f"{row.name}: {dict(cost.statuses)} in {cost.seconds:.1f} s; "
            + "; ".join(
                f"{kind} {cost.peak_bytes[kind] >> 20} MiB, {cost.cpu_s[kind]:.2f} s CPU"
                for kind in cost.peak_bytes
            )
            + f"; chats {shown(cost.quiet.chats)} -> {shown(cost.during.chats)}, "
            f"/health {shown(cost.quiet.health)} -> {shown(cost.during.health)}"
        )
        assert stack.num_deaths() == 0
        for kind, pod in stack.pods.items():
            # Longer attacks reach further: a row that had 966 MiB of 1,024 in five seconds.
            assert cost.peak_bytes[kind] < _MOST * pod.limit_bytes, kind
        assert set(cost.statuses) <= row.statuses
        assert set(cost.during.statuses) <= {200, 503}
        if delay_s(cost.quiet, cost.during) <= _FLOOR_S:
            return
    pytest.fail("others wait for it")


def delay_s(quiet: Times, during: Times) -> float:
    """Beyond twice what it takes without the attack: of the median chat, and of `/health`."""
    return max(
        statistics.median(during.chats) - 2 * max(quiet.chats),
        statistics.median(during.health) - 2 * max(quiet.health),
    )


def shown(seconds: object) -> str:
    assert isinstance(seconds, list)
    return f"{statistics.median(seconds) * 1e3:.0f}, {max(seconds) * 1e3:.0f} ms of {len(seconds)}"
