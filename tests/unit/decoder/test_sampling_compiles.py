"""The sampling kernels compile for Hopper: the interpreter, which compares them with their twins,
does not check types.
"""

from typing import Any

import pytest

pytest.importorskip("triton")
from services.decoder.kernels import penalties
from services.decoder.kernels import top_k_top_p_sampling as sampling
from tests.gpu_compiler import compile_for_hopper

TYPES = {
    "logits_ptr": "*bf16", "masks_ptr": "*i32", "mask_index_ptr": "*i64", "floats_ptr": "*fp32",
    "top_k_ptr": "*i64", "workspace_ptr": "*fp64", "uniforms_ptr": "*fp64", "seen_ptr": "*i32",
    "rows_ptr": "*i64", "token_ids_ptr": "*i32", "out_ptr": "*i32", "penalized_ptr": "*fp32",
}  # fmt: skip
SIZES = {"VOCAB": 151_936, "SPLITS": 32, "CHUNK": 4752, "SHIFT": 16, "SIZE": 1440}


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        (sampling._row_max_kernel, {**SIZES, "MASKED": 0, "BLOCK": 512}),
        (sampling._row_max_kernel, {**SIZES, "MASKED": 1, "BLOCK": 512}),
        (sampling._threshold_kernel, {**SIZES, "MASKED": 0, "BLOCK": 512, "FIRST": 1}),
        (sampling._threshold_kernel, {**SIZES, "MASKED": 1, "BLOCK": 512, "FIRST": 1}),
        (sampling._threshold_kernel, {**SIZES, "MASKED": 0, "BLOCK": 512, "FIRST": 0}),
        (sampling._threshold_kernel, {**SIZES, "MASKED": 1, "BLOCK": 512, "FIRST": 0}),
        (sampling._kept_mass_kernel, {**SIZES, "MASKED": 0, "BLOCK": 512, "FIRST": 1}),
        (sampling._kept_mass_kernel, {**SIZES, "MASKED": 1, "BLOCK": 512, "FIRST": 1}),
        (sampling._kept_mass_kernel, {**SIZES, "MASKED": 0, "BLOCK": 512, "FIRST": 0}),
        (sampling._kept_mass_kernel, {**SIZES, "MASKED": 1, "BLOCK": 512, "FIRST": 0}),
        (sampling._inverse_cdf_kernel, {**SIZES, "MASKED": 0, "BLOCK": 8192}),
        (sampling._inverse_cdf_kernel, {**SIZES, "MASKED": 1, "BLOCK": 8192}),
        (penalties._penalize_kernel, {"VOCAB": 151_936, "BLOCK": 2048}),
        (penalties._count_kernel, {"VOCAB": 151_936, "ROWS": 128}),
    ],
)
def test_sampling_kernels_compile(kernel: Any, constants: dict[str, int]) -> None:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {name: TYPES.get(name, "i32") for name in names}
    warps = 8 if constants.get("BLOCK") == 8192 else 4
    compiled = compile_for_hopper(kernel, types, constants, num_warps=warps)
    assert "ld.global" in compiled.asm["ptx"]
