"""The operations of a decoder layer that a GPU runs as one kernel each, and their plain twins."""

import importlib.util
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from services.common.model_spec import TextSpec
from services.common.nn import layers
from services.common.nn.linear import sum_parts
from services.decoder.attention.base import kv_rows
from services.decoder.kernels.draw_params import DrawParams, Penalties
from services.decoder.models.rope import ProjectedHeads, RotaryEmbedding, qk_rope_cache


class Ops(Protocol):
    """What a layer asks for between its matrix products. Arguments may be overwritten.

    Attributes:
        max_few_tokens: up to so many tokens, a layer's products take their neighbours with them
            (`norm_linear`, `norm_swiglu`, `linear_add`, `linear`); 0: never.
    """

    max_few_tokens: int

    def pick_tokens(self, known: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
        """A step's token ids.

        Args:
            known: `[T]` int32, the ids that the host knows.
            rows: `[T]` int64, the row whose last sampled token it is instead; -1: it is known.
            last_tokens: int32, by row.

        Returns:
            `[T]` int32.
        """
        ...

    def rope_and_rows(
        self,
        positions: Tensor,
        slots: Tensor,
        mrope: RotaryEmbedding,
        dtype: torch.dtype,
        block_size: int,
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Cos and sin of `mrope` for `positions` `[3, T]`, and `kv_rows` of `slots` `[T]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `layers.rms_norm`."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `layers.add_rms_norm`; `x` may be in parts, see `linear_parts`."""
        ...

    def add_product(self, x: Tensor, weight: Tensor, residual: Tensor) -> bool:
        """`residual += x @ weight.T` of many tokens; False: not done, a product and `add_rms_norm`
        take less time.
        """
        ...

    def is_small_batch(self, x: Tensor) -> bool:
        """Whether `linear_parts` serves products of `x` `[T, K]`, better than `F.linear`."""
        ...

    def linear_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """`[T, K]`, `[N, K]` → `[S, T, N]` float32, which `sum_parts` makes the product."""
        ...

    def linear_swiglu(self, x: Tensor, weight: Tensor) -> Tensor:
        """`linear` to gate and up, `[2 * N, K]`, then `silu_and_mul`: `[T, N]`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `layers.silu_and_mul`."""
        ...

    def qk_rope_cache(self, heads: ProjectedHeads, keys_values: Tensor | None = None) -> Tensor:
        """See `rope.qk_rope_cache`."""
        ...

    def max_fused_context(self, num_tokens: int) -> int:
        """The longest context for which `attend_few` serves so many decodes; 0: it does not."""
        ...

    def attend_few(self, heads: ProjectedHeads, block_ids: Tensor, seq_lens: Tensor) -> Tensor:
        """`qk_rope_cache`, then attention, of a few decodes.

        Args:
            heads: as there.
            block_ids: the sequences' KV blocks one after the other, int32.
            seq_lens: `[T]` int32, the new token included.

        Returns:
            `[T, num_heads * head_dim]`.
        """
        ...

    def penalize(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Repetition penalty over prompt and completion, frequency and presence penalty over the
        completion, in float32.

        Args:
            logits: `[B, vocab_size]`, contiguous; left as they are.
            penalties: of the same rows.
        """
        ...

    def count_tokens(self, token_ids: Tensor, penalties: Penalties) -> None:
        """Rows with penalties have seen these, `[B]` int32; below zero: none."""
        ...

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor | None:
        """A token for each row of logits `[B, vocab_size]`, contiguous, as `engine.sampler` says;
        None: not done.

        Returns:
            `[B]` int32; -1 where a row is not finite.
        """
        ...

    def greedy(self, logits: Tensor) -> Tensor:
        """`[B, vocab_size]` → `[B]` int32: the most likely ids; -1 where a row is not finite."""
        ...

    def linear(self, x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[T, K]`, `[N, K]` → `[T, N]`; to `out`, if there is one."""
        ...

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """RMSNorm with weight `norm`, then `linear`."""
        ...

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """`norm_linear` to gate and up, `[2 * N, K]`, then `silu_and_mul`."""
        ...

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> None:
        """`residual += linear(x, weight)`."""
        ...


def pick_tokens(known: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
    """See Ops."""
    return torch.where(rows >= 0, last_tokens[rows.clamp(min=0)], known)


def rope_and_rows(
    positions: Tensor, slots: Tensor, mrope: RotaryEmbedding, dtype: torch.dtype, block_size: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """See Ops."""
    return mrope(positions, dtype), kv_rows(slots, block_size)


def greedy(logits: Tensor) -> Tensor:
    """See Ops."""
    finite = torch.isfinite(logits.sum(-1, dtype=torch.float32))
    return logits.argmax(-1).masked_fill(~finite, -1).to(torch.int32)


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """See Ops."""
    logits, seen = logits.float(), penalties.seen[penalties.rows]
    repetition, presence, frequency = penalties.floats[3:, :, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits, count = torch.where(seen > 0, scaled, logits), seen >> 1
    return logits - frequency * count - presence * (count > 0)


def count_tokens(token_ids: Tensor, penalties: Penalties) -> None:
    """See Ops."""
    repetition, presence, frequency = penalties.floats[3:]
    has_any = (repetition != 1) | (presence != 0) | (frequency != 0)
    places = penalties.rows, token_ids.clamp(min=0).long()
    counts = 2 * (has_any & (token_ids >= 0)).int()
    penalties.seen.index_put_(places, counts, accumulate=True)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See Ops."""
    return layers.add_rms_norm(sum_parts(x, residual.dtype), residual, weight, eps)


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """See Ops. In one part."""
    return F.linear(x.float(), weight.float())[None]


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """See Ops."""
    return layers.silu_and_mul(F.linear(x, weight))


def linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See Ops."""
    return torch.mm(x, weight.t(), out=out)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See Ops."""
    return F.linear(layers.rms_norm(x, norm, eps), weight)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See Ops."""
    return layers.silu_and_mul(norm_linear(x, norm, eps, weight))


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """See Ops."""
    residual += F.linear(x, weight)


def attend_few(heads: ProjectedHeads, block_ids: Tensor, seq_lens: Tensor) -> Tensor:
    """See Ops."""
    query = qk_rope_cache(heads)
    kv_cache, block_size = heads.kv_cache, heads.kv_cache.shape[2]
    counts = -(-seq_lens // block_size)
    index = torch.arange(int(seq_lens.max()), device=query.device)
    inside = index < seq_lens[:, None]  # [T, longest]
    place = (counts.cumsum(0) - counts)[:, None] + index // block_size
    blocks = block_ids[place.where(inside, 0)]
    keys, values = (kv_cache[blocks, part, index % block_size].transpose(1, 2) for part in (0, 1))
    attended = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=inside[:, None, None], enable_gqa=True
    )
    return attended.flatten(1)


class PlainOps:
    """Plain torch: the specification, and the path of CPUs."""

    max_few_tokens = 0
    attend_few = staticmethod(attend_few)
    pick_tokens = staticmethod(pick_tokens)
    rope_and_rows = staticmethod(rope_and_rows)
    greedy = staticmethod(greedy)
    penalize = staticmethod(penalize)
    count_tokens = staticmethod(count_tokens)
    linear = staticmethod(linear)
    norm_linear = staticmethod(norm_linear)
    norm_swiglu = staticmethod(norm_swiglu)
    linear_add = staticmethod(linear_add)

    rms_norm = staticmethod(layers.rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    linear_parts = staticmethod(linear_parts)
    linear_swiglu = staticmethod(linear_swiglu)
    silu_and_mul = staticmethod(layers.silu_and_mul)
    qk_rope_cache = staticmethod(qk_rope_cache)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor | None:
        """See Ops: the sampler has its own way."""
        return None

    def max_fused_context(self, num_tokens: int) -> int:
        """See Ops: in plain torch there is nothing to gain."""
        return 0

    def is_small_batch(self, x: Tensor) -> bool:
        """As `max_fused_context`."""
        return False

    def add_product(self, x: Tensor, weight: Tensor, residual: Tensor) -> bool:
        """As `max_fused_context`."""
        return False


def create_ops(device: torch.device, config: TextSpec) -> Ops:
    """The fused operations where they run, else the plain ones."""
    half = config.head_dim // 2
    fits = half & (half - 1) == 0
    if (
        device.type != "cuda"
        or not fits
        or not config.qk_norm
        or importlib.util.find_spec("triton") is None
    ):
        return PlainOps()
    from services.decoder.kernels.triton_ops import create_triton_ops

    return create_triton_ops(device, config)
