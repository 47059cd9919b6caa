"""Quantized checkpoints of Qwen2.5-VL, whose language model has the biases and the older names of
Qwen2's.
"""

from pathlib import Path

import pytest

from tests import fp8_checkpoints, packed_checkpoints
from tests.parity.quantized import WINDOWS, Quantized, Writer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("writer", "name"),
    [(fp8_checkpoints.write, "compressed-channel"), (packed_checkpoints.write, "ct-64-zeros")],
    ids=["fp8", "w4a16"],
)
def test_logits_are_those_of_the_meant_weights(writer: Writer, name: str, tmp_path: Path) -> None:
    Quantized(WINDOWS, tmp_path, writer).check(name)
