"""The stage costs against measured serving rows: the closed loops of `benchmarks.workloads`."""

from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.cluster import Cluster, FleetPlan, Plan
from benchmarks.simulation.requests import Request
from benchmarks.simulation.stages import StageCosts
from benchmarks.workloads import ROWS, Row

SHARED = Plan((FleetPlan(("encoder", "decoder"), 1),))
SPLIT = Plan((FleetPlan(("encoder",), 1), FleetPlan(("decoder",), 1)))
TWO_DECODERS = Plan((FleetPlan(("encoder", "decoder"), 2),))


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured figure of a row.

    Attributes:
        figure: `ttft_ms`, `tpot_ms`, `tokens_per_s` or `requests_per_s`.
        calibrates: the stage costs were fitted to it, so that it proves nothing.
    """

    row: str
    figure: str
    value: float
    plan: Plan
    source: str
    calibrates: bool = False


_LOG = "LOG.md, 2B"
MEASURED = (
    Measured("text_c1", "tpot_ms", 1.16, SHARED, _LOG, calibrates=True),
    Measured("text_c1", "ttft_ms", 8.4, SHARED, _LOG, calibrates=True),
    Measured("img1024_c1", "ttft_ms", 24.8, SHARED, _LOG, calibrates=True),
    Measured("text1058_c1", "ttft_ms", 8.35, SHARED, "LOG.md, 2B against dd390a3"),
    Measured("text_c64", "tokens_per_s", 10_909, SHARED, _LOG),
    Measured("text_c256", "tokens_per_s", 13_304, SHARED, _LOG),
    Measured("img512_c64", "requests_per_s", 252, SHARED, _LOG),
    Measured("img1024_c32", "requests_per_s", 51.4, SHARED, _LOG),
    Measured("img4x640_c16", "requests_per_s", 23.3, SHARED, _LOG),
    Measured("text_c256", "tokens_per_s", 23_910, TWO_DECODERS, "HISTORY.md, two GPUs"),
    Measured("img512_c64", "requests_per_s", 414, SPLIT, "HISTORY.md, two GPUs"),
    Measured("img1024_c32", "requests_per_s", 95.2, SPLIT, "HISTORY.md, two GPUs"),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a row."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    requests_per_s: float


def predict(costs: StageCosts, row: Row, plan: Plan) -> Prediction:
    """Runs a row: its number of requests in flight until all are answered."""
    rng = np.random.default_rng(0)
    answered: list[Request] = []
    waiting = row.num_requests

    def request() -> Request:
        nonlocal waiting
        waiting -= 1
        images = ((row.image_edge // 16) ** 2,) * row.images_per_request
        return Request(cluster.clock.now, row.prompt_tokens, row.output_tokens, images)

    def finished(ended: Request) -> None:
        answered.append(ended)
        if waiting:
            cluster.submit(request())

    cluster = Cluster(plan, costs, finished)
    for _ in range(row.concurrency):
        cluster.clock.at(float(rng.uniform(0, 1e-3)), lambda _: cluster.submit(request()))
    cluster.clock.run(3600.0)
    end = max(r.last_token for r in answered)
    wall_s = end - min(r.arrival for r in answered)
    return Prediction(
        ttft_ms=1e3 * float(np.median([r.ttft for r in answered])),
        tpot_ms=1e3 * float(np.median([r.tpot for r in answered])),
        tokens_per_s=sum(r.output_tokens for r in answered) / wall_s,
        requests_per_s=len(answered) / wall_s,
    )


def compare(costs: StageCosts) -> list[tuple[Measured, float]]:
    """Each measured figure and the predicted one."""
    rows = {row.name: row for row in ROWS}
    return [(m, getattr(predict(costs, rows[m.row], m.plan), m.figure)) for m in MEASURED]
