"""Quantized checkpoints of Qwen2.5-VL and Qwen2-VL, whose language model has the biases and the
older names of Qwen2's, and of PaddleOCR-VL, which has names of its own and may have biases
everywhere.
"""

from pathlib import Path

import pytest

from tests import fp8_checkpoints, packed_checkpoints
from tests.parity.oracle import Tiny
from tests.parity.quantized import EARLIER, Quantized, Writer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("writer", "name"),
    [(fp8_checkpoints.write, "compressed-channel"), (packed_checkpoints.write, "ct-64-zeros")],
    ids=["fp8", "w4a16"],
)
@pytest.mark.parametrize("tiny", EARLIER.values(), ids=EARLIER)
def test_logits_are_those_of_the_meant_weights(
    tiny: Tiny, writer: Writer, name: str, tmp_path: Path
) -> None:
    Quantized(tiny, tmp_path, writer).check(name)
