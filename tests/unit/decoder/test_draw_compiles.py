"""The kernels of sampling compile for Hopper: the interpreter, which compares them with their
twins, knows no types.
"""

from typing import Any

import pytest

pytest.importorskip("triton")
from services.decoder.kernels import draw, penalties
from tests.gpu_compiler import compile_for_hopper

TYPES = {
    "logits_ptr": "*bf16", "floats_ptr": "*fp32", "top_k_ptr": "*i64", "work_ptr": "*fp64",
    "uniforms_ptr": "*fp64", "seen_ptr": "*i32", "rows_ptr": "*i64", "token_ids_ptr": "*i32",
    "out_ptr": "*i32", "penalized_ptr": "*fp32",
}  # fmt: skip
SIZES = {"VOCAB": 151_936, "PARTS": 32, "CHUNK": 4752, "SHIFT": 16, "SIZE": 1440}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (draw._peak_kernel, {**SIZES, "BLOCK": 512}),
        (draw._narrow_kernel, {**SIZES, "BLOCK": 512, "FIRST": 1}),
        (draw._narrow_kernel, {**SIZES, "BLOCK": 512, "FIRST": 0}),
        (draw._weigh_kernel, {**SIZES, "BLOCK": 512, "FIRST": 1}),
        (draw._weigh_kernel, {**SIZES, "BLOCK": 512, "FIRST": 0}),
        (draw._choose_kernel, {**SIZES, "BLOCK": 8192}),
        (penalties._penalize_kernel, {"VOCAB": 151_936, "BLOCK": 2048}),
        (penalties._count_kernel, {"VOCAB": 151_936, "ROWS": 128}),
    ],
)
def test_kernels_of_sampling_compile(kernel: Any, constants: dict[str, int]) -> None:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: TYPES.get(name, "i32") for name in names}
    warps = 8 if constants.get("BLOCK") == 8192 else 4
    compiled = compile_for_hopper(kernel, types, constants, num_warps=warps)
    assert "ld.global" in compiled.asm["ptx"]
