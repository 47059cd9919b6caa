"""What the stages of a request cost on one GPU, from measured pieces.

Calibrated on pieces that were measured alone: decode steps, prompts, the vision tower, and the
fixed latencies of the rows with one client. `benchmarks.simulation.rows` checks what follows from
them against serving rows that were not used here.
"""

import functools
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
