"""The dispatch table: what is chosen, what a failure leads to, what is counted."""

import logging
from dataclasses import dataclass

import pytest
import torch

from services.common.nn.dispatch import (
    Implementation,
    KernelTable,
    TokenRange,
    UnknownOverride,
    parse_overrides,
)


@dataclass(frozen=True)
class Facts:
    has_gpu: bool = True


class Fails(Exception):
    pass


def fast(x: list[int], *, fails: bool = False) -> str:
    if fails:
        raise Fails("no\nsuch luck")
    return f"fast {len(x)}"


def plain(x: list[int], *, fails: bool = False) -> str:
    return f"plain {len(x)}"


ROWS: list[Implementation[Facts]] = [
    Implementation(
        "add", "fast", lambda _: fast,
        obstacle=lambda facts: "" if facts.has_gpu else "needs a GPU",
        tokens=lambda _: TokenRange(2, 8, least_eager=4),
    ),
    Implementation("add", "plain", lambda _: plain),
    Implementation("norm", "odd", lambda _: fast, tokens=lambda _: TokenRange(
        is_faster=lambda n: n % 2 == 1, condition="where odd")),
    Implementation("norm", "spec", lambda _: plain),
]  # fmt: skip


def table(overrides: str = "", facts: Facts | None = None) -> KernelTable[Facts]:
    return KernelTable.resolve(ROWS, facts or Facts(), parse_overrides(overrides))


def test_the_first_implementation_that_fits_is_called() -> None:
    made = table()
    sizes = (1, 3, 4, 8, 9)
    found = [made.call("add", [0] * size) for size in sizes]
    assert found == ["plain 1", "plain 3", "fast 4", "fast 8", "plain 9"]
    with made.for_graph():
        assert made.call("add", [0] * 3) == "fast 3"
    assert made.call("norm", [0, 0, 0]) == "fast 3" and made.call("norm", [0, 0]) == "plain 2"
    assert made.call("add", [0], num_tokens=5) == "fast 1"


def test_an_obstacle_is_named() -> None:
    made = table(facts=Facts(has_gpu=False))
    assert made.call("add", [0] * 4) == "plain 4"
    assert made.rejected == {("add", "fast"): "needs a GPU"}
    assert "add   plain [any]  | not: fast: needs a GPU" in str(made)
    assert "norm  odd [any where odd] > spec [any]" in str(made)
    assert "fast [2-8 (eager: >= 4)] > plain [any]" in str(table())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("add=fast", ["fast 1", "plain 2"]),
        ("add=plain", ["plain 1", "plain 2"]),
        ("plain", ["plain 1", "plain 2"]),
        ("plain, norm=odd", ["plain 1", "fast 2"]),
    ],
)
def test_an_override_is_used_for_any_number(overrides: str, expected: list[str]) -> None:
    made = table(overrides)
    assert [made.call("add", [0]), made.call("norm", [0, 0])] == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("sub=plain", "no operation sub; there are: add, norm"),
        ("add=slow", "add=slow: there is no such implementation"),
        ("add", "expected operation=implementation"),
        ("add=", "expected operation=implementation"),
    ],
)
def test_wrong_names_are_errors(overrides: str, message: str) -> None:
    with pytest.raises(UnknownOverride, match=rf"^\*_KERNELS: .*{message}"):
        table(overrides)


def test_an_override_that_cannot_run_is_refused() -> None:
    with pytest.raises(UnknownOverride, match="add=fast: needs a GPU"):
        table("add=fast", Facts(has_gpu=False))


def test_what_fails_while_warming_up_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    made = table()
    with caplog.at_level(logging.WARNING), made.warming_up():
        assert made.call("add", [0] * 4, fails=True) == "plain 4"
        assert made.call("add", [0] * 4) == "plain 4"
    assert [record.getMessage() for record in caplog.records] == [
        "add: fast failed and is not used, which leaves plain: Fails: no"
    ]
    assert made.rejected["add", "fast"] == "failed: Fails: no"
    assert not made.calls()


def test_an_implementation_whose_rival_is_gone_serves_any_number() -> None:
    def long_fast(_: Facts) -> TokenRange:
        return TokenRange(8, condition="tokens")

    def made(*, has_gpu: bool = True) -> KernelTable[Facts]:
        ours = Implementation[Facts]("add", "ours", lambda _: fast, tokens=long_fast, rival="fast")
        return KernelTable.resolve([ours, *ROWS[:2]], Facts(has_gpu))

    absent, failing, of_ranks = made(has_gpu=False), made(), made()
    assert [failing.choose("add", n).name for n in (1, 4, 8)] == ["plain", "fast", "ours"]
    with failing.warming_up():
        assert failing.call("add", [0] * 4, fails=False) == "fast 4"
        (lost,) = [entry for entry in failing.usable("add") if entry.name == "fast"]
        assert failing.drop(lost, Fails("no")) and not failing.has(lost)
    of_ranks.keep({"add": ["ours", "plain"]})
    for each in (absent, failing, of_ranks):
        assert [each.choose("add", n).name for n in (1, 4, 8)] == ["ours"] * 3
        assert each.rows()[0][1] == "ours [any] > plain [any]"


def test_what_fails_later_is_an_error() -> None:
    with pytest.raises(Fails):
        table().call("add", [0] * 4, fails=True)


def test_running_out_of_memory_is_not_an_implementations_fault() -> None:
    def exhausted(_: list[int]) -> None:
        raise torch.OutOfMemoryError("full")

    rows = [Implementation("add", "fast", lambda _: exhausted), ROWS[1]]
    made = KernelTable.resolve(rows, Facts())
    with pytest.raises(torch.OutOfMemoryError), made.warming_up():
        made.call("add", [0])


def test_calls_are_counted_with_those_of_replays() -> None:
    made = table()
    made.call("add", [0] * 4)
    with made.capturing() as graph:
        made.call("add", [0] * 4)
        made.call("add", [0] * 4)
        made.call("norm", [0] * 4)
    assert made.calls() == {("add", "fast"): 1}
    graph.num_replays += 3
    made.call("add", [0])
    assert made.calls() == {("add", "fast"): 7, ("add", "plain"): 1, ("norm", "spec"): 3}
    before = made.calls()
    with made.warming_up():
        made.call("add", [0])
        graph.num_replays += 1
        with made.capturing() as other:
            made.call("add", [0])
        other.num_replays += 1
    assert made.calls() == before
    other.num_replays += 1
    assert made.calls()["add", "plain"] == 2


def test_an_implementation_is_made_when_it_is_used() -> None:
    made: list[str] = []

    def create(_: Facts):
        made.append("fast")
        return fast

    resolved = KernelTable.resolve([Implementation("add", "fast", create), ROWS[1]], Facts())
    assert made == []
    for _ in range(2):
        resolved.call("add", [0])
    assert made == ["fast"]
