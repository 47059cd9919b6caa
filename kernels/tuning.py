"""Tuned constants of the decoder's GEMM kernels, by the shape of the weight.

`benchmarks.kernels.tune_kernels` times the candidates on a GPU and prints rows for the tables. A
GEMM without a row gets its constants by rules that depend only on the facts about the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kernels.device import DeviceFacts
from kernels.launches import LAUNCH_HIDING_TOKENS as LAUNCH_HIDING_TOKENS

# Number of tokens from which a GEMM that adds to the residual stream is faster than a GEMM and a
# fused norm. On an H200, cuBLAS' own choice of a kernel is better for fewer tokens.
RESIDUAL_GEMM_TOKENS = 832
GEMV_TOKENS = 1  # tensor cores are faster for more tokens
SKINNY_TOKENS = 64  # cuBLAS is faster for more tokens
# Largest numbers of tokens of captured prompts and of captured mixed steps. The device takes longer
# than the launches for larger prompts, and for larger mixed steps while an encoder shares it.
MAX_CAPTURED_PROMPT, MAX_CAPTURED_TOKENS = 2048, 4096
# Limits of a captured mixed step. All of its decodes are padded to the largest number, which costs
# attention nothing, but the head as many rows. Hence there are two numbers of decodes, the larger
# one for steps of up to `MAX_CAPTURED_CROWD` tokens: eager launches keep up with larger steps.
MAX_CAPTURED_CHUNKS, MAX_CAPTURED_DECODES = 16, 64
MOST_CAPTURED_DECODES, MAX_CAPTURED_CROWD = 256, 2048
# Smallest number of tokens of a captured step behind long contexts. With fewer, the copy of keys by
# `attention.dense_keys` takes longer than it saves.
LEAST_CAPTURED_LONG = 512

_WARP = 32
_GEMV_ELEMENTS = 64  # elements of the weight that a thread has at the same time
_MAX_TILE = 8192  # elements of a row that a CTA loads at the same time


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Division of a GEMV.

    Attributes:
        rows: rows of the weight per CTA.
        tile: elements of a row that are loaded at the same time, a power of two. If a tile covers
            the row, the whole weight is loaded before the input is there.
        stages: stages of the software pipeline over tiles. 0 if the loop is unrolled.
        warps: warps per CTA.
    """

    rows: int
    tile: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Division of a skinny GEMM, which has up to 64 tokens.

    Attributes:
        rows: rows of the weight per CTA, 64 or 128.
        tile: elements of K per pipeline stage.
        warps: warps per CTA.
        ctas_per_sm: number of CTAs that have to fit the shared memory of an SM.
        max_stages: largest number of pipeline stages. There are fewer if they do not fit.
        splits: largest number of splits of K, each of which computes a partial sum.
    """

    rows: int
    tile: int
    warps: int
    ctas_per_sm: int
    max_stages: int
    splits: int = 1

    def span(self, num_columns: int) -> int:
        """Columns of a split. The last split may have fewer, and there may be one split less."""
        return -(-num_columns // (self.tile * self.splits)) * self.tile

    def stages(self, padded_tokens: int, shared_memory_bytes: int) -> int:
        """Number of pipeline stages for 2-byte elements. Below 2, the kernel does not fit."""
        stage_bytes = (self.rows + padded_tokens) * self.tile * 2
        return min(self.max_stages, shared_memory_bytes // self.ctas_per_sm // stage_bytes)


@dataclass(frozen=True, slots=True)
class SwigluGemmConfig:
    """Division of the persistent SwiGLU GEMM of many tokens, measured on an H200.

    Attributes:
        num_sms: number of SMs of the device.
        tokens: tokens of a tile.
        rows: rows of gate, and as many of up, of a tile.
        columns: columns of K per pipeline stage.
        stages: pipeline stages.
        warps: warps per CTA.
        group: number of tiles of tokens that share rows of the weight in L2.
        least_fill: share of the SMs that tiles have to keep busy. Below it, cuBLAS is faster.
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
        """Reason why a weight `[num_rows, num_columns]` of gate and up is not supported, or ""."""
        if num_columns % self.columns or num_rows % (2 * self.rows):
            return f"the weight [{num_rows}, {num_columns}] does not divide into tiles"
        return ""

    def is_faster(self, num_tokens: int, num_rows: int) -> bool:
        """Returns whether tiles, one per SM at a time, fill their waves well enough."""
        tiles = self.count_tiles(num_tokens, num_rows // 2)
        return tiles / (-(-tiles // self.num_sms) * self.num_sms) >= self.least_fill

    def count_tiles(self, num_tokens: int, num_rows: int) -> int:
        """Number of tiles of an output `[num_tokens, num_rows]`."""
        return -(-num_tokens // self.tokens) * (num_rows // self.rows)


@dataclass(frozen=True, slots=True)
class DeltaDecodeConfig:
    """Division of a head's state by the decode kernels of the gated delta rule.

    Attributes:
        columns: columns of the state per CTA.
        warps: warps per CTA.
        max_registers: limit of a thread's registers. None if the compiler chooses. The kernel that
            verifies drafts has no limit.
    """

    columns: int
    warps: int
    max_registers: int | None = None


def delta_decode_config(num_sequences: int) -> DeltaDecodeConfig:
    """Configuration by number of sequences, measured on an H200 for the heads of the 4B.

    Few sequences need small parts to fill the device. With 128 registers, an SM has four CTAs of
    four warps, or eight of two.
    """
    columns, warps = (32, 2) if num_sequences < 4 else (64, 4)
    return DeltaDecodeConfig(columns, warps, max_registers=128)


def delta_verify_config(num_decodes: int) -> DeltaDecodeConfig:
    """Configuration of the kernel that verifies drafts, by number of tokens. Not measured yet.

    A CTA computes the tokens of a run one after the other, so that small parts of the state also
    make the chain of a run's tokens shorter.
    """
    return DeltaDecodeConfig(32, 4) if num_decodes <= 16 else DeltaDecodeConfig(64, 4)


@dataclass(frozen=True, slots=True)
class DeltaPrefillConfig:
    """Division of the prefill kernels of the gated delta rule.

    The values were measured on an H100 for the heads of the 4B and 27B models, and `channels` on an
    H200. They are the best compromise between one and eight prompts. `delta_prefill_config` chooses
    by the step.

    Attributes:
        columns: columns of a head's state per CTA of the scan.
        channels: channels of the convolution per CTA.
        solve_warps: warps per CTA of the kernel that inverts matrices.
        scan_warps: warps per CTA of the scan.
        scan_stages: pipeline stages of the scan.
    """

    columns: int = 32
    channels: int = 32
    solve_warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 1


# Number of tokens of a chunk that is assumed in captured mixed steps, where the number of chunks is
# not known.
_CHUNK_TOKENS = 1024

# Major compute capabilities whose tensor cores read operands from shared memory.
_OPERANDS_IN_SHARED_MEMORY = (9, 10)


def delta_prefill_config(
    device: DeviceFacts, num_heads: int, num_chunks: int, num_tokens: int
) -> DeltaPrefillConfig:
    """Configuration by the work of a step of 16-bit activations.

    A CTA of the scan computes its pieces one after the other. Two stages load the next piece
    meanwhile, and their shared memory leaves room for one CTA per SM. So a head has four CTAs if
    all of them run at the same time, and two otherwise.

    A captured mixed step has more CTAs for padding than for chunks. With two stages, these CTAs
    have to wait for SMs. Therefore a step of few tokens has a single stage.

    Tensor cores of Hopper and of the B200 read operands from shared memory. Other devices multiply
    from registers, of which two stages take more than a thread has (with 64 columns, a thread of an
    A100 spills 2 KB), and have a single stage.

    Args:
        device: the device that computes.
        num_heads: value heads of a layer.
        num_chunks: chunks of prompts in the step, including padding.
        num_tokens: tokens of the step, including padding.
    """
    if device.capability[0] not in _OPERANDS_IN_SHARED_MEMORY:
        return DeltaPrefillConfig()
    if num_chunks > MAX_CAPTURED_CHUNKS:
        num_chunks = num_tokens // _CHUNK_TOKENS
        if not num_chunks:
            return DeltaPrefillConfig()
    columns = 32 if num_chunks * num_heads * 4 <= device.num_sms else 64
    return DeltaPrefillConfig(columns=columns, scan_stages=2)


def swiglu_gemm_config(device: DeviceFacts, num_columns: int) -> SwigluGemmConfig:
    """Configuration of the SwiGLU GEMM by the number of columns of the weight.

    With 4,096 columns, a fourth stage saves 2.7 % of the time for 8,064 tokens.
    """
    return SwigluGemmConfig(device.num_sms, stages=4 if num_columns >= 4096 else 3)


@dataclass(frozen=True, slots=True)
class MoEGemvConfig:
    """Division of the experts' GEMVs of a few tokens.

    The defaults were measured on an H200 for the shape of 30B-A3B.

    Attributes:
        up_rows: rows of gate, and as many of up, that a CTA loads at the same time.
        up_columns: columns of gate and up that a CTA loads at the same time.
        up_warps: warps per CTA of the kernel of gate and up.
        down_rows: rows of each of a token's experts per CTA.
        down_columns: columns of down that a CTA loads at the same time.
        down_warps: warps per CTA of the kernel of down.
    """

    up_rows: int = 2
    up_columns: int = 1024
    up_warps: int = 4
    down_rows: int = 4
    down_columns: int = 256
    down_warps: int = 4


@dataclass(frozen=True, slots=True)
class MoEGemmConfig:
    """Division of the experts' grouped GEMMs.

    Attributes:
        tokens: tokens of a tile, which have the same expert.
        rows: rows of an expert's matrix per tile.
        columns: columns of K per pipeline stage.
        stages: pipeline stages.
        warps: warps per CTA.
        w8a8: True if activations are quantized like the weights, for 8-bit tensor cores.
    """

    tokens: int
    rows: int
    columns: int
    stages: int
    warps: int
    w8a8: bool = False

    def shared_bytes(self) -> int:
        """Shared memory of the pipeline in bytes."""
        size = 1 if self.w8a8 else 2
        return (self.rows + self.tokens) * self.columns * size * self.stages


@dataclass(frozen=True, slots=True)
class MoETilesConfig:
    """Division of the grouped GEMMs of experts with packed codes.

    Attributes:
        tokens: tokens of a tile, which have the same expert.
        stages: pipeline stages.
    """

    tokens: int
    stages: int

    def shared_bytes(self) -> int:
        """Largest shared memory of the pipeline in bytes.

        A stage has 128 columns of the inputs and of 64 rows of codes, and scales.
        """
        return (256 * self.tokens + 10240) * self.stages


_GroupedT = TypeVar("_GroupedT", MoEGemmConfig, MoETilesConfig)

# Constants of mixtures of experts.
MOE_GEMV_TOKENS = 4  # with more tokens, several often share an expert, so that GEMMs are faster
ROUTER_TOKENS = 2048  # with more tokens, a library computes the router's GEMM
# Largest mean number of rows per expert for which a configuration is used, and the configuration.
_MOE_GEMM = (
    (12, MoEGemmConfig(16, 64, 128, 5, 4)),
    (24, MoEGemmConfig(32, 64, 128, 4, 4)),
    (40, MoEGemmConfig(64, 128, 64, 4, 4)),
    (None, MoEGemmConfig(128, 128, 64, 3, 8)),
)


# Configurations for quantized activations, measured for FP8 on an H200.
_MOE_W8A8 = (
    (12, MoEGemmConfig(16, 128, 128, 3, 4, w8a8=True)),
    (80, MoEGemmConfig(64, 128, 128, 4, 4, w8a8=True)),
    (None, MoEGemmConfig(64, 128, 128, 3, 4, w8a8=True)),
)
# With more rows per expert, `experts.moe_warpgroups` is faster for FP8 on Hopper. With fewer,
# reading the weights takes all the time, and `_MOE_W8A8` has smaller tiles.
MOE_WARPGROUPS_ROWS = 12
# Configurations for W4A16.
_MOE_TILES = (
    (12, MoETilesConfig(16, 5)),
    (24, MoETilesConfig(32, 4)),
    (None, MoETilesConfig(64, 4)),
)


def router_splits(num_tokens: int) -> int:
    """Splits of K of the router's skinny GEMM. Fewer if tiles of tokens fill the device."""
    return 8 if num_tokens <= 512 else 4


def moe_gemm_config(device: DeviceFacts, mean_rows: float, *, w8a8: bool) -> MoEGemmConfig:
    """Configuration by the mean number of rows per expert, with the stages that fit the device."""
    return _fitting(device, mean_rows, _MOE_W8A8 if w8a8 else _MOE_GEMM)


def moe_tiles_config(device: DeviceFacts, mean_rows: float) -> MoETilesConfig:
    """Configuration for packed codes, chosen as in `moe_gemm_config`."""
    return _fitting(device, mean_rows, _MOE_TILES)


def _fitting(
    device: DeviceFacts, mean_rows: float, configs: Sequence[tuple[int | None, _GroupedT]]
) -> _GroupedT:
    found = next(config for most, config in configs if most is None or mean_rows <= most)
    while found.stages > 2 and found.shared_bytes() > device.shared_memory_bytes:
        found = replace(found, stages=found.stages - 1)
    return found


# GEMV configurations by (kind, rows N, columns K), which `benchmarks.kernels.tune_kernels` found on
# an H200 for the shapes of the 2B, 4B, 8B, 32B and 30B-A3B models.
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
    # Shapes of a rank's share of the 32B and 8B with two ranks, and of the 32B with four ranks.
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
_MEASURED_SMS = 132  # the measured splits and CTAs per SM apply to devices with this many SMs
# Configurations of `split_k_partials` by (N, K), with the least sum of the times for 16 and 64
# tokens.
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
# Configurations of `linear_swiglu` by (N, K), where N counts the rows of gate and up.
_SKINNY_SWIGLU = {
    (12288, 2048): SkinnyConfig(64, 128, 4, 2, 3),
    (19456, 2560): SkinnyConfig(64, 64, 4, 3, 6),
    (24576, 4096): SkinnyConfig(64, 128, 4, 3, 6),
    (51200, 5120): SkinnyConfig(128, 64, 8, 2, 6),
}

# Rows per CTA by kind of GEMV.
_ROWS = {"norm_linear": 4, "linear": 4, "norm_swiglu": 2, "linear_residual": 4}


def gemv_config(kind: str, num_rows: int, num_columns: int) -> GemvConfig:
    """The configuration of a GEMV `[num_rows, num_columns]`.

    Args:
        kind: `linear`, `norm_linear`, `norm_swiglu` or `linear_residual`.
        num_rows: rows of the weight, N. For `norm_swiglu`, those of gate and up together.
        num_columns: columns of the weight, K.
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
    """Chooses the tile of a GEMV.

    This is the whole row if its padding to a power of two is small, or else the largest tile with
    little padding.
    """
    whole = 1 << (num_columns - 1).bit_length()
    if whole <= _MAX_TILE and pads_little(num_columns, whole):
        return whole
    found = [tile for tile in (4096, 2048, 1024, 512) if pads_little(num_columns, tile)]
    return found[0] if found else min(whole, 2048)


def pads_little(num_columns: int, tile: int) -> bool:
    """Returns whether tiles exceed a row by less than a fourteenth of the row."""
    return -(-num_columns // tile) * tile * 14 < num_columns * 15


def split_k_config(device: DeviceFacts, num_rows: int, num_columns: int) -> SkinnyConfig | None:
    """Configuration of `split_k_partials`. None if the shape does not divide into tiles."""
    measured = _SPLIT_K.get((num_rows, num_columns)) if device.num_sms == _MEASURED_SMS else None
    return measured or _best_fill(device, num_rows, num_columns, most_splits=8)


def skinny_swiglu_config(
    device: DeviceFacts, num_rows: int, num_columns: int
) -> SkinnyConfig | None:
    """Configuration of the skinny `linear_swiglu`, which has no splits.

    None if the shape does not divide into tiles.
    """
    shape = num_rows, num_columns
    measured = _SKINNY_SWIGLU.get(shape) if device.num_sms == _MEASURED_SMS else None
    return measured or _best_fill(device, *shape, most_splits=1)


def _best_fill(
    device: DeviceFacts, num_rows: int, num_columns: int, most_splits: int
) -> SkinnyConfig | None:
    """Chooses the number of splits of K that divides the CTAs most evenly among the SMs.

    Of equal numbers the smallest is chosen, because the consumer reads each partial sum. Up to
    three CTAs share an SM, so that the prologue of a CTA overlaps the loop of another, as long as
    three stages fit for the largest number of tokens.
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
        for stage_columns in (tile, tile // 2):  # more stages are better than larger stages
            config = SkinnyConfig(rows, stage_columns, warps, ctas_per_sm, 5, splits)
            if config.stages(SKINNY_TOKENS, device.shared_memory_bytes) >= 3:
                return config
    return None


@dataclass(frozen=True, slots=True)
class QkRopeConfig:
    """Division of `qk_rope_cache`.

    Attributes:
        heads: heads per CTA, which are all queries, all keys or all values.
        warps: warps per CTA.
        registers: largest number of registers per thread. None for the compiler's choice.
    """

    heads: int
    warps: int
    registers: int | None = None


def qk_rope_config(num_tokens: int, head_dim: int) -> QkRopeConfig:
    """Configuration of `qk_rope_cache`, as measured on an H200 for heads of 128 and 256 elements.

    In a long step, a warp has as many elements as fit its registers. In a short step, registers do
    not limit the number of CTAs.
    """
    is_short = num_tokens < 128
    if head_dim > 128:
        return QkRopeConfig(2, 1, None if is_short else 96)
    return QkRopeConfig(4, 2 if is_short else 1)
