"""A flood of one tenant through the whole stack, counted in steps of the engine, which does not
depend on what else the machine does; `benchmarks.flood` measures times.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import flood
from tests.noise import least

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FLOOD = replace(flood.KINDS["n8"], fields={"max_tokens": 8, "n": 8, "temperature": 1.0})


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
