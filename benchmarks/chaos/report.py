"""Results of runs: one as text, several added up."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.chaos.history import percentile


def add_up(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several."""
    total: dict[str, Any] = {
        "seeds": sorted(seed for r in results for seed in r["seeds"]),
        "commits": sorted({commit for r in results for commit in r["commits"]}),
        "seconds": sum(r["seconds"] for r in results),
        "outcomes": dict(sum((Counter(r["outcomes"]) for r in results), Counter())),
        "failures": [line for r in results for line in r["failures"]],
        "left": [line for r in results for line in r["left"]],
        "growth": [each for r in results for each in r["growth"]],
        "normal": [t for r in results for t in r["normal"]],
        "kinds": {},
    }
    for name in sorted({name for r in results for name in r["kinds"]}):
        found = [r["kinds"][name] for r in results if name in r["kinds"]]
        total["kinds"][name] = {
            "faults": sum(each["faults"] for each in found),
            "detection_s": max(each["detection_s"] for each in found),
            **{
                key: [value for each in found for value in each[key]]
                for key in ("during", "after", "recovery_s", "whole_s")
            },
        }
    return total


def text(result: dict[str, Any]) -> str:
    """For people: outcomes, a table of faults, what is left, growth, failures."""
    outcomes: dict[str, int] = result["outcomes"]
    normal: list[float] = result["normal"]
    p50, p99 = percentile(normal, 50), percentile(normal, 99)
    count = sum(outcomes.values())
    lines = [
        f"seeds {result['seeds']}, commits {', '.join(result['commits'])}, "
        f"{result['seconds']:.0f} s, {count} requests",
        *(f"{number:8} {name}" for name, number in sorted(outcomes.items())),
        "",
        f"TTFT without a fault: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, "
        f"of {len(normal)} streams",
        "",
        "| fault | times | TTFT p50 / p99 during, ms | bound, ms | after, ms "
        "| recovery median / max, s | whole again, s |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(name, kind, p99) for name, kind in result["kinds"].items()]
    everything = [t for kind in result["kinds"].values() for t in kind["during"]]
    after = [t for kind in result["kinds"].values() for t in kind["after"]]
    lines += [
        "",
        f"all faults: TTFT p99 {percentile(everything, 99) * 1e3:.0f} ms during, "
        f"{percentile(after, 99) * 1e3:.0f} ms after",
        f"left over: {len(result['left']) or 'nothing'}",
        *(f"  {line}" for line in result["left"][:20]),
        *_growth(result["growth"]),
        f"failures: {len(result['failures']) or 'none'}",
        *(f"  {line[:600]}" for line in result["failures"][:25]),
    ]
    return "\n".join(lines)


def _row(name: str, kind: dict[str, Any], normal_p99: float) -> str:
    during, after = kind["during"], kind["after"]
    bound = 2 * normal_p99 + kind["detection_s"]
    p99 = percentile(during, 99)
    over = "" if p99 <= bound else " !"
    return (
        f"| {name} | {kind['faults']} | {percentile(during, 50) * 1e3:.0f} / {p99 * 1e3:.0f}{over} "
        f"| {bound * 1e3:.0f} "
        f"| {percentile(after, 50) * 1e3:.0f} / {percentile(after, 99) * 1e3:.0f} "
        f"| {percentile(kind['recovery_s'], 50):.1f} / {max(kind['recovery_s']):.1f} "
        f"| {percentile(kind['whole_s'], 50):.1f} |"
    )


def _growth(found: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Per role, of processes that lived for a while."""
    roles: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        pod, role, _ = each["name"].split()
        roles.setdefault(f"{pod.split('-')[0]} {role}", []).append(each)
    for role, members in sorted(roles.items()):
        grown = [m["last_bytes"] - m["first_bytes"] for m in members]
        asks = sum(m["num_asks"] for m in members)
        last = percentile([m["last_bytes"] for m in members], 50)
        descriptors = max(m["last_descriptors"] - m["first_descriptors"] for m in members)
        yield (
            f"{role}: {len(members)} lived a minute or more, {last / 2**20:.0f} MiB; "
            f"growth {sum(grown) / 2**20:+.1f} MiB in all over {asks} requests of the run, "
            f"at most {max(grown) / 2**20:+.1f} MiB and {descriptors:+d} descriptors"
        )
