"""The kernels that prepare drafts compile for each known GPU."""

import pytest
import torch

pytest.importorskip("triton")
from kernels import draft_states, step_entry
from kernels.device import KNOWN_DEVICES
from kernels.draft_places import KeptHidden
from tests.cases import first
from tests.gpu_compiler import compiled_launches

GPUS = ["h200", *(gpu for gpu in KNOWN_DEVICES if gpu != "h200")]


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(1, GPUS))
@pytest.mark.parametrize("max_drafts", [3, 8])
def test_the_kernel_of_draft_places_compiles(gpu: str, max_drafts: int) -> None:
    kept = KeptHidden(
        torch.zeros(18, 2048, dtype=torch.bfloat16), torch.zeros(18, 3, dtype=torch.int32)
    )
    groups = torch.zeros(4 + max_drafts, 2, dtype=torch.int32)
    with compiled_launches(KNOWN_DEVICES[gpu]) as launches:
        step_entry.draft_places(groups, groups[0], kept, groups, 3, 16)
    assert [launch.name for launch in launches] == ["_draft_kernel"]
    assert "st.global" in launches[0].ptx


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(1, GPUS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_hidden_states_compile(gpu: str, dtype: torch.dtype) -> None:
    kept = KeptHidden(torch.zeros(18, 2048, dtype=dtype), torch.zeros(18, 3, dtype=torch.int32))
    entered, positions = (torch.zeros(n, 4, dtype=torch.int32) for n in (2, 3))
    with compiled_launches(KNOWN_DEVICES[gpu]) as launches:
        draft_states.draft_sources(
            entered, entered[0], kept.hidden[:4], positions, kept, entered, 16
        )
        draft_states.keep_hidden(entered, kept.hidden[:4], positions, kept)
    assert [launch.name for launch in launches] == ["_source_kernel", "_keep_kernel"]
    assert all("st.global" in launch.ptx for launch in launches)
