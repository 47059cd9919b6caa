"""Compiles kernels of Triton and Gluon for a GPU that need not be there."""

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource


def compile_for_hopper(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: Any
) -> Any:
    """As it is launched, by four warps if `options` do not say otherwise, with pointers to
    multiples of 16 bytes.
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
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}
    )


def copies_see_their_barriers(ptx: str) -> bool:
    """Whether a fence stands between the making of barriers and the next copy that reports to one:
    the copy engine need not see them otherwise.
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
