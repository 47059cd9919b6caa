"""A captured CUDA graph's nodes, by the functions of CUDA's driver.

Names and numbers are those of `cuda.h`.
"""

import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET


class DriverError(Exception):
    """A function of the driver did not succeed."""


class _MemsetParams(Structure):
    _fields_ = (
        ("dst", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element_size", c_uint),
        ("width", c_size_t), ("height", c_size_t),
    )  # fmt: skip


class Driver:
    """What is asked of it.

    Raises:
        OSError: there is none.
        DriverError: from each method, what went wrong.
    """

    def __init__(self) -> None:
        self._functions = _library()

    def zeroing_nodes(self, graph: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Nodes that zero contiguous memory: each with that one's address and size in bytes. Those
        that have been seen may be taken out meanwhile.
        """
        for node in self._list("GetNodes", graph):
            kind = c_int()
            self._call("NodeGetType", node, byref(kind))
            if kind.value != _MEMSET:
                continue
            params = _MemsetParams()
            self._call("MemsetNodeGetParams", node, byref(params))
            if params.value == 0 and params.height == 1:
                yield node, (params.dst, params.width * params.element_size)

    def take_out(self, graph: int, node: int) -> None:
        """Removes a node; what waited for it waits for what it waited for."""
        before = self._list("NodeGetDependencies", node)
        after = self._list("NodeGetDependentNodes", node)
        for one in before:
            known = set(self._list("NodeGetDependentNodes", one))
            for other in after:
                if other not in known:
                    self._call(
                        "AddDependencies", graph, byref(c_void_p(one)), byref(c_void_p(other)), 1
                    )
        self._call("DestroyNode", node)

    def _list(self, name: str, of: int) -> list[int]:
        count = c_size_t()
        self._call(name, of, None, byref(count))
        found = (c_void_p * count.value)()
        if count.value:
            self._call(name, of, found, byref(count))
        return [handle for handle in found if handle is not None]

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes'
        status = getattr(self._functions, f"cuGraph{name}")(*arguments)
        if status:
            raise DriverError(f"cuGraph{name} returned {status}")


_HANDLES, _COUNT = POINTER(c_void_p), POINTER(c_size_t)
_SIGNATURES = {
    "GetNodes": (c_void_p, _HANDLES, _COUNT),
    "NodeGetType": (c_void_p, POINTER(c_int)),
    "MemsetNodeGetParams": (c_void_p, POINTER(_MemsetParams)),
    "NodeGetDependencies": (c_void_p, _HANDLES, _COUNT),
    "NodeGetDependentNodes": (c_void_p, _HANDLES, _COUNT),
    "AddDependencies": (c_void_p, _HANDLES, _HANDLES, c_size_t),
    "DestroyNode": (c_void_p,),
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        function = getattr(library, f"cuGraph{name}")
        function.argtypes, function.restype = types, c_int
    return library
