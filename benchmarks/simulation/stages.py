"""What the stages of a request cost on one GPU, from measured pieces.

Calibrated on pieces that were measured alone: decode steps, prompts, the vision tower, and the
fixed latencies of the rows with one client. `benchmarks.simulation.rows` checks what follows from
them against serving rows that were not used here.
"""

import functools
import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of one model on one kind of GPU; seconds unless a name says otherwise.

    Attributes:
        step_base: (tokens, seconds): a step's time without attention, for few tokens.
        step_fixed, per_token: the same for many tokens: fixed + tokens x per_token.
        per_kv_token: attention of one decoding row to one cached token.
        per_pair: attention of a prompt: one token to one earlier token.
        kv_tokens, kv_tokens_shared: room for KV on a GPU of its own; beside an encoder.
        encode_fixed, per_patch, per_patch_pair: a batch of the tower; an image's patches; their
            attention, per patch squared.
        request_in, request_out: a request to the engine; a token from the engine to the client.
        image_fixed, per_patch_in: of an image: base64, digest, RPC, JPEG, upload; before the tower.
        per_patch_shared_memory, per_patch_network: from the tower to the decoder's memory, as far
            as it does not overlap with the tower.
        sharing: what is left of a GPU when an encoder and a decoder take turns on it.
        step_s: how long a step may last: prompts are cut to fit, to `least_chunk` tokens at least.
    """

    name: str
    step_base: tuple[tuple[int, float], ...]
    step_fixed: float
    per_token: float
    per_kv_token: float
    per_pair: float
    kv_tokens: int
    kv_tokens_shared: int
    encode_fixed: float
    per_patch: float
    per_patch_pair: float
    request_in: float
    request_out: float
    per_patch_in: float
    per_patch_shared_memory: float
    per_patch_network: float
    sharing: float
    max_rows: int = 256
    max_step_tokens: int = 8192
    max_waiting: int = 1024
    max_batch_patches: int = 12_288
    max_queued_patches: int = 1 << 20
    step_s: float = math.inf
    least_chunk: int = 256

    def linear_seconds(self, tokens: int) -> float:
        """Everything of a step but attention, for so many tokens."""
        table = self.step_base
        if tokens >= table[-1][0]:
            return max(table[-1][1], self.step_fixed + tokens * self.per_token)
        at = bisect_left(table, (tokens, 0.0))
        high, high_s = table[at]
        if high == tokens or at == 0:
            return high_s
        low, low_s = table[at - 1]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)

    def image_seconds(self, patches: int) -> float:
        """The tower's time for one image, without what a batch costs once."""
        return patches * (self.per_patch + patches * self.per_patch_pair)


@functools.cache
def linear_table(costs: StageCosts) -> list[float]:
    """`linear_seconds` of each number of tokens that a step may have."""
    return [costs.linear_seconds(tokens) for tokens in range(costs.max_step_tokens + 1)]


# One H200, Qwen3-VL-2B's shape, bf16. Sources: benchmarks/LOG.md and HISTORY.md (decode steps of
# 91694f4 at context 1,024 less 26.5 ns per cached token; batch 1 is text_c1's TPOT of today).
H200_2B = StageCosts(
    name="Qwen3-VL-2B on an H200",
    # 1.16, 1.78, 1.91, 2.40, 3.39, 5.30, 8.89 ms for 1, 8, 16, 32, 64, 128, 256 rows
    step_base=(
        (1, 1.13e-3),
        (8, 1.52e-3),
        (32, 1.53e-3),
        (64, 1.65e-3),
        (128, 1.83e-3),
        (256, 1.94e-3),
    ),
    # Prompts of 1,008 and 8 x 1,008 tokens: 5.38 and 40.2 ms.
    step_fixed=0.41e-3,
    per_token=4.67e-6,
    # 117 MB at 4.3 TB/s; also the slope from 64 to 256 rows less that of the GEMMs.
    per_kv_token=26.5e-9,
    # 28 layers x 4 x 2,048 FLOP at 450 TFLOP/s (14.3 us a layer for 1,008 tokens).
    per_pair=0.51e-9,
    # 0.9 and 0.75 of 139 GiB less 3.44 GB of weights and the largest step; 112 KiB a token.
    kv_tokens=1_100_000,
    kv_tokens_shared=920_000,
    # From JPEG bytes, batches of 12,288 patches: 512 x 512 660/s, 1024 x 1024 124.5/s; a lone
    # 512 x 512 takes 0.6 ms more than its share of a batch.
    encode_fixed=0.6e-3,
    per_patch=1.270e-6,
    per_patch_pair=0.1566e-9,
    # text_c1: 8.4 ms to the first token, 5.38 of them in the engine.
    request_in=2.0e-3,
    request_out=1.0e-3,
    # img1024_c1: what remains of 24.8 ms (JPEG 2.9 to 6.0 ms).
    per_patch_in=6.0e-3 / 4096,
    # 16 MiB: 4.7 and 9.9 ms, 3 ms of which the tower hides by sending DeepStack features early.
    per_patch_shared_memory=1.7e-3 / 4096,
    per_patch_network=6.9e-3 / 4096,
    sharing=1.0,
)

# One H100 (80 GB), Qwen3-VL-8B's shape, bf16. Sources: benchmarks/LOG.md, weight formats and a step
# bounded by time; on the H200, the tower.
H100_8B = StageCosts(
    name="Qwen3-VL-8B on an H100",
    # 5.38, 6.84, 9.62 ms for 1, 16, 64 rows of context 1,024.
    step_base=((1, 5.32e-3), (16, 5.90e-3), (64, 5.92e-3), (256, 6.6e-3)),
    # A prompt of 1,008 tokens: 23.0 ms in the engine alone, 24.1 with HTTP.
    step_fixed=0.3e-3,
    per_token=21.6e-6,
    # 147 KiB a token; the slope from 16 to 64 rows.
    per_kv_token=56.8e-9,
    # 36 layers x 4 x 4,096 FLOP at 400 TFLOP/s.
    per_pair=1.47e-9,
    # 24,283 blocks of 16 with 0.9 of the card; 0.75 of it beside an encoder.
    kv_tokens=388_000,
    kv_tokens_shared=305_000,
    # 80 images of 1024 x 1024 a second on an H200; attention by its FLOPs.
    encode_fixed=0.6e-3,
    per_patch=2.03e-6,
    per_patch_pair=0.25e-9,
    request_in=1.0e-3,
    request_out=0.5e-3,
    # img1024_c1: what remains of 54.0 ms.
    per_patch_in=10.0e-3 / 4096,
    per_patch_shared_memory=3.4e-3 / 4096,
    per_patch_network=13.8e-3 / 4096,
    sharing=1.0,
    step_s=40e-3,
)
