"""Quantized checkpoints for late interaction: the vectors of tokens are those of the weights that
are meant, in FP8 and W4A16. The projection behind the language model stays unquantized.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from services.common.families import read_spec
from tests import fp8_checkpoints, packed_checkpoints
from tests.late_interaction import Late
from tests.parity.oracle import Oracle, make_oracle
from tests.parity.quantized import SHAPES, Writer
from tests.parity.qwen3_5_oracle import CONFIGS as HYBRIDS
from tests.parity.qwen3_5_oracle import make_qwen3_5
from tests.parity.test_pooling import TOLERANCE
from tests.parity.test_token_vectors import TokenBench

pytestmark = pytest.mark.usefixtures("one_thread")

BASES: dict[str, Callable[[Path], Oracle]] = {
    "colqwen3": lambda path: make_oracle(SHAPES["partial-blocks"], path),
    "colqwen3_5": lambda path: make_qwen3_5(
        replace(HYBRIDS["repeated-twice-tied"], hidden=192, layers=4), path
    ),
}
FORMATS = {
    "fp8": (fp8_checkpoints.write, "compressed-channel"),
    "w4a16": (packed_checkpoints.write, "ct-64-zeros"),
}


def is_quantized(module: str) -> bool:
    """The layers of the language model, except the gates and the convolution of linear attention,
    as in published checkpoints.
    """
    plain = ("in_proj_a", "in_proj_b", "conv1d")
    return "language_model.layers" in module and not module.endswith(plain)


def as_loaded(name: str) -> str:
    """Transformers' name of a tensor of a file for late interaction."""
    name = name.removeprefix("vlm.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(("writer", "layout"), FORMATS.values(), ids=FORMATS)
def test_vectors_are_those_of_the_meant_weights(
    writer: Writer, layout: str, name: str, tmp_path: Path
) -> None:
    late = Late(BASES[name](tmp_path / "source"))
    original = TokenBench(late).expected
    meant: dict[str, Tensor] = writer(
        tmp_path / "source", tmp_path / "quantized", layout, modules=is_quantized
    )
    loaded = {
        as_loaded(key): tensor
        for key, tensor in meant.items()
        if not key.startswith(("embedding_proj_layer.", "custom_text_proj.", "mtp."))
    }
    missing, unexpected = late.oracle.model.load_state_dict(loaded, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    directory = tmp_path / "quantized"
    late.oracle = Oracle(directory, late.oracle.model, read_spec(directory))
    bench = TokenBench(late)
    bench.check(bench.ask(bench.engine(max_batched_tokens=40), range(len(bench.questions))))
    pairs = zip(bench.expected, original, strict=True)
    assert max(float(np.abs(new - old).max()) for new, old in pairs) > 100 * TOLERANCE
