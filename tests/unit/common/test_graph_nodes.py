"""A graph's nodes, through functions of the driver's signatures that keep a graph in Python; and
which of them a capture takes out.

That a graph without them is right, a GPU test holds.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p

import pytest
import torch

from services.common.nn import captures, graph_nodes
from services.common.nn.captures import PLACE_BYTES, Places
from services.common.nn.graph_nodes import Driver, DriverError

GRAPH = 7


class FakeGraph:
    """Nodes by number: None, or what they set: address, value, bytes, height. Edges as pairs."""

    def __init__(self, nodes: dict[int, tuple[int, int, int, int] | None]) -> None:
        self.nodes = nodes
        self.edges: set[tuple[int, int]] = set()
        self.status: dict[str, int] = {}
        for name, types in graph_nodes._SIGNATURES.items():
            prototype = ctypes.CFUNCTYPE(c_int, *types)
            setattr(self, f"cuGraph{name}", prototype(self._function(name)))

    def _function(self, name: str) -> Callable[..., int]:
        def called(*arguments: object) -> int:
            if not self.status.get(name):
                getattr(self, f"_{name}")(*arguments)
            return self.status.get(name, 0)

        return called

    def _give(self, found: list[int], to: ctypes.Array[c_void_p], count: object) -> None:
        if to:
            assert ctypes.cast(count, ctypes.POINTER(c_size_t))[0] == len(found)
            for place, handle in enumerate(found):
                to[place] = handle
        ctypes.cast(count, ctypes.POINTER(c_size_t))[0] = len(found)

    def _GetNodes(self, graph: int, to: ctypes.Array[c_void_p], count: object) -> None:
        assert graph == GRAPH
        self._give(list(self.nodes), to, count)

    def _NodeGetType(self, node: int, to: ctypes.Array[c_int]) -> None:
        to[0] = 0 if self.nodes[node] is None else 2

    def _MemsetNodeGetParams(self, node: int, to: ctypes.Array[graph_nodes._MemsetParams]) -> None:
        found = self.nodes[node]
        assert found is not None
        address, value, size, height = found
        to[0].dst, to[0].value, to[0].height = address, value, height
        to[0].element_size, to[0].width = 4, size // 4

    def _NodeGetDependencies(self, node: int, to: ctypes.Array[c_void_p], count: object) -> None:
        self._give([a for a, b in self.edges if b == node], to, count)

    def _NodeGetDependentNodes(self, node: int, to: ctypes.Array[c_void_p], count: object) -> None:
        self._give([b for a, b in self.edges if a == node], to, count)

    def _AddDependencies(self, graph: int, one: list[int], other: list[int], count: int) -> None:
        edge = (one[0], other[0])
        assert graph == GRAPH and count == 1 and edge not in self.edges
        self.edges.add(edge)

    def _DestroyNode(self, node: int) -> None:
        del self.nodes[node]
        self.edges = {edge for edge in self.edges if node not in edge}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGraph:
    """Kernel 1, a product's counter, kernels 3 and 4 after it, 4 also after 1."""
    made = FakeGraph({1: None, 2: (5120, 0, 4, 1), 3: None, 4: None})
    made.edges = {(1, 2), (2, 3), (2, 4), (1, 4)}
    monkeypatch.setattr(graph_nodes, "_library", lambda: made)
    captures._say_once.cache_clear()
    return made


def test_who_waited_for_a_node_waits_for_what_it_waited_for(fake: FakeGraph) -> None:
    Driver().take_out(GRAPH, 2)
    assert list(fake.nodes) == [1, 3, 4] and fake.edges == {(1, 3), (1, 4)}


def test_the_first_node_leaves_no_edge(fake: FakeGraph) -> None:
    Driver().take_out(GRAPH, 1)
    assert list(fake.nodes) == [2, 3, 4] and fake.edges == {(2, 3), (2, 4)}


def test_nodes_that_zero_are_found(fake: FakeGraph) -> None:
    fake.nodes |= {5: (9000, 1, 4, 1), 6: (9000, 0, 4, 2), 7: (9000, 0, 65536, 1)}
    assert list(Driver().zeroing_nodes(GRAPH)) == [(2, (5120, 4)), (7, (9000, 65536))]


def test_what_the_driver_refuses_is_said(fake: FakeGraph) -> None:
    fake.status["NodeGetDependencies"] = 911
    with pytest.raises(DriverError, match="cuGraphNodeGetDependencies returned 911"):
        Driver().take_out(GRAPH, 2)


@pytest.mark.parametrize(
    ("node", "goes"),
    [
        ((5120, 0, 4, 1), True),
        ((5120 + PLACE_BYTES, 0, 4, 1), True),
        ((5120 + 2 * PLACE_BYTES, 0, 4, 1), False),  # not taken
        ((5120 - PLACE_BYTES, 0, 4, 1), False),  # of those in no graph
        ((5124, 0, 4, 1), False),
        ((5120, 0, 2 * PLACE_BYTES, 1), False),
        ((5120, 1, 4, 1), False),
    ],
)
def test_only_what_zeroes_a_place_is_taken_out(
    fake: FakeGraph, node: tuple[int, int, int, int], goes: bool
) -> None:
    fake.nodes[2] = node
    captures._zero_once(GRAPH, range(5120, 5120 + 2 * PLACE_BYTES, PLACE_BYTES))
    assert (2 not in fake.nodes) == goes
    assert (fake.edges == {(1, 3), (1, 4)}) == goes


def test_a_graph_that_cannot_be_changed_stays_as_it_is(
    fake: FakeGraph, caplog: pytest.LogCaptureFixture
) -> None:
    """It is right with all its nodes, too."""
    fake.status["GetNodes"] = 1
    for _ in range(2):
        captures._zero_once(GRAPH, range(5120, 5120 + PLACE_BYTES, PLACE_BYTES))
    assert len(fake.nodes) == 4
    assert [r.message for r in caplog.records] == [
        "graphs zero each product's counter: cuGraphGetNodes returned 1"
    ]


def test_a_graphs_products_have_places_of_their_own() -> None:
    memory = torch.full((256 * PLACE_BYTES,), 9, dtype=torch.uint8)
    places, first = Places(memory), memory.data_ptr()
    assert [places.take(), places.take()] == [first, first]
    for _ in range(2):  # one graph after the other, with the same places
        places.begin()
        assert (memory[PLACE_BYTES:] == 9).all()  # a graph without products zeroes nothing
        taken = [places.take() for _ in range(3)]
        assert taken == [first + n * PLACE_BYTES for n in (1, 2, 3)] == list(places.end())
        assert (memory[:PLACE_BYTES] == 9).all() and not memory[PLACE_BYTES:].any()
        memory.fill_(9)
    assert places.take() == first


def test_with_more_products_than_places_the_last_share_one() -> None:
    memory = torch.zeros(256 * PLACE_BYTES, dtype=torch.uint8)
    places = Places(memory)
    places.begin()
    taken = [places.take() for _ in range(300)]
    assert len(set(taken)) == 256 and taken[255:] == [memory.data_ptr()] * 45
    assert memory.data_ptr() not in places.end()
