"""Runs Gluon kernels for Hopper on a CPU, one CTA after the other, with torch's tensors as blocks.

Triton's interpreter does not run Gluon. `emulated(function)` returns the Python function of a
kernel or of a device function with another `gl`, in which layouts mean nothing. What is
asynchronous happens as late as a kernel may rely on: copies by TMA when an mbarrier is waited for,
other copies when their group is, and GEMMs, with what shared memory has then, when they are. So a
buffer that is written too early, or a wait for the wrong phase, changes the result.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Pending = Callable[[], object]
E4M3 = torch.float8_e4m3fn


class Pointer:
    """Pointers to elements of a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Any = None, other: float = 0.0) -> Tensor:
        offset = torch.as_tensor(self.offset).long()
        inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        offset, inside = torch.broadcast_tensors(offset, torch.as_tensor(inside))
        found = self.memory[torch.where(inside, offset, 0)]
        wide = found.float() if found.dtype == E4M3 else found
        return torch.where(inside, wide, other).to(found.dtype)

    def store(self, values: Tensor, mask: Tensor | None = None) -> None:
        offset = torch.as_tensor(self.offset).long()
        inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        offset, inside, values = torch.broadcast_tensors(offset, inside, values)
        self.memory.view(-1)[offset[inside]] = values[inside].to(self.memory.dtype)


@dataclass
class Tiles:
    """A TMA descriptor of a matrix."""

    matrix: Tensor
    block_shape: list[int]

    def __post_init__(self) -> None:
        size = self.block_shape[0] * self.block_shape[1] * self.matrix.element_size()
        self.block_type = types.SimpleNamespace(shape=self.block_shape, nbytes=size)
        self.dtype, self.layout = self.matrix.dtype, None


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, values.shape

    def index(self, index: int) -> "Shared":
        assert index < len(self.values)
        return Shared(self.values[index])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.values.permute(order))


@dataclass
class Barrier:
    """An mbarrier: completed phases, and copies of which it has the bytes to expect."""

    completed: int = 0
    expected: int = 0
    copies: list[tuple[Pending, int]] = field(default_factory=list)


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, index: int) -> Barrier:
        return self.all[index]


class Cta:
    """Pending copies and GEMMs of a CTA."""

    def __init__(self, program: tuple[int, ...], num_warps: int) -> None:
        self.program, self.num_warps = program, num_warps
        self.group: list[Pending] = []
        self.groups: list[list[Pending]] = []
        self.products: list[Pending] = []


class Language:
    """`gl`, `tma` and the others together, for one CTA."""

    float32, int64, float16, bfloat16 = torch.float32, torch.int64, torch.float16, torch.bfloat16
    constexpr = None

    def __init__(self, cta: Cta) -> None:
        self.cta = cta

    def program_id(self, axis: int) -> int:
        return self.cta.program[axis]

    def num_warps(self) -> int:
        return self.cta.num_warps

    def _layout(self, *_: Any, **options: Any) -> None: ...

    NVMMADistributedLayout = SliceLayout = BlockedLayout = MBarrierLayout = _layout
    debug_barrier = fence_async_shared = init = wait_for_earlier = _layout

    def __getattr__(self, name: str) -> Any:
        assert name in ("mbarrier", "tma", "async_copy"), name
        return self

    def load(self, place: Pointer, mask: Any = None, other: float = 0.0) -> Any:
        return place.load(mask, other)

    def store(self, place: Pointer, values: Tensor, mask: Tensor | None = None) -> None:
        place.store(values, mask)

    def arange(self, first: int, last: int, _: Any = None) -> Tensor:
        return torch.arange(first, last)

    def full(self, size: list[int], value: float, dtype: torch.dtype, _: Any) -> Tensor:
        return torch.full(size, value, dtype=dtype)

    def convert_layout(self, values: Tensor, _: Any) -> Tensor:
        return values

    def minimum(self, one: Any, other: Any) -> Any:
        numbers = isinstance(one, int) and isinstance(other, int)
        return min(one, other) if numbers else torch.as_tensor(one).clamp(max=other)

    def maximum(self, one: Any, other: Any) -> Any:
        return torch.as_tensor(one).clamp(min=other)

    def static_range(self, count: int) -> range:
        return range(count)

    def allocate_shared_memory(self, dtype: torch.dtype, size: list[int], _: Any) -> Any:
        if dtype == torch.int64:
            return Barriers(size[0])
        return Shared(torch.full(size, float("nan")).to(dtype))

    def expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if pred:
            assert not barrier.expected, "expected twice"
            barrier.expected = num_bytes

    def wait(self, barrier: Barrier, phase: int) -> None:
        if barrier.completed % 2 == phase:  # this phase is not complete
            assert barrier.expected == sum(size for _, size in barrier.copies) > 0, "waits forever"
            for copy, _ in barrier.copies:
                copy()
            barrier.copies, barrier.expected = [], 0
            barrier.completed += 1
        assert barrier.completed % 2 != phase

    def async_copy_global_to_shared(self, source: Any, *rest: Any, **options: Any) -> None:
        if isinstance(source, Tiles):
            (row, column), barrier, shared = rest
            if options.get("pred", True):
                rows, columns = source.block_shape
                tile = source.matrix[row : row + rows, column : column + columns]
                copy = partial(shared.values.copy_, tile)
                barrier.copies.append((copy, source.block_type.nbytes))
            return
        (place,), mask = rest, options["mask"]  # source is the shared memory
        values = place.load(mask)
        self.cta.group.append(partial(source.values.copy_, values))

    def commit_group(self) -> None:
        self.cta.groups.append(self.cta.group)
        self.cta.group = []

    def wait_group(self, count: int) -> None:
        while len(self.cta.groups) > count:
            for copy in self.cta.groups.pop(0):
                copy()

    def warpgroup_mma(self, a: Shared, b: Shared, acc: Tensor, **options: Any) -> Tensor:
        assert options == {"use_acc": False, "is_async": True}
        out = torch.full_like(acc, float("nan"))
        self.cta.products.append(lambda: out.copy_(a.values.float() @ b.values.float()))
        return out

    def warpgroup_mma_wait(self, count: int, deps: list[Tensor]) -> Any:
        while len(self.cta.products) > count:
            self.cta.products.pop(0)()
        return deps[0] if len(deps) == 1 else deps


def emulated(function: Any, cta: Cta, replaced: dict[str, Any]) -> Callable[..., Any]:
    """Returns the function of a Gluon kernel, which calls other Gluon functions as emulated.

    Args:
        function: kernel or device function.
        cta: CTA in which it runs.
        replaced: globals of the function that are Triton's functions, and what runs instead.
    """
    language, inner = Language(cta), function.fn
    names: dict[str, Any] = dict(inner.__globals__)
    for name, member in inner.__globals__.items():
        if name in replaced:
            names[name] = replaced[name]
        elif name in ("gl", "tma", "mbarrier", "async_copy"):
            names[name] = language
        elif name in inner.__code__.co_names and hasattr(member, "is_gluon") and member.is_gluon():
            names[name] = emulated(member, cta, replaced)
        elif not name.startswith("__") and name in vars(Language):
            names[name] = getattr(language, name)
        elif type(member).__name__ == "constexpr":
            names[name] = member.value
    return types.FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__)
