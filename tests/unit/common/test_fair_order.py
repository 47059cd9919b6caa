"""Shares by weight, nobody behind another's backlog, arrival order within a tenant."""

from collections import Counter

import pytest

from services.common.tenancy.fair_order import FairOrder


def serve(order: FairOrder, waiting: list[tuple[float, int, str]], count: int) -> list[str]:
    """Takes the next ones."""
    taken = []
    for _ in range(count):
        first = min(waiting)
        waiting.remove(first)
        order.served(first[0])
        taken.append(first[2])
    return taken


def queue(order: FairOrder, tenants: str, **options: float) -> list[tuple[float, int, str]]:
    return [(order.place(tenant, **options), n, tenant) for n, tenant in enumerate(tenants)]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    order = FairOrder()
    places = [order.place("a", cost=cost) for cost in (5, 1, 3, 0.5)]
    assert places == sorted(set(places))


def test_a_newcomer_is_next_whatever_waits() -> None:
    order = FairOrder()
    waiting = queue(order, "a" * 1000)
    serve(order, waiting, 10)
    waiting.append((order.place("b"), 1000, "b"))
    assert "b" in serve(order, waiting, 2)


def test_idleness_earns_nothing() -> None:
    order = FairOrder()
    serve(order, queue(order, "b"), 1)
    waiting = queue(order, "a" * 100)
    serve(order, waiting, 50)
    waiting += [(order.place("b"), 100 + n, "b") for n in range(50)]
    assert Counter(serve(order, waiting, 20))["b"] == pytest.approx(10, abs=1)


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.5])
def test_shares_are_those_of_the_weights(weight: float) -> None:
    order = FairOrder()
    waiting = queue(order, "a" * 1000) + [
        (order.place("b", weight=weight), 1000 + n, "b") for n in range(1000)
    ]
    taken = Counter(serve(order, waiting, 400))
    assert taken["b"] / taken["a"] == pytest.approx(weight, rel=0.02)


def test_expensive_work_counts_for_more() -> None:
    order = FairOrder()
    waiting = queue(order, "a" * 100, cost=10)
    waiting += [(order.place("b"), 100 + n, "b") for n in range(100)]
    assert Counter(serve(order, waiting, 55))["a"] == pytest.approx(5, abs=1)


def test_a_cost_may_be_known_when_the_work_is_done() -> None:
    """Each tenant's next piece is placed when its last one has been done."""
    order, turns = FairOrder(), Counter[str]()
    for _ in range(110):
        place, tenant = min((order.start(name), name) for name in ("cheap", "dear"))
        order.served(place)
        turns[tenant] += 1
        order.charge(tenant, place, cost=10.0 if tenant == "dear" else 1.0)
    assert turns["cheap"] / turns["dear"] == pytest.approx(10, rel=0.1)


def test_a_charge_is_over_the_weight() -> None:
    order = FairOrder()
    order.charge("a", order.start("a"), weight=4.0, cost=2.0)
    order.charge("b", order.start("b"), cost=2.0)
    assert (order.start("a"), order.start("b"), order.start("c")) == (0.5, 2.0, 0.0)


@pytest.mark.parametrize("background", [False, True])
def test_a_tenant_whose_work_was_dropped_is_not_behind_the_backlog_of_another(
    background: bool,
) -> None:
    order = FairOrder()
    for _ in range(100):
        place = order.place("a", weight=0.5, cost=3, background=background)
        order.refund("a", place, weight=0.5, cost=3)
    first = order.place("b", cost=1, background=background)
    assert order.place("a", background=background) == first


def test_a_refund_takes_back_no_more_than_still_counts() -> None:
    """What the virtual time has passed is forgiven already, and other work is still charged."""
    order = FairOrder()
    old = order.place("a", cost=4)
    order.served(order.place("b", cost=10))
    order.served(order.place("b", cost=1))
    assert (order.now, order.place("a", cost=4)) == (10, 10)
    order.refund("a", old, cost=4)
    assert order.start("a") == 14
    last = order.place("a", cost=4)
    order.refund("a", last, cost=4)
    order.refund("a", 10, cost=4)
    assert order.start("a") == order.start("c") == 10


def test_the_charges_of_a_tenant_are_those_of_the_work_that_was_not_dropped() -> None:
    """Dropping every second piece of work gains nothing."""
    order, waiting = FairOrder(), list[tuple[float, int, str]]()
    for number in range(200):
        waiting.append((order.place("b"), number, "b"))
        dropped = order.place("a")
        waiting.append((order.place("a"), number, "a"))
        order.refund("a", dropped)
    assert Counter(serve(order, waiting, 100))["a"] == pytest.approx(50, abs=1)


def test_a_cost_in_the_background_may_be_known_when_the_work_is_done() -> None:
    order = FairOrder()
    place = order.place("a", cost=16, background=True)
    order.charge("a", place, cost=32)
    assert order.place("a", background=True) == place + 48 and order.start("a") == 0


def test_tenants_that_have_been_served_are_forgotten() -> None:
    order = FairOrder()
    for number in range(1000):
        place = order.place(f"tenant-{number}")
        order.served(place)
    later = order.place("x", cost=0.1), order.place("x")
    for place in later:
        order.served(place)
    assert order.num_tenants <= 1001
    serve(order, queue(order, "xyz", cost=5), 3)
    for _ in range(3):
        order.served(order.place("x", cost=5))
    assert order.num_tenants <= 2
