"""Facts that attention kernels are chosen by, and tuned constants of the kernels by size class.

A size class is a number of query heads per key head (the group), a head dimension and a number of
key heads. All classes in the table except one were measured on an H200 (those of the 2B, 4B, 8B,
32B and 30B-A3B models). Other classes are extrapolated until
`benchmarks.kernels.tune_attention` has been run for them.
"""

from dataclasses import dataclass, replace

import torch

from kernels.device import DeviceFacts
from kernels.launches import LAUNCH_HIDING_TOKENS

FUSED_MAX_SEQUENCES = 2  # separate kernels are faster for more sequences
_MMA_ROWS = 16  # query rows of a tensor-core instruction
_SHARED_MEMORY_RESERVE = 8 << 10  # shared memory that a compiled kernel needs besides its tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFacts:
    """Facts about a model and a device that decide which attention kernels can run.

    Attributes:
        device: facts about the device.
        dtype: data type of queries.
        num_heads: number of query heads.
        num_kv_heads: number of key heads.
        head_dim: elements of a head.
        block_size: tokens of a KV block.
        rotary_dim: number of leading elements of a head that are rotated. None if it is all.
        has_flashinfer: True if the package flashinfer is installed.
        fp8_cache: True if keys and values are cached in e4m3.
        max_num_sequences: largest number of sequences of a step.
        max_num_blocks: largest number of blocks of a sequence.
        launch_hiding_tokens: number of tokens from which an eager step hides its launches.
    """

    device: DeviceFacts
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rotary_dim: int | None = None
    has_flashinfer: bool = False
    fp8_cache: bool = False
    max_num_sequences: int = 1
    max_num_blocks: int = 1
    launch_hiding_tokens: int = LAUNCH_HIDING_TOKENS

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class FusedDecodeConfig:
    """Division of a step's work by `FusedDecodeAttention`.

    Attributes:
        heads: query heads of a CTA: all of a group, or a power of two that divides the group.
        num_splits: number of CTAs that share a head's context, a power of two.
        tile: tokens of a K/V tile.
        tensor_cores: True if the kernel uses MMAs with the group padded to 16 rows, False if FMAs.
        num_warps: warps of a CTA.
    """

    heads: int
    num_splits: int
    tile: int = 64
    tensor_cores: bool = False
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class PagedDecodeConfig:
    """Division of a step's work by `PagedDecodeAttention`.

    Attributes:
        kv_heads: key heads of a work item, a power of two.
        tile_rows: rows of a K/V tile. A row is a key head of a token.
        num_warps: warps of a CTA.
        alone: CTAs per SM and pipeline stages if no other kernel runs at the same time.
        beside_few: CTAs per SM and pipeline stages beside prefill attention, for up to `few`
            sequences.
        beside_many: CTAs per SM and pipeline stages beside prefill attention, for more sequences.
        few: largest number of sequences for which `beside_few` is used.
        words: True if values of an e4m3 cache are read as words of four bytes. A warp then has at
            least the eight columns of an MMA of each byte of the words.
    """

    kv_heads: int
    tile_rows: int = 64
    num_warps: int = 4
    alone: tuple[int, int] = (1, 5)
    beside_few: tuple[int, int] = (1, 3)
    beside_many: tuple[int, int] = (2, 3)
    few: int = 64
    words: bool = False

    @property
    def tile_tokens(self) -> int:
        return self.tile_rows // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """Tuned constants of a size class.

    Attributes:
        fused: configurations of the fused kernel on 132 SMs, by number of sequences minus 1. None
            if `fused_decode_config` computes them by a rule.
        fused_max_context: longest context, with the new token, for which the fused kernel is faster
            than separate kernels, by number of sequences minus 1.
        paged: configuration of the paged kernel for 227 KiB of shared memory.
        paged_min_sequences: number of sequences from which the paged kernel in a graph is faster
            than flashinfer.
        flashinfer_tensor_cores: True if flashinfer's tensor-core kernel is used for decodes.
    """

    fused: tuple[FusedDecodeConfig, ...] | None = None
    fused_max_context: tuple[int, ...] = (4096, 2048)
    paged: PagedDecodeConfig = PagedDecodeConfig(8)
    paged_min_sequences: int = 48
    flashinfer_tensor_cores: bool = True


# Constants by (group, head_dim, key heads), as `benchmarks.kernels.tune_attention` prints them.
# For contexts longer than `fused_max_context`, flashinfer is faster because it has more reads in
# flight. With one or two query heads per key head, flashinfer's CUDA-core decode is up to a sixth
# faster than its tensor-core decode.
_CLASSES: dict[tuple[int, int, int], SizeClass] = {
    (2, 128, 8): SizeClass(
        fused=(FusedDecodeConfig(2, 32), FusedDecodeConfig(2, 16)), flashinfer_tensor_cores=False
    ),
    (1, 128, 8): SizeClass(flashinfer_tensor_cores=False),  # extrapolated
    (4, 128, 8): SizeClass(
        fused=(FusedDecodeConfig(2, 16), FusedDecodeConfig(4, 16, tensor_cores=True)),
        fused_max_context=(2048, 4096),
        paged_min_sequences=8,
    ),
    (8, 128, 8): SizeClass(
        fused=(
            FusedDecodeConfig(8, 16, tensor_cores=True),
            FusedDecodeConfig(8, 8, tensor_cores=True),
        ),
        fused_max_context=(4096, 4096),
        paged=PagedDecodeConfig(2, alone=(2, 3)),
        paged_min_sequences=4,
    ),
    (8, 128, 4): SizeClass(
        fused=(FusedDecodeConfig(2, 16), FusedDecodeConfig(8, 16, tensor_cores=True)),
        fused_max_context=(2048, 1024),
        paged=PagedDecodeConfig(1, alone=(2, 3)),
        paged_min_sequences=16,
    ),
}


# For an e4m3 cache and any class, by the head_dim, rounded up to a power of two. `alone` was
# measured on an H200 with four key heads in an item. Other heads are too narrow for words, and
# their configuration is extrapolated from heads of 128 elements on an H100.
_FP8_PAGED = {
    128: PagedDecodeConfig(8, 128, alone=(2, 3), words=True),
    256: PagedDecodeConfig(8, alone=(2, 4), words=True),
}
_FP8_PAGED_NARROW = PagedDecodeConfig(8, alone=(2, 3))


def size_class(facts: AttentionFacts) -> SizeClass:
    """Returns the constants of the facts' size class.

    Constants of a class that is not in the table are extrapolated from the class with 8 key heads,
    except `fused`, which depends on the number of key heads.
    """
    group, dim, kv_heads = facts.group_size, facts.head_dim, facts.num_kv_heads
    if (found := _CLASSES.get((group, dim, kv_heads))) is not None:
        return found
    return replace(_CLASSES.get((group, dim, 8), SizeClass()), fused=None)


def fused_decode_config(facts: AttentionFacts, num_sequences: int) -> FusedDecodeConfig:
    """Configuration of the fused kernel for a step of `num_sequences` decodes.

    Without tuned constants, a CTA has all query heads of a key head and uses tensor cores for three
    or more than four, and splits are chosen for about two CTAs per SM.
    """
    group, device = facts.group_size, facts.device
    tuned = size_class(facts).fused
    if tuned is not None and device.num_sms == 132:
        return tuned[num_sequences - 1]
    splits = max(2 * device.num_sms // (facts.num_kv_heads * num_sequences), 1)
    splits = min(max(1 << (splits.bit_length() - 1), 4), 64)
    tile = 32 if facts.head_dim > 128 else 64
    return FusedDecodeConfig(group, splits, tile, tensor_cores=group == 3 or group > 4)


def paged_decode_config(facts: AttentionFacts) -> PagedDecodeConfig:
    """Configuration of the paged kernel, reduced to the stages and CTAs that fit an SM.

    A work item has as many key heads as fit the rows of an MMA, up to the tuned number.
    """
    tuned = size_class(facts).paged
    width = 1 << (facts.head_dim - 1).bit_length()
    if facts.fp8_cache:
        tuned = replace(_FP8_PAGED.get(width, _FP8_PAGED_NARROW), kv_heads=tuned.kv_heads)
    kv_heads = tuned.kv_heads
    while kv_heads > 1 and (
        kv_heads * facts.group_size > _MMA_ROWS or facts.num_kv_heads % kv_heads
    ):
        kv_heads //= 2
    stage_bytes = 2 * tuned.tile_rows * width * (1 if facts.fp8_cache else facts.dtype.itemsize)
    # Tiles in e4m3 are stored in shared memory a second time, in the model's dtype, unless values
    # are read as words.
    decoded_bytes = 0
    if facts.fp8_cache and not tuned.words:
        decoded_bytes = tuned.tile_rows * width * facts.dtype.itemsize
    room = facts.device.shared_memory_bytes

    def fitting(ctas: int, stages: int) -> tuple[int, int]:
        """Reduces CTAs and stages to what fits. A pipeline of n stages has n - 1 buffers."""
        most = room // ctas - _SHARED_MEMORY_RESERVE - decoded_bytes
        if ctas > 1 and 2 * stage_bytes > most:
            return fitting(ctas - 1, stages)
        return ctas, min(stages, most // stage_bytes + 1)

    return replace(
        tuned,
        kv_heads=kv_heads,
        alone=fitting(*tuned.alone),
        beside_few=fitting(*tuned.beside_few),
        beside_many=fitting(*tuned.beside_many),
    )


# Constants that decide whether `PrefillAttention` is faster than FlashAttention-3 (FA3), and how it
# splits work. They were measured for the 2B model (28 layers) on an H200. FA3 processes twice as
# many pairs of a new and a cached token in the same time. In a step without a graph, it is faster
# if the step keeps the device busy for longer than the host needs for its launches, about 10 ms:
# 1,000 new tokens take 5 ms, and a million pairs take 0.8 ms.
PREFILL_CTAS_PER_SM = 2  # CTAs that fit an SM
MIN_SPLIT_TILES = 4  # least number of K/V tiles of a split
MAX_CACHED_SHARE = 0.25  # largest ratio of pairs with cached tokens to pairs within the chunk
# Limits of the pairs with cached tokens for which a captured step is faster: it always is up to the
# first number, and otherwise up to the second, less the share of it that the step's tokens have of
# those that hide its launches. Both are for query heads of so many elements together as the 2B has.
MIN_CAPTURED_PAIRS, MAX_CAPTURED_PAIRS, MEASURED_WIDTH = 1_000_000, 12_000_000, 2_048


# In graphs, FA3 over dense keys takes less time than our kernel from so many pairs with cached
# tokens on: measured for chunks of 640 to 2,048 tokens with 16 and 32 heads, and 0 to 63 decodes.
LONG_PAIRS = 1_250_000
# FA3 reads dense keys if a chunk has this many tokens in the mean, weighted by its context: with
# fewer, the copy takes longer than it saves (`dense_keys` has times). In a graph it may take a
# little longer, because without one the host would need tens of milliseconds for a step.
DENSE_MIN_CHUNK, CAPTURED_MIN_CHUNK = 640, 448
DENSE_CTAS_PER_SM = 4  # that copy keys, and as many that copy values; 1 to 16 are equally fast
# The memory for dense keys has at most so many bytes, which is 131,072 tokens of an 8B, and is for
# at most so many sequences of the greatest length.
_DENSE_BYTES, _DENSE_SEQUENCES = 512 << 20, 4


def dense_tokens(facts: AttentionFacts) -> int:
    """Returns how many tokens' keys and values fit into the memory for dense ones."""
    token_bytes = 2 * facts.num_kv_heads * facts.head_dim * facts.dtype.itemsize
    most = _DENSE_SEQUENCES * facts.max_num_blocks * facts.block_size
    return min(most, _DENSE_BYTES // token_bytes)


# Query tokens of a tile of FlashAttention-3 for heads of 128 elements, and of the two CTAs of an SM
# in `PrefillAttention`; and of a tile of FlashAttention-3 for heads of 64.
_PREFILL_TILE, _NARROW_TILE = 128, 192


def wave_tokens(facts: AttentionFacts) -> int:
    """Returns the number of prompt tokens whose attention fills all SMs once, in whole tiles.

    An SM computes one tile of one head at a time. Returns 0 if it is not known, or if the heads of
    one tile are too many for the SMs.
    """
    if not facts.device.is_hopper or facts.head_dim > 128:
        return 0
    tile = _NARROW_TILE if facts.head_dim == 64 else _PREFILL_TILE
    return facts.device.num_sms // facts.num_heads * tile


# Requirements of the kernels. A check returns the obstacle for an error message, or "".


def fused_decode_obstacle(facts: AttentionFacts) -> str:
    """Reason why `fused_decode_attention` cannot run with these facts, or ""."""
    if facts.rotary_dim not in (None, facts.head_dim):
        return f"needs rotary_dim {facts.rotary_dim} to be head_dim {facts.head_dim}"
    return _decode_obstacle(facts)


def paged_decode_obstacle(facts: AttentionFacts) -> str:
    """Reason why `paged_decode_attention` cannot run with these facts, or ""."""
    if why := _decode_obstacle(facts):
        return why
    tokens = paged_decode_config(facts).tile_tokens
    if facts.block_size % tokens and tokens % facts.block_size:
        return f"needs a block_size that divides {tokens} or is a multiple of it"
    return ""


def prefill_obstacle(facts: AttentionFacts) -> str:
    """Reason why `prefill_attention` cannot run with these facts, or ""."""
    if not facts.device.has_triton or not facts.device.is_hopper:
        return "needs Triton and Hopper's wgmma"
    if facts.dtype.itemsize != 2:
        return f"needs bfloat16 or float16, not {facts.dtype}"
    if facts.head_dim not in (64, 128, 256):
        return f"needs a head_dim of 64, 128 or 256, not {facts.head_dim}"
    return ""


def _decode_obstacle(facts: AttentionFacts) -> str:
    if not facts.device.has_triton or facts.device.capability < (8, 0):
        return "needs Triton and compute capability 8.0"
    if facts.dtype.itemsize != 2:
        return f"needs bfloat16 or float16, not {facts.dtype}"
    if facts.group_size > _MMA_ROWS:
        return f"needs at most {_MMA_ROWS} query heads per key head, not {facts.group_size}"
    if facts.head_dim % 16 or not 32 <= facts.head_dim <= 256:
        return f"needs a head_dim of 32 to 256 in steps of 16, not {facts.head_dim}"
    return ""


# Head dimensions that `hopper_attention` supports, which vision towers use.
HOPPER_HEAD_DIMS = (64, 72, 80)
HOPPER_SHARED_MEMORY = 62 << 10  # shared memory in bytes of a CTA with the widest of these heads
