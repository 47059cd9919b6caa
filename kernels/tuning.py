"""Tuned constants of the decoder's GEMM kernels, by size class: the one place that has them.

`benchmarks.kernels.tune_kernels` times the candidates on a GPU and prints rows for the tables. A
GEMM without a row gets its constants by the rules below, which need the device's facts alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kernels.device import DeviceFacts
from kernels.launches import LAUNCH_HIDING_TOKENS as LAUNCH_HIDING_TOKENS

# From this many tokens a GEMM that adds to the residual stream beats a GEMM and a fused norm
# (H200: cuBLAS' own choice is better below).
RESIDUAL_GEMM_TOKENS = 832
GEMV_TOKENS = 1  # above, tensor cores are faster
SKINNY_TOKENS = 64  # above, cuBLAS is faster
# Steps are captured as CUDA graphs up to these sizes: above, the device takes longer than the
# launches; alone (prompts), or while an encoder shares it (mixed steps).
MAX_CAPTURED_PROMPT, MAX_CAPTURED_TOKENS = 2048, 4096
MAX_CAPTURED_CHUNKS, MAX_CAPTURED_DECODES = 16, 64  # of a mixed step

_WARP = 32
_GEMV_ELEMENTS = 64  # of the weight that a thread holds at once
_MAX_TILE = 8192  # elements of a row that a CTA loads at once


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a GEMV is divided.

    Attributes:
        rows: of the weight, per CTA.
        tile: elements of a row that are loaded at once, a power of two. If it covers the row, all
            of the weight is loaded before the input is there.
        stages: of the software pipeline over tiles; 0: the loop is unrolled.
        warps: per CTA.
    """

    rows: int
    tile: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """How a skinny GEMM (up to 64 tokens) is divided.

    Attributes:
        rows: of the weight, per CTA: 64 or 128.
        tile: elements of K per pipeline stage.
        warps: per CTA.
        ctas_per_sm: CTAs whose shared memory is to fit an SM together.
        max_stages: of the pipeline; fewer where shared memory has no room for them.
        splits: of K, at most; each leaves a partial.
    """

    rows: int
    tile: int
    warps: int
    ctas_per_sm: int
    max_stages: int
    splits: int = 1

    def span(self, num_columns: int) -> int:
        """Columns of a split; the last one may have fewer, and there may be one split less."""
        return -(-num_columns // (self.tile * self.splits)) * self.tile

    def stages(self, padded_tokens: int, shared_memory_bytes: int) -> int:
        """Pipeline stages for 2-byte elements; below 2 it does not fit the device."""
        stage_bytes = (self.rows + padded_tokens) * self.tile * 2
        return min(self.max_stages, shared_memory_bytes // self.ctas_per_sm // stage_bytes)


@dataclass(frozen=True, slots=True)
class SwigluGemmConfig:
    """How the persistent SwiGLU GEMM of many tokens is divided. Measured on an H200.

    Attributes:
        num_sms: of the device.
        tokens: of a tile.
        rows: of gate, and of up, of a tile.
        columns: of K per pipeline stage.
        stages: of the pipeline.
        warps: per CTA.
        group: tiles of tokens that share rows of the weight in L2.
        least_fill: share of the SMs that the tiles keep busy, below which cuBLAS is faster.
    """

    num_sms: int
    tokens: int = 128
    rows: int = 128
    columns: int = 64
    stages: int = 3
    warps: int = 8
    group: int = 16
    least_fill: float = 1 / 1.05

    def obstacle(self, num_rows: int, num_columns: int) -> str:
        """Why it cannot compute with a weight `[num_rows, num_columns]` of gate and up, or ""."""
        if num_columns % self.columns or num_rows % (2 * self.rows):
            return f"the weight [{num_rows}, {num_columns}] does not divide into tiles"
        return ""

    def is_faster(self, num_tokens: int, num_rows: int) -> bool:
        """Whether tiles, one per SM at a time, fill their waves; `num_rows` as above."""
        tiles = self.count_tiles(num_tokens, num_rows // 2)
        return tiles / (-(-tiles // self.num_sms) * self.num_sms) >= self.least_fill

    def count_tiles(self, num_tokens: int, num_rows: int) -> int:
        """Tiles of an output `[num_tokens, num_rows]`."""
        return -(-num_tokens // self.tokens) * (num_rows // self.rows)


@dataclass(frozen=True, slots=True)
class DeltaDecodeConfig:
    """How the decode kernel of the gated delta rule divides a head's state. Not measured yet.

    Attributes:
        columns: of the state, per CTA.
        warps: of a CTA.
    """

    columns: int
    warps: int


def delta_decode_config(num_sequences: int) -> DeltaDecodeConfig:
    """Small parts where few sequences must fill the device."""
    return DeltaDecodeConfig(32, 4) if num_sequences < 4 else DeltaDecodeConfig(64, 4)


@dataclass(frozen=True, slots=True)
class DeltaPrefillConfig:
    """How the prefill kernels of the gated delta rule are divided. Measured on an H100, for the
    heads of the 4B and the 27B: no other scan serves one prompt of both and eight as well.

    Attributes:
        columns: of a head's state, per CTA of the scan.
        channels: of the convolution, per CTA.
        solve_warps: of a CTA that inverts.
        scan_warps: of a CTA of the scan.
        scan_stages: of its pipeline.
    """

    columns: int = 32
    channels: int = 64
    solve_warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 1


def swiglu_gemm_config(device: DeviceFacts, num_columns: int) -> SwigluGemmConfig:
    """For a weight with this many columns: with 4,096, a fourth stage saves 2.7 % of 8,064 tokens'
    time.
    """
    return SwigluGemmConfig(device.num_sms, stages=4 if num_columns >= 4096 else 3)


@dataclass(frozen=True, slots=True)
class MoEGemvConfig:
    """How the experts' GEMVs of a few tokens are divided.

    Attributes:
        up_rows: rows of gate, and of up, that a CTA loads at once.
        up_columns: columns that a CTA loads at once.
        up_warps: of a CTA.
        down_rows: rows of each of a token's experts, per CTA.
        down_columns: as `up_columns`.
        down_warps: of a CTA.
    """

    up_rows: int = 2
    up_columns: int = 1024
    up_warps: int = 4
    down_rows: int = 4
    down_columns: int = 256
    down_warps: int = 4


@dataclass(frozen=True, slots=True)
class MoEGemmConfig:
    """How the experts' grouped GEMMs are divided.

    Attributes:
        tokens: of a tile, all of one expert.
        rows: of an expert's matrix, per tile.
        columns: of K per pipeline stage.
        stages: of the pipeline.
        warps: per CTA.
        w8a8: activations are quantized as weights are, for tensor cores of 8 bits.
    """

    tokens: int
    rows: int
    columns: int
    stages: int
    warps: int
    w8a8: bool = False

    def shared_bytes(self) -> int:
        """Of the pipeline."""
        size = 1 if self.w8a8 else 2
        return (self.rows + self.tokens) * self.columns * size * self.stages


@dataclass(frozen=True, slots=True)
class MoETilesConfig:
    """How the grouped GEMMs of experts of packed codes are divided.

    Attributes:
        tokens: of a tile, all of one expert.
        stages: of the pipeline.
    """

    tokens: int
    stages: int

    def shared_bytes(self) -> int:
        """Of the pipeline, at most: 128 columns of inputs, of 64 rows of codes, and scales."""
        return (256 * self.tokens + 10240) * self.stages


_GroupedT = TypeVar("_GroupedT", MoEGemmConfig, MoETilesConfig)

# Of a mixture of experts. `MoEGemvConfig`'s own are measured on an H200, the 30B-A3B's shape.
MOE_GEMV_TOKENS = 4  # above, tokens share experts often enough
ROUTER_TOKENS = 2048  # above, the router's GEMM is the library's
# Mean number of rows per expert up to which a configuration serves.
_MOE_GEMM = (
    (12, MoEGemmConfig(16, 64, 128, 5, 4)),
    (24, MoEGemmConfig(32, 64, 128, 4, 4)),
    (40, MoEGemmConfig(64, 128, 64, 4, 4)),
    (None, MoEGemmConfig(128, 128, 64, 3, 8)),
)


# The same where activations are quantized, too; measured for FP8 on an H200.
_MOE_W8A8 = (
    (12, MoEGemmConfig(16, 128, 128, 3, 4, w8a8=True)),
    (80, MoEGemmConfig(64, 128, 128, 4, 4, w8a8=True)),
    (None, MoEGemmConfig(64, 128, 128, 3, 4, w8a8=True)),
)
# Of W4A16.
_MOE_TILES = (
    (12, MoETilesConfig(16, 5)),
    (24, MoETilesConfig(32, 4)),
    (None, MoETilesConfig(64, 4)),
)


def router_splits(num_tokens: int) -> int:
    """Of K, of the router's skinny GEMM: fewer where tiles of tokens fill the device."""
    return 8 if num_tokens <= 512 else 4


def moe_gemm_config(device: DeviceFacts, mean_rows: float, *, w8a8: bool) -> MoEGemmConfig:
    """By the mean number of rows per expert; fewer stages where shared memory has no room."""
    return _fitting(device, mean_rows, _MOE_W8A8 if w8a8 else _MOE_GEMM)


def moe_tiles_config(device: DeviceFacts, mean_rows: float) -> MoETilesConfig:
    """As `moe_gemm_config`."""
    return _fitting(device, mean_rows, _MOE_TILES)


def _fitting(
    device: DeviceFacts, mean_rows: float, configs: Sequence[tuple[int | None, _GroupedT]]
) -> _GroupedT:
    found = next(config for most, config in configs if most is None or mean_rows <= most)
    while found.stages > 2 and found.shared_bytes() > device.shared_memory_bytes:
        found = replace(found, stages=found.stages - 1)
    return found


# As `benchmarks.kernels.tune_kernels` found them on an H200, for the shapes of the 2B, 4B, 8B, 32B
# and 30B-A3B.
# (kind, rows N, columns K)
_GEMV = {
    ("norm_linear", 4096, 2048): GemvConfig(4, 1024, 0, 4),
    ("norm_swiglu", 12288, 2048): GemvConfig(4, 512, 0, 2),
    ("linear_residual", 2048, 6144): GemvConfig(8, 2048, 0, 4),
    ("linear", 151936, 2048): GemvConfig(4, 1024, 0, 4),
    ("norm_linear", 6144, 2560): GemvConfig(4, 4096, 0, 4),
    ("linear_residual", 2560, 4096): GemvConfig(4, 1024, 0, 4),
    ("norm_swiglu", 19456, 2560): GemvConfig(1, 4096, 0, 2),
    ("linear_residual", 2560, 9728): GemvConfig(4, 2048, 3, 8),
    ("linear", 151936, 2560): GemvConfig(8, 512, 3, 4),
    ("norm_linear", 6144, 4096): GemvConfig(4, 4096, 0, 4),
    ("linear_residual", 4096, 4096): GemvConfig(8, 1024, 0, 2),
    ("norm_swiglu", 24576, 4096): GemvConfig(1, 4096, 0, 4),
    ("linear_residual", 4096, 12288): GemvConfig(4, 2048, 0, 2),
    ("linear", 151936, 4096): GemvConfig(4, 2048, 0, 8),
    ("norm_linear", 10240, 5120): GemvConfig(2, 8192, 0, 4),
    ("linear_residual", 5120, 8192): GemvConfig(4, 1024, 3, 4),
    ("norm_swiglu", 51200, 5120): GemvConfig(1, 8192, 0, 4),
    ("linear_residual", 5120, 25600): GemvConfig(4, 1024, 0, 2),
    ("linear", 151936, 5120): GemvConfig(2, 8192, 0, 8),
    ("norm_linear", 5120, 2048): GemvConfig(8, 512, 0, 4),
    ("linear_residual", 2048, 4096): GemvConfig(4, 2048, 0, 8),
    # A rank's part of the 32B and 8B, of two, and of the 32B, of four.
    ("norm_linear", 5120, 5120): GemvConfig(4, 1024, 3, 4),
    ("linear", 5120, 4096): GemvConfig(2, 1024, 3, 2),
    ("norm_swiglu", 25600, 5120): GemvConfig(1, 8192, 0, 4),
    ("linear", 5120, 12800): GemvConfig(1, 16384, 0, 8),
    ("linear", 75968, 5120): GemvConfig(4, 1024, 3, 4),
    ("norm_linear", 3072, 4096): GemvConfig(8, 1024, 0, 4),
    ("linear", 4096, 2048): GemvConfig(2, 1024, 0, 2),
    ("norm_swiglu", 12288, 4096): GemvConfig(1, 4096, 0, 4),
    ("linear", 4096, 6144): GemvConfig(8, 1024, 0, 2),
    ("linear", 75968, 4096): GemvConfig(4, 2048, 0, 8),
    ("norm_linear", 2560, 5120): GemvConfig(2, 1024, 0, 2),
    ("linear", 5120, 2048): GemvConfig(4, 512, 0, 2),
    ("norm_swiglu", 12800, 5120): GemvConfig(1, 8192, 0, 4),
    ("linear", 5120, 6400): GemvConfig(2, 8192, 0, 8),
    ("linear", 37984, 5120): GemvConfig(4, 1024, 3, 4),
}
_MEASURED_SMS = 132  # splits and CTAs per SM are those of a device with this many SMs
# (N, K) → configuration of `split_k_partials`, the best sum of 16 and 64 tokens.
_SPLIT_K = {
    (4096, 2048): SkinnyConfig(64, 128, 4, 1, 6, splits=2),
    (2048, 2048): SkinnyConfig(64, 128, 4, 1, 6, splits=4),
    (2048, 6144): SkinnyConfig(64, 128, 4, 1, 6, splits=4),
    (6144, 2560): SkinnyConfig(64, 64, 4, 3, 6, splits=4),
    (2560, 4096): SkinnyConfig(64, 128, 4, 1, 6, splits=3),
    (2560, 9728): SkinnyConfig(64, 128, 4, 1, 6, splits=3),
    (6144, 4096): SkinnyConfig(64, 64, 4, 3, 6, splits=4),
    (4096, 12288): SkinnyConfig(64, 128, 4, 1, 6, splits=2),
    (10240, 5120): SkinnyConfig(64, 64, 4, 4, 6, splits=3),
    (5120, 8192): SkinnyConfig(64, 128, 4, 2, 6, splits=3),
    (5120, 25600): SkinnyConfig(64, 128, 4, 2, 6, splits=3),
}
# (N, K) → configuration of `linear_swiglu`; N counts gate and up.
_SKINNY_SWIGLU = {
    (12288, 2048): SkinnyConfig(64, 128, 4, 2, 3),
    (19456, 2560): SkinnyConfig(64, 64, 4, 3, 6),
    (24576, 4096): SkinnyConfig(64, 128, 4, 3, 6),
    (51200, 5120): SkinnyConfig(128, 64, 8, 2, 6),
}

_ROWS = {"norm_linear": 4, "linear": 4, "norm_swiglu": 2, "linear_residual": 4}  # per CTA, by kind


def gemv_config(kind: str, num_rows: int, num_columns: int) -> GemvConfig:
    """The configuration of a GEMV `[num_rows, num_columns]`.

    Args:
        kind: `linear`, `norm_linear`, `norm_swiglu` or `linear_residual`.
        num_rows: N; of `norm_swiglu`, gate and up together.
        num_columns: K.
    """
    found = _GEMV.get((kind, num_rows, num_columns))
    if found is not None:
        return found
    tile = _gemv_tile(num_columns)
    rows = _ROWS[kind] * (2 if tile <= 1024 else 1)
    held = rows * tile * (2 if kind == "norm_swiglu" else 1)
    warps = min(8, max(1, held // (_GEMV_ELEMENTS * _WARP)))
    num_tiles = -(-num_columns // tile)
    return GemvConfig(rows, tile, 0 if num_tiles <= 8 else 3, warps)


def _gemv_tile(num_columns: int) -> int:
    """The whole row where its padding to a power of two is small, else the largest tile that pads
    it little.
    """
    whole = 1 << (num_columns - 1).bit_length()
    if whole <= _MAX_TILE and pads_little(num_columns, whole):
        return whole
    found = [tile for tile in (4096, 2048, 1024, 512) if pads_little(num_columns, tile)]
    return found[0] if found else min(whole, 2048)


def pads_little(num_columns: int, tile: int) -> bool:
    """Whether tiles exceed a row by less than a fourteenth."""
    return -(-num_columns // tile) * tile * 14 < num_columns * 15


def split_k_config(device: DeviceFacts, num_rows: int, num_columns: int) -> SkinnyConfig | None:
    """The configuration of `split_k_partials`; None: the shape does not divide into tiles."""
    measured = _SPLIT_K.get((num_rows, num_columns)) if device.num_sms == _MEASURED_SMS else None
    return measured or _best_fill(device, num_rows, num_columns, most_splits=8)


def skinny_swiglu_config(
    device: DeviceFacts, num_rows: int, num_columns: int
) -> SkinnyConfig | None:
    """The same of the skinny `linear_swiglu`, which is not split."""
    shape = num_rows, num_columns
    measured = _SKINNY_SWIGLU.get(shape) if device.num_sms == _MEASURED_SMS else None
    return measured or _best_fill(device, *shape, most_splits=1)


def _best_fill(
    device: DeviceFacts, num_rows: int, num_columns: int, most_splits: int
) -> SkinnyConfig | None:
    """The split of K that divides the CTAs most evenly among the SMs. Ties go to fewer splits,
    because the consumer reads each one. Up to three CTAs share an SM, so that one's prologue hides
    behind another's loop, as long as three stages fit for the most tokens.
    """
    rows, tile, warps = 64, 128, 4
    if num_rows % rows or num_columns % tile:
        return None

    def cost(splits: int) -> float:
        ctas, num_tiles = num_rows // rows * splits, num_columns // tile
        idle = -(-ctas // device.num_sms) * device.num_sms / ctas
        return idle * -(-num_tiles // splits) * splits / num_tiles + 0.02 * splits

    splits = min(range(1, min(most_splits, num_columns // tile) + 1), key=cost)
    ctas = num_rows // rows * splits
    for ctas_per_sm in range(min(3, -(-ctas // device.num_sms)), 0, -1):
        for stage_columns in (tile, tile // 2):  # more stages are worth more than larger ones
            config = SkinnyConfig(rows, stage_columns, warps, ctas_per_sm, 5, splits)
            if config.stages(SKINNY_TOKENS, device.shared_memory_bytes) >= 3:
                return config
    return None


def qk_rope_config(num_tokens: int, head_dim: int) -> tuple[int, int]:
    """Heads per CTA of `qk_rope_cache`, and its warps: few heads where a step is short and must
    fill the device, many where it is long, as far as registers allow.
    """
    return (16 if head_dim <= 128 else 8, 4) if num_tokens >= 128 else (1, 1)
