"""GEMMs on Hopper by kernels of cuBLASLt with a tile that this module chooses.

cuBLAS chooses a kernel by time alone. A busy H200 is at its power limit, where a kernel with
another tile needs up to a sixth less energy and thus less time. For a single prompt, the tile is
chosen so that the tiles fill whole waves of CTAs. The order of the sums is the same, so results are
bitwise equal to those of `F.linear`. If the library refuses a choice, because of another version or
another device, callers use torch instead.

Names and numbers are those of `cublasLt.h`.
"""

import ctypes
import functools
import logging
from ctypes import Structure, addressof, byref, c_float, c_int, c_size_t, c_void_p, sizeof
from typing import Any, Protocol

import torch
from torch import Tensor

_BF16, _FP16, _FP32, _COMPUTE_FP32 = 14, 2, 0, 68
_TRANSA, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_TRANSPOSED = 1
_PLAIN, _WITH_BIAS, _GELU_BIAS = 1, 4, 36
_TILE, _STAGES, _CUSTOM, _CLUSTER = 1, 6, 5, 8
# Algorithm with the kernels for Hopper; 64 columns of K per stage, with as many stages as fit;
# clusters of two tiles of features that share their tokens; schedule that needs the least energy.
_ALGORITHM, _STAGES_64_AUTO, _CLUSTER_2X1, _SCHEDULE = 66, 35, 3, 1
# Values of CUBLASLT_MATMUL_TILE_128x<tokens>, by number of tokens.
_TILE_IDS = {
    64: 18, 72: 399, 80: 400, 88: 401, 96: 33, 104: 402, 112: 403, 120: 404, 128: 20, 136: 405,
    144: 406, 152: 407, 160: 29, 168: 408,
}  # fmt: skip
_FEATURES = 128  # features of a tile
# Numbers of tokens of a tile. With more, the epilogue of a tile does not overlap the next tile.
_TILES = range(64, 169, 8)
_END = 12  # cost of a tile's epilogue, as a number of tokens
# Limits that were measured on an H200. cuBLAS' choice is better for fewer tokens, and also if a
# long sum hides the epilogue of its large tiles and these fill their waves well enough. For sums of
# medium length, the tiles chosen here are faster if many tokens keep the GPU at its power limit.
LEAST_TOKENS, _MEDIUM_SUM, _LONG_SUM = 832, 2048, 4096
_POWER_LIMITED_TOKENS = 2048
# Shapes (N, K) of a weight and numbers of tokens of a single prompt for which the tiles chosen here
# take several waves. This needs a memset before the kernel, which does not overlap another kernel.
# cuBLAS' own choice does not need it and is faster by a tenth to a sixth.
_FASTER_BY_CUBLAS = {(5120, 2048): range(1024, 1217)}
_LARGE_TILE, _LONG_FILL, _MEDIUM_FILL = 128 * 256, 0.9, 0.7
_MAX_KEPT = 4096
_WORKSPACE_BYTES = 256  # tile counters of kernels that schedule tiles dynamically


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gelu: bool = False,
    residual: Tensor | None = None,
    library: "Library | None" = None,
) -> Tensor | None:
    """Computes `x @ weight.T`, optionally with bias, GELU (tanh) and residual, rounded once.

    Args:
        x: `[T, K]`, bfloat16 or float16.
        weight: `[N, K]`.
        bias: `[N]`. None if there is no bias. Required for `gelu`.
        gelu: True if GELU is applied.
        residual: contiguous `[T, N]`, which is added and whose memory gets the result. None if
            nothing is added.
        library: the library that computes. Defaults to the one that torch has loaded, for tensors
            on CUDA.

    Returns:
        Result `[T, N]`. None if nothing was computed, because torch is as fast or the library
        refuses.
    """
    num_tokens, num_columns = x.shape
    adds_both = residual is not None and bias is not None
    if num_tokens < LEAST_TOKENS or x.itemsize != 2 or not x.is_contiguous():
        return None
    if library is None and x.is_cuda:
        library = _library_of_torch()
    if library is None:
        return None
    shape = (num_tokens, len(weight), num_columns)
    tile = tile_tokens(*shape, num_sms=library.device.num_sms, adds_both=adds_both)
    if tile == 0:
        return None
    epilogue = _PLAIN if bias is None else _GELU_BIAS if gelu else _WITH_BIAS
    out = x.new_empty(num_tokens, len(weight)) if residual is None else residual
    try:
        gemm = library.gemm(shape, x.dtype, epilogue, tile)
        gemm.run(x, weight, bias, out, add=residual is not None)
    except Refused as why:
        library.report(str(why))
        return None
    return out


