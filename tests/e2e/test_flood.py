"""A flood of one tenant through the whole stack, counted in steps of the engine or in answers, not
in times, which depend on what else the machine does; `benchmarks.flood` measures those.
"""

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import flood
from benchmarks.client import Connection
from benchmarks.workloads import chat_fields
from tests.noise import least

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLOOD = replace(flood.KINDS["n8"], fields={"max_tokens": 8, "n": 8, "temperature": 1.0})


@pytest.mark.nightly
def test_forty_requests_of_eight_answers_cost_another_tenant_few_steps(tmp_path: Path) -> None:
    seeds = itertools.count(1 << 30)

    def steps_of(requests: int) -> float:
        before = stack.num_steps()
        flood.first_tokens_s(stack, requests, seeds)
        return stack.num_steps() - before

    with flood.demo_stack(tmp_path) as stack:
        quiet = max(steps_of(1) for _ in range(3))
        with flood.flooded(stack, FLOOD) as counts:
            # Steps that pass while they are counted are not the request's.
            beside = min(steps_of(0) for _ in range(8))
            bound = 2 * quiet + 1 + beside
            assert least(lambda: steps_of(1), bound) <= bound
    assert counts[0][1] == 0, "the flood was refused"


@pytest.mark.nightly
def test_a_request_overtakes_another_tenants_burst_of_short_ones(tmp_path: Path) -> None:
    """A further request of the same tenant is behind all of them, as each is where the requests of
    all tenants are one queue. First tokens come in ticks of the engine, each with some 30 of them.
    """
    num_burst = 200

    async def num_ahead(stack: flood.Stack, seeds: "itertools.count[int]", tenant: str) -> int:
        async def begins(tenant: str) -> float:
            connection = Connection(stack.targets[tenant])
            seed = next(seeds)
            fields = chat_fields(stack.model, f"{seed} what is it?", 2) | {"seed": seed}
            sample = await connection.post(json.dumps(fields).encode(), 60)
            connection.close()
            assert not sample.error
            return sample.first

        burst = [asyncio.create_task(begins("flooding")) for _ in range(num_burst)]
        await asyncio.sleep(0.02)  # All are sent, and none is answered before 0.05 s.
        first = await begins(tenant)
        others = await asyncio.gather(*burst)
        await asyncio.sleep(0)  # connections end in the loop's next pass
        return sum(other < first for other in others)

    seeds = itertools.count(1, 16)
    with flood.null_stack(tmp_path) as stack:

        def ahead(tenant: str) -> int:
            return asyncio.run(num_ahead(stack, seeds, tenant))

        assert least(lambda: -ahead("flooding"), -num_burst / 2) <= -num_burst / 2  # control
        assert least(lambda: ahead("quiet"), num_burst / 4) <= num_burst / 4
