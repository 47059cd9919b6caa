"""The sampling kernels compile for each known GPU and fit its shared memory: the interpreter, which
compares them with their twins, does not check types.
"""

from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.device import KNOWN_DEVICES
from kernels.sampling import greedy, penalties, top_k_top_p_sampling
from kernels.sampling.sampling import MaskedRows
from tests.cases import first
from tests.gpu_compiler import compiled_launches
from tests.sampling_twins import Row, mask_of, sampling_inputs

VOCAB_SIZE = 151_936
KERNELS = {"_row_max_kernel", "_threshold_kernel", "_kept_mass_kernel", "_inverse_cdf_kernel"}
GPUS = ["h200", "l40s", *(gpu for gpu in KNOWN_DEVICES if gpu not in ("h200", "l40s"))]
EVERYTHING, NOTHING = Row(1.0, top_k=20, top_p=0.9), Row(1.0)


# Each GPU and each way at night; the H200 runs all of them in tests/gpu.
WAYS = [
    ("h200", EVERYTHING, True, torch.bfloat16),
    ("l40s", NOTHING, True, torch.bfloat16),
    ("a100", EVERYTHING, False, torch.bfloat16),
    ("b200", EVERYTHING, True, torch.float32),
    ("h100", EVERYTHING, True, torch.bfloat16),
    ("rtx-pro-6000", EVERYTHING, True, torch.bfloat16),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("gpu", "row", "masked", "dtype"), first(2, WAYS))
def test_sampling_kernels_compile(gpu: str, row: Row, masked: bool, dtype: torch.dtype) -> None:
    facts = KNOWN_DEVICES[gpu]
    mask = mask_of(np.ones(VOCAB_SIZE, np.bool_)) if masked else None
    inputs = sampling_inputs(
        [row] * 2, np.full(2, 0.5), VOCAB_SIZE, torch.device("cpu"), masks=[mask, None]
    )
    logits = torch.zeros(2, VOCAB_SIZE, dtype=dtype)
    with compiled_launches(facts) as launches:
        top_k_top_p_sampling.sample(logits, inputs)
    expected = KERNELS if row is EVERYTHING else KERNELS - {"_threshold_kernel"}
    assert {launch.name for launch in launches} == expected
    assert all(launch.shared_bytes <= facts.shared_memory_bytes for launch in launches)
    assert all("ld.global" in launch.ptx for launch in launches)


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(2, GPUS))
def test_penalty_kernels_compile(gpu: str) -> None:
    facts = KNOWN_DEVICES[gpu]
    inputs = sampling_inputs([NOTHING] * 2, np.full(2, 0.5), VOCAB_SIZE, torch.device("cpu"))
    inputs = inputs._replace(seen=torch.zeros(2, VOCAB_SIZE, dtype=torch.int32))
    with compiled_launches(facts) as launches:
        penalties.penalize(torch.zeros(2, VOCAB_SIZE, dtype=torch.bfloat16), inputs)
        penalties.count_tokens(torch.zeros(2, dtype=torch.int32), inputs)
    assert [launch.name for launch in launches] == ["_penalize_kernel", "_count_kernel"]
    assert all(launch.shared_bytes <= facts.shared_memory_bytes for launch in launches)


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(2, GPUS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_kernels_under_masks_compile(gpu: str, dtype: torch.dtype) -> None:
    facts = KNOWN_DEVICES[gpu]
    rows = torch.arange(2)
    masked = MaskedRows(rows, rows, torch.zeros(2, VOCAB_SIZE // 32, dtype=torch.int32))
    token_ids = torch.zeros(2, dtype=torch.int32)
    with compiled_launches(facts) as launches:
        greedy.greedy_masked(
            torch.zeros(2, VOCAB_SIZE, dtype=dtype), masked, token_ids, token_ids.clone()
        )
    assert [launch.name for launch in launches] == ["_masked_split_kernel", "_masked_merge_kernel"]
    assert all(launch.shared_bytes <= facts.shared_memory_bytes for launch in launches)


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(2, GPUS))
@pytest.mark.parametrize("width", [2048, 5120])
def test_kernels_of_rescored_tokens_compile(gpu: str, width: int) -> None:
    facts = KNOWN_DEVICES[gpu]
    weight = torch.empty(1, dtype=torch.bfloat16).expand(VOCAB_SIZE, width)
    with (
        mock.patch.object(torch.Tensor, "is_contiguous", return_value=True),
        compiled_launches(facts) as launches,
    ):
        logits, hidden = weight[:1, :1].expand(2, VOCAB_SIZE), weight[:2]
        greedy.greedy_rescored(logits, hidden, weight)
    assert [launch.name for launch in launches] == ["_rescoring_kernel", "_merge_kernel"]
    assert all(launch.shared_bytes <= facts.shared_memory_bytes for launch in launches)
