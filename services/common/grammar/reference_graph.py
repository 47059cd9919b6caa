"""Finds the deepest path through a graph of references with cycles, without recursion."""

from collections.abc import Sequence

Edges = Sequence[Sequence[tuple[int, int]]]


def deepest(edges: Edges, heights: Sequence[float]) -> tuple[float, int]:
    """Returns upper bounds of the height and the number of links of a path that enters no node
    twice.

    A cycle counts as all of its nodes and as a single link, because a compiler enters each of its
    nodes once, in an unknown order.

    Args:
        edges: edges of each node, as pairs of the other node and the number of links (0 or 1).
        heights: height of each node.

    Returns:
        The largest sum of heights along a path, and the largest number of links.
    """
    height, length = [0.0] * len(edges), [0] * len(edges)
    for component in components(edges):
        members = set(component)
        deep, long = 0.0, 0
        for member in component:
            for node, links in edges[member]:
                if node not in members:
                    deep, long = max(deep, height[node]), max(long, length[node] + links)
        deep += sum(heights[member] for member in component)
        for member in component:
            height[member], length[member] = deep, long
    return max(height, default=0), max(length, default=0)


def components(edges: Edges) -> list[list[int]]:
    """Returns the strongly connected components, by Tarjan's algorithm. A component follows the
    components that its edges lead to.
    """
    order = [0] * len(edges)  # order of the first visits; 0 before
    low = [0] * len(edges)
    path: list[int] = []
    on_path = [False] * len(edges)
    found: list[list[int]] = []
    count = 0
    for root in range(len(edges)):
        work = [] if order[root] else [(root, 0)]
        while work:
            node, index = work.pop()
            if index == 0:
                count += 1
                order[node] = low[node] = count
                path.append(node)
                on_path[node] = True
            else:
                low[node] = min(low[node], low[edges[node][index - 1][0]])
            for next_index in range(index, len(edges[node])):
                following = edges[node][next_index][0]
                if not order[following]:
                    work += [(node, next_index + 1), (following, 0)]
                    break
                if on_path[following]:
                    low[node] = min(low[node], order[following])
            else:
                if low[node] == order[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(path.pop())
                        on_path[component[-1]] = False
                    found.append(component)
    return found
