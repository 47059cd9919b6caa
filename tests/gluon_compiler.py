"""Compiles Gluon's kernels for a GPU that need not be there."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource


def compile_for_hopper(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> Any:
    """As four warps launch it, with pointers to multiples of 16 bytes."""
    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*")
    }
    source = GluonASTSource(
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
