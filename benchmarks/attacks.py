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
    parser.add_argument("--rounds", type=int, default=3, help="quiet and attacked, in turn")
    parser.add_argument("--rows", default="", help="those whose name holds one of these, by |")
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
        stack.quiet(2.0)  # what runs once is not counted
        for row in ROWS:
            if any(name in row.name for name in options.rows.split("|")):
                costs = []
                for _ in range(options.rounds):
                    costs.append(stack.run(row, options.seconds, options.seconds))
                    wait_until(stack.settled, _SETTLE_S, f"all has ended after {row.name}")
                print(_line(costs), flush=True)
        deaths = stack.num_deaths()
        print(f"\n{deaths} processes ended")
    return bool(deaths)


def _line(costs: Sequence[Cost]) -> str:
    """All rounds' samples together."""
    kinds = ("gateway", "encoder", "decoder")
    peaks = ", ".join(str(max(c.peak_bytes[k] for c in costs) >> 20) for k in kinds)
    cpu = ", ".join(f"{sum(c.cpu_s[k] for c in costs):.1f}" for k in kinds)
    cpu += f" of {sum(c.seconds for c in costs):.1f}"
    quiet = [t for c in costs for t in c.quiet.chats]
    during = [t for c in costs for t in c.during.chats]
    health = [t for c in costs for t in c.during.health]
    statuses: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    for cost in costs:
        statuses.update(cost.statuses)
        refused.update({k: n for k, n in cost.during.statuses.items() if k != 200})
    ended = ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items()))
    chats = " | ".join(f"{_ms(t, 50)}, {_ms(t, 99)} of {len(t)}" for t in (quiet, during))
    chats += f", refused {dict(refused)}" if refused else ""
    ratio = float(np.percentile(during, 99) / np.percentile(quiet, 99))
    row = costs[0].row
    return (
        f"| {row.section} | {row.name} | {ended} | {peaks} | {cpu} "
        f"| {_ms(health, 50)}, {_ms(health, 100)} | {chats} | {ratio:.2f} |"
    )


def _ms(seconds: Sequence[float], percentile: float) -> str:
    return f"{np.percentile(seconds, percentile) * 1e3:.0f}"


if __name__ == "__main__":
    sys.exit(main())