def tile_tokens(
    num_tokens: int, num_rows: int, num_columns: int, *, num_sms: int, adds_both: bool = False
) -> int:
    """Number of tokens of a tile of 128 features. 0 if cuBLAS' own choice is better.

    Args:
        num_tokens, num_rows, num_columns: shape of the GEMM.
        num_sms: number of SMs of the device.
        adds_both: True if a bias and a residual are added, for which torch needs two kernels.
    """
    if num_tokens < LEAST_TOKENS:
        return 0
    if not adds_both and num_tokens in _FASTER_BY_CUBLAS.get((num_rows, num_columns), ()):
        return 0
    if not adds_both and num_columns > _MEDIUM_SUM:
        fill = _large_tile_fill(num_tokens, num_rows, num_sms)
        if num_columns > _LONG_SUM:
            if fill >= _LONG_FILL:
                return 0
        elif num_tokens < _POWER_LIMITED_TOKENS and fill >= _MEDIUM_FILL:
            return 0
    return _cheapest_tile(num_tokens, num_rows, num_sms)


def _large_tile_fill(num_tokens: int, num_rows: int, num_sms: int) -> float:
    """Share of the SMs that cuBLAS' large tiles keep busy."""
    tiles = -(-num_tokens * num_rows // _LARGE_TILE)
    return tiles / (-(-tiles // num_sms) * num_sms)


@functools.lru_cache(_MAX_KEPT)
def _cheapest_tile(num_tokens: int, num_rows: int, num_sms: int) -> int:
    """Chooses the tile with the least estimated time.

    Tiles run in waves of one tile per SM. The time of a wave is estimated by the width of its tiles
    plus a constant for the epilogue.
    """

    def cost(tokens: int) -> int:
        tiles = -(-num_tokens // tokens) * -(-num_rows // _FEATURES)
        return -(-tiles // num_sms) * (tokens + _END)

    return min(_TILES, key=cost)


class _Algorithm(Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Checked(Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Refused(Exception):
    """The library refused a kernel."""


class _Gemm:
    """Descriptors of a GEMM. Matrices of cuBLAS are column-major, so that a weight is `[K, N]`."""

    def __init__(
        self,
        library: "Library",
        num_tokens: int,
        num_rows: int,
        num_columns: int,
        dtype: int,
        epilogue: int,
        tile: int,
    ) -> None:
        self._library = library
        self._layouts = [
            library.made("MatrixLayoutCreate", dtype, *sizes)
            for sizes in (
                (num_columns, num_rows, num_columns),
                (num_columns, num_tokens, num_columns),
                (num_rows, num_tokens, num_rows),
            )
        ]
        self._how = library.made("MatmulDescCreate", _COMPUTE_FP32, _FP32)
        library.set("MatmulDescSetAttribute", self._how, _TRANSA, c_int(_TRANSPOSED))
        library.set("MatmulDescSetAttribute", self._how, _EPILOGUE, c_int(epilogue))
        self._algorithm = _Algorithm()
        library.call(
            "MatmulAlgoInit",
            library.handle,
            _COMPUTE_FP32,
            _FP32,
            dtype,
            dtype,
            dtype,
            dtype,
            _ALGORITHM,
            byref(self._algorithm),
        )
        for attribute, value in (
            (_TILE, c_int(_TILE_IDS[tile])),
            (_STAGES, c_int(_STAGES_64_AUTO)),
            (_CLUSTER, ctypes.c_uint16(_CLUSTER_2X1)),
            (_CUSTOM, c_int(_SCHEDULE)),
        ):
            library.set(
                "MatmulAlgoConfigSetAttribute", addressof(self._algorithm), attribute, value
            )
        checked = _Checked()
        weight, x, out = self._layouts
        library.call(
            "MatmulAlgoCheck",
            library.handle,
            self._how,
            weight,
            x,
            out,
            out,
            byref(self._algorithm),
            byref(checked),
        )
        if checked.workspace_bytes > _WORKSPACE_BYTES:
            raise Refused(f"the kernel needs {checked.workspace_bytes} bytes of workspace")

    def close(self) -> None:
        """Destroys the descriptors. Kernels that are running do not need them any more."""
        for layout in self._layouts:
            self._library.call("MatrixLayoutDestroy", layout)
        self._library.call("MatmulDescDestroy", self._how)

    def run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool
    ) -> None:
        """Launches the kernel on the current stream.

        Args:
            x: `[T, K]`.
            weight: `[N, K]`.
            bias: `[N]`. None if the epilogue has no bias.
            out: tensor for the result, `[T, N]`.
            add: True if the result is added to `out`.

        Raises:
            Refused: the library does not launch the kernel.
        """
        library = self._library
        if bias is not None:
            pointer = c_void_p(bias.data_ptr())
            library.set("MatmulDescSetAttribute", self._how, _BIAS_POINTER, pointer)
        of_weight, of_x, of_out = self._layouts
        library.call(
            "Matmul",
            library.handle,
            self._how,
            library.one,
            weight.data_ptr(),
            of_weight,
            x.data_ptr(),
            of_x,
            library.one if add else library.zero,
            out.data_ptr(),
            of_out,
            out.data_ptr(),
            of_out,
            addressof(self._algorithm),
            library.device.workspace.data_ptr(),
            _WORKSPACE_BYTES,
            library.device.stream(),
        )


class Device(Protocol):
    """The device on which kernels of the library run.

    Attributes:
        num_sms: number of SMs.
        workspace: memory of the device for the library's kernels, `[_WORKSPACE_BYTES]`, uint8.
    """

    num_sms: int
    workspace: Tensor

    def stream(self) -> int:
        """Handle of the current stream."""
        ...


class _TorchDevice:
    """The CUDA device that torch uses at present."""

    def __init__(self) -> None:
        self.num_sms: int = torch.cuda.get_device_properties(None).multi_processor_count
        with torch.inference_mode(False):  # the workspace is used inside and outside of this mode
            self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream


class Library:
    """The cuBLASLt library on a device, and the GEMMs that were made so far.

    A library that cannot be used refuses each GEMM.

    Args:
        device: the device on which the kernels run.
        functions: the loaded library. Defaults to the library that torch has loaded.
        max_gemms: number of GEMMs that are kept for their next use.
    """

    def __init__(
        self,
        device: Device,
        functions: Any = None,  # noqa: ANN401
        *,
        max_gemms: int = _MAX_KEPT,
    ) -> None:
        self.device = device
        self._max_gemms = max_gemms
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self.one, self.zero = addressof(self._one), addressof(self._zero)
        # GEMMs by their key, or the reason why the library refused.
        self._gemms: dict[tuple[object, ...], _Gemm | str] = {}
        self._reported: set[str] = set()
        self._refusal = ""  # the reason why the library refuses each GEMM
        try:
            self._functions = functions or _functions_of_torch()
            for name, types in _SIGNATURES.items():
                function = getattr(self._functions, f"cublasLt{name}")
                function.argtypes, function.restype = types, c_int
            self.handle = self.made("Create")
        except (OSError, AttributeError, Refused) as why:
            self._refusal = str(why)

    def report(self, why: str) -> None:
        """Warns of a refusal, once for each reason."""
        if why not in self._reported:
            self._reported.add(why)
            message = "cuBLASLt refuses a GEMM with a chosen tile; torch computes it: %s"
            logging.warning(message, why)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library. Raises Refused if it fails."""
        status = getattr(self._functions, f"cublasLt{name}")(*arguments)
        if status:
            raise Refused(f"cublasLt{name} returned {status}")

    def made(self, name: str, *arguments: object) -> int:
        """Calls a function that creates an object, and returns the object's handle."""
        pointer = c_void_p()
        self.call(name, byref(pointer), *arguments)
        assert pointer.value is not None
        return pointer.value

    def set(self, name: str, target: int, attribute: int, value: Any) -> None:  # noqa: ANN401
        """Sets an attribute to a ctypes value."""
        self.call(name, target, attribute, addressof(value), sizeof(value))

    def gemm(
        self, shape: tuple[int, int, int], dtype: torch.dtype, epilogue: int, tile: int
    ) -> _Gemm:
        """Returns the GEMM of a shape `(tokens, rows, columns)`, which is made at its first use.

        Raises:
            Refused: the library cannot be used or refuses the GEMM, or refused it at its first use.
        """
        if self._refusal:
            raise Refused(self._refusal)
        key = (shape, dtype, epilogue, tile)
        if (found := self._gemms.get(key)) is None:
            if len(self._gemms) >= self._max_gemms:
                self._close_all()
            kind = _BF16 if dtype == torch.bfloat16 else _FP16
            try:
                found = _Gemm(self, *shape, kind, epilogue, tile)
            except Refused as why:
                found = str(why)
            self._gemms[key] = found
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _close_all(self) -> None:
        for found in self._gemms.values():
            if isinstance(found, _Gemm):
                found.close()
        self._gemms.clear()


def _functions_of_torch() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")


@functools.cache
def _library_of_torch() -> Library | None:
    if torch.cuda.get_device_capability()[0] != 9:
        return None
    return Library(_TorchDevice())


_POINTER = c_void_p
_SIGNATURES = {
    "Create": (_POINTER,),
    "MatrixLayoutCreate": (_POINTER, c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "MatmulDescCreate": (_POINTER, c_int, c_int),
    "MatmulDescSetAttribute": (_POINTER, c_int, _POINTER, c_size_t),
    "MatrixLayoutDestroy": (_POINTER,),
    "MatmulDescDestroy": (_POINTER,),
    "MatmulAlgoInit": (_POINTER, *(c_int,) * 7, _POINTER),
    "MatmulAlgoConfigSetAttribute": (_POINTER, c_int, _POINTER, c_size_t),
    "MatmulAlgoCheck": (_POINTER,) * 8,
    "Matmul": (*(_POINTER,) * 14, c_size_t, _POINTER),
}
