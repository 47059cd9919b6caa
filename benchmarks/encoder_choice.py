"""How long does a first token take by the rule that chooses the encoders of images?

    python -m benchmarks.encoder_choice

Open loops of 40 s on four encoders and four decoders of one host, in simulated time: Qwen3-VL-8B on
H100s (`benchmarks.simulation`). Two rules: by the number of images in flight, each image alone (the
rule before), and by seconds, the images of a request together (`EncoderShares`).
"""

from collections.abc import Callable

import numpy as np

from benchmarks.simulation.cluster import Cluster, FleetPlan, Plan
from benchmarks.simulation.requests import Request
from benchmarks.simulation.stages import H100_8B

_SECONDS = 40.0
_SIZES, _SHARES = (256, 1024, 4096, 16384), (0.4, 0.3, 0.2, 0.1)  # patches: 256² to 2048² pixels


def _mixed(count: int) -> Callable[[np.random.Generator], list[int]]:
    return lambda rng: rng.choice(_SIZES, count, p=_SHARES).tolist()


# Images of a request, and requests a second.
LOADS: dict[str, tuple[Callable[[np.random.Generator], list[int]], float]] = {
    "one image of 256 x 256 to 2048 x 2048": (_mixed(1), 80.0),
    "four such images": (_mixed(4), 20.0),
    "16 images of 1024 x 1024": (lambda _: [4096] * 16, 4.0),
}


def run(load: str, num_gateways: int, *, by_number: bool) -> tuple[float, float]:
    """Returns the median and the 99th percentile of the time to the first token, in ms."""
    images_of, rate = LOADS[load]
    fleets = FleetPlan(("encoder",), 4), FleetPlan(("decoder",), 4)
    ended: list[Request] = []
    plan = Plan(fleets, num_gateways, one_host=True, by_number=by_number)
    cluster = Cluster(plan, H100_8B, ended.append)
    rng = np.random.default_rng(11)
    for at in np.cumsum(rng.exponential(1 / rate, round(rate * _SECONDS))):
        images = images_of(rng)
        request = Request(float(at), sum(images) // 4 + 100, 64, tuple(images))
        cluster.clock.at(request.arrival, cluster.submit, request)
    cluster.clock.run(4 * _SECONDS)
    median, late = np.percentile([1e3 * request.ttft for request in ended], (50, 99))
    return float(median), float(late)


def main() -> None:
    """Prints a row for each load and number of gateways."""
    print("load, gateways: TTFT p50 / p99 in ms by number; by seconds")
    for load in LOADS:
        for num_gateways in (1, 4):
            rows = [run(load, num_gateways, by_number=rule) for rule in (True, False)]
            found = "; ".join(f"{median:.0f} / {late:.0f}" for median, late in rows)
            print(f"{load}, {num_gateways}: {found}")


if __name__ == "__main__":
    main()
