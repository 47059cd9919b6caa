"""Launches that `kernels.dependent_launch` relies on: they start after everything before them."""

import inspect

import pytest

pytest.importorskip("triton")
from kernels import draft_states, step_entry
from kernels.adapters import group_tokens

# Kernels read before their wait what these write.
WRITERS = [
    step_entry.enter_step,
    step_entry.draft_places,
    draft_states.draft_sources,
    draft_states.keep_hidden,
    group_tokens.group_tokens,
]


@pytest.mark.parametrize("function", WRITERS)
def test_kernels_that_prepare_a_step_are_launched_without_pdl(function: object) -> None:
    source = inspect.getsource(function)  # type: ignore[arg-type]
    assert "[(" in source and "pdl" not in source


def test_a_kernel_with_pdl_is_told_apart() -> None:
    assert "launch_pdl" in inspect.getsource(step_entry.rope_and_rows)
