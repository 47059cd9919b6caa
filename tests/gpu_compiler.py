"""Compiles kernels of Triton and Gluon for GPUs that need not be there.

`compiled_launches(gpu)` compiles what a function would launch: call the function with CPU tensors
inside and look at the compiled kernels, their PTX and metadata. `kernels.device` has
the facts of known GPUs.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.device import KNOWN_DEVICES, DeviceFacts


@dataclass(frozen=True)
class CompiledLaunch:
    """One launch, compiled: `metadata.shared` is its shared memory in bytes."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)
    kernel: Any = field(repr=False)

    @property
    def shared_bytes(self) -> int:
        return self.kernel.metadata.shared

    @property
    def ptx(self) -> str:
        return self.kernel.asm["ptx"]


@contextmanager
def compiled_launches(gpu: DeviceFacts) -> Iterator[list[CompiledLaunch]]:
    """Kernels that are launched inside are compiled for `gpu` instead, and collected.

    Raises:
        triton.CompilationError, RuntimeError: a kernel does not compile.
    """
    target = target_of(gpu)
    backend = make_backend(target)
    found: list[CompiledLaunch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        options.setdefault("debug", False)
        bind = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, rest = bind(*args, **options)
        parsed, signature, constants, attributes = self._pack_args(
            backend, options, bound, specialization, rest
        )
        source = (GluonASTSource if self.is_gluon() else ASTSource)(
            self, signature, constants, attributes
        )
        kernel = triton.compile(source, target=target, options=parsed.__dict__)
        shape = tuple(grid(bound) if callable(grid) else grid)
        found.append(CompiledLaunch(self.__name__, shape, bound, kernel))
        return kernel

    with mock.patch.object(JITFunction, "run", run):
        yield found


def target_of(gpu: DeviceFacts) -> GPUTarget:
    return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)


def compile_for_hopper(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    """By signature, with pointers to multiples of 16 bytes; by four warps if `options` do not say
    otherwise.
    """
    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*")
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    return triton.compile(
        source, target=target_of(KNOWN_DEVICES["h100"]), options={"num_warps": 4, **options}
    )


def copies_see_their_barriers(ptx: str) -> bool:
    """Whether a fence stands between the initialisation of mbarriers and the next TMA copy that
    reports to one; otherwise the copy need not see them.
    """
    fenced, copies = True, 0
    for found in re.findall(r"mbarrier\.init|fence\.proxy\.async|cp\.async\.bulk", ptx):
        if found == "cp.async.bulk":
            copies += 1
            if not fenced:
                return False
        else:
            fenced = found == "fence.proxy.async"
    return copies > 0
