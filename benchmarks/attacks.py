"""What attacks cost: memory under each pod's limit, CPU time, and others' latency meanwhile.

    python -m benchmarks.attacks --seconds 10 --rounds 3

Starts gateway, encoder and decoder with the demonstration model, each in a cgroup with the memory
of its manifest (only watched where none can be made), and replays every row of `tests.attacks`.
Honest clients ask about new images; their latency is taken before and during each attack, in turn.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.attacks.rows import ROWS
from tests.attacks.stack import Cost, Stack
from tests.e2e.cluster import wait_until

_SETTLE_S = 120.0


def main() -> int:
    """Prints a row as soon as it is measured. Exit status 1 if a service lost a process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many is shown")
    parser.add_argument("--rows", default="", help="those whose name holds this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Stack(Path(directory)) as stack:
        kind = "cgroup" if all(p.enforced for p in stack.pods.values()) else "watched"
        limits = ", ".join(f"{k} {p.limit_bytes >> 20}" for k, p in stack.pods.items())
        print(f"limits, MiB ({kind}): {limits}\n")
        print(
            "| § | attack | statuses | peak MiB: gateway, encoder, decoder | CPU s, of "
            "| /health p50, max ms | honest p50, p99 ms quiet | during | p99 ratio |"
        )
        print("|--:|---|---|---|---|--:|--:|--:|--:|")
        for row in ROWS:
            if options.rows in row.name:
                costs = []
                for _ in range(options.rounds):
                    costs.append(stack.run(row, options.seconds, options.seconds / 2))
                    wait_until(stack.settled, _SETTLE_S, f"all has ended after {row.name}")
                print(_line(costs), flush=True)
        deaths = stack.num_deaths()
        print(f"\n{deaths} processes ended")
    return bool(deaths)


def _line(costs: Sequence[Cost]) -> str:
    best = min(costs, key=_ratio)
    kinds = ("gateway", "encoder", "decoder")
    peaks = ", ".join(str(max(c.peak_bytes[k] for c in costs) >> 20) for k in kinds)
    cpu = ", ".join(f"{best.cpu_s[k]:.1f}" for k in kinds) + f" of {best.seconds:.1f}"
    health = f"{_ms(best.during.health, 50)}, {_ms(best.during.health, 100)}"
    quiet, during = (f"{_ms(t.chats, 50)}, {_ms(t.chats, 99)}" for t in (best.quiet, best.during))
    refused = {k: n for k, n in best.during.statuses.items() if k != 200}
    during += f" of {len(best.during.chats)}" + (f", refused {refused}" if refused else "")
    statuses: Counter[int] = Counter()
    for cost in costs:
        statuses.update(cost.statuses)
    ended = ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items()))
    return (
        f"| {best.row.section} | {best.row.name} | {ended} | {peaks} | {cpu} | {health} "
        f"| {quiet} | {during} | {_ratio(best):.2f} |"
    )


def _ratio(cost: Cost) -> float:
    """p99 during the attack over that before it."""
    return float(np.percentile(cost.during.chats, 99) / np.percentile(cost.quiet.chats, 99))


def _ms(seconds: Sequence[float], percentile: float) -> str:
    return f"{np.percentile(seconds, percentile) * 1e3:.0f}"


if __name__ == "__main__":
    sys.exit(main())
