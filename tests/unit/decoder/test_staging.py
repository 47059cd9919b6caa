"""Arrays in a staging buffer: apart, padded, and refused where there is no room."""

import numpy as np
import pytest
import torch

from services.decoder.engine.run.staging import Staging


def test_it_packs_apart_and_refuses_too_much() -> None:
    staging = Staging(256, torch.device("cpu"))
    arrays = [np.arange(3, dtype=np.int32), np.ones((2, 2)), np.empty(0, np.int64)]
    for _ in range(5):
        staging.begin()
        places = [staging.add(array) for array in arrays]
        staging.upload()
        for place, array in zip(places, arrays, strict=True):
            assert np.array_equal(staging.device(place).numpy(), array)
    with pytest.raises(RuntimeError, match="staging"):
        staging.add(np.zeros(100))


def test_it_pads_and_shows_what_lies_behind() -> None:
    staging = Staging(256, torch.device("cpu"))
    staging.begin()
    short = staging.add(np.array([[1, 2], [3, 4]], np.int32), size=3)
    last = staging.add(np.array([5, 6], np.int32))
    staging.upload()
    assert staging.device(short).tolist() == [[1, 2, 0], [3, 4, 0]]
    assert staging.device(last).tolist() == [5, 6]
