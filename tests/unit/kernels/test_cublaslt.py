"""Our calls of cuBLASLt, against functions of its signatures that only record calls.

A GPU test shows that the results are right.
"""

import ctypes
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from kernels.gemm import cublaslt

X, WEIGHT, BIAS = torch.zeros(4096, 64), torch.zeros(128, 64), torch.zeros(128)
X, WEIGHT, BIAS = X.bfloat16(), WEIGHT.bfloat16(), BIAS.bfloat16()


class FakeFunctions:
    """The library: makes numbered things, counts calls, refuses what it is told to."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.status: dict[str, int] = {}
        self.matmuls: list[tuple[int, ...]] = []
        self.bias = 0
        self._made = 0
        for name, types in cublaslt._SIGNATURES.items():
            prototype = ctypes.CFUNCTYPE(ctypes.c_int, *types)
            setattr(self, f"cublasLt{name}", prototype(self._function(name)))

    def _function(self, name: str) -> Callable[..., int]:
        def called(*arguments: int) -> int:
            self.calls[name] += 1
            if name.endswith("Create"):
                self._made += 1
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = self._made
            if name == "MatmulDescSetAttribute" and arguments[1] == cublaslt._BIAS_POINTER:
                self.bias = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_uint64))[0]
            if name == "Matmul":
                self.matmuls.append(arguments)
            return self.status.get(name, 0)

        return called


class FakeDevice:
    """A device with the SMs of an H200, whose memory is the host's."""

    num_sms = 132
    workspace = torch.empty(256, dtype=torch.uint8)

    def stream(self) -> int:
        return 77


@pytest.fixture
def functions() -> FakeFunctions:
    return FakeFunctions()


def linear(library: cublaslt.Library, x: torch.Tensor = X) -> torch.Tensor | None:
    return cublaslt.linear(x, WEIGHT, library=library)


def test_a_gemm_is_made_once_and_launched_each_time(functions: FakeFunctions) -> None:
    library = cublaslt.Library(FakeDevice(), functions)
    results = [cublaslt.linear(X, WEIGHT, BIAS, gelu=True, library=library) for _ in range(3)]
    assert functions.calls["MatmulAlgoCheck"] == 1 and functions.calls["Matmul"] == 3
    assert functions.bias == BIAS.data_ptr()
    for result, arguments in zip(results, functions.matmuls, strict=True):
        assert result is not None and result.shape == (4096, 128)
        # cuBLAS' first factor is the weight; the stream is the last argument.
        assert (arguments[3], arguments[5]) == (WEIGHT.data_ptr(), X.data_ptr())
        assert arguments[8] == arguments[10] == result.data_ptr() and arguments[15] == 77


def test_a_refused_choice_is_not_tried_again(functions: FakeFunctions) -> None:
    functions.status["MatmulAlgoCheck"] = 15
    library = cublaslt.Library(FakeDevice(), functions)
    assert [linear(library) for _ in range(3)] == [None] * 3
    assert functions.calls["MatmulAlgoCheck"] == 1 and functions.calls["Matmul"] == 0


def test_what_is_refused_at_its_launch_is_torchs(functions: FakeFunctions) -> None:
    library = cublaslt.Library(FakeDevice(), functions)
    functions.status["Matmul"] = 7
    assert linear(library) is None
    functions.status.clear()
    assert linear(library) is not None


def test_descriptors_of_many_sizes_are_released(functions: FakeFunctions) -> None:
    library = cublaslt.Library(FakeDevice(), functions, max_gemms=4)
    for size in range(2048, 2058):
        assert linear(library, X[:size]) is not None
    calls = functions.calls
    assert (calls["MatmulDescCreate"], calls["MatmulDescDestroy"]) == (10, 8)
    assert (calls["MatrixLayoutCreate"], calls["MatrixLayoutDestroy"]) == (30, 24)


def test_without_the_library_all_is_torchs(
    functions: FakeFunctions, caplog: pytest.LogCaptureFixture
) -> None:
    functions.status["Create"] = 1
    library = cublaslt.Library(FakeDevice(), functions)
    assert [linear(library) for _ in range(3)] == [None] * 3
    assert len([r for r in caplog.records if "torch computes it" in r.message]) == 1


@pytest.mark.parametrize(
    ("size", "tile"),
    [
        # A lone prompt of an eighth of its tokens to a tile: 2,048 features are 128 tiles of 132.
        ((1024, 2048, 2048), 128),
        ((1088, 4096, 2048), 136),
        ((1152, 2048, 6144), 144),
        ((1280, 12288, 2048), 160),
        # The vision tower's, of an image of 1024².
        ((4096, 3072, 1024), 152),
        ((4096, 1024, 1024), 128),
        # The 8B's: at the power limit also with sums of medium length.
        ((8064, 4096, 4096), 168),
        ((8064, 6144, 4096), 128),
        # Left to cuBLAS: few tokens, medium sums of a lone prompt, long sums.
        ((512, 2048, 2048), 0),
        ((1008, 6144, 4096), 0),
        ((1008, 4096, 4096), 0),
        ((8064, 4096, 12288), 0),
        # The 30B-A3B's q/k/v: where cuBLAS needs no memset, and beside that.
        ((960, 5120, 2048), 160),
        ((1024, 5120, 2048), 0),
        ((1216, 5120, 2048), 0),
        ((1280, 5120, 2048), 80),
        ((8064, 5120, 2048), 144),
    ],
)
def test_tiles_fill_the_sms(size: tuple[int, int, int], tile: int) -> None:
    assert cublaslt.tile_tokens(*size, num_sms=132) == tile


def test_what_is_left_to_torch_by_design_is_no_warning() -> None:
    x, weight = torch.zeros(4096, 64), torch.zeros(128, 64)  # float32
    assert cublaslt.linear(x, weight) is None
