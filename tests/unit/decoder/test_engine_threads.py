"""The threads that torch divides computations on the CPU among, in an engine's process."""

from typing import Any
from unittest import mock

import pytest
import torch

from services.common.nn.collectives import ALONE
from services.decoder import engine_main
from services.decoder.settings import DecoderSettings


class _Loaded(Exception):
    """Ends an engine that has loaded its model."""


@pytest.mark.parametrize(("device", "wanted"), [("cuda:0", 1), ("cpu", 3)])
def test_an_engine_with_a_gpu_has_one_thread_once_its_model_is_loaded(
    device: str, wanted: int
) -> None:
    before, found = torch.get_num_threads(), list[int]()

    def load(*_: Any) -> mock.Mock:
        found.append(torch.get_num_threads())
        return mock.Mock()

    def step(*_: Any) -> None:
        found.append(torch.get_num_threads())
        raise _Loaded

    torch.set_num_threads(3)
    try:
        with (
            mock.patch.object(engine_main, "create_runner", load),
            mock.patch.object(engine_main, "measured_cost", step),
            mock.patch.object(engine_main, "runner_options"),
            pytest.raises(_Loaded),
        ):
            engine_main._serve(mock.Mock(), DecoderSettings.model_construct(), device, ALONE, None)
    finally:
        torch.set_num_threads(before)
    assert found == [3, wanted]
