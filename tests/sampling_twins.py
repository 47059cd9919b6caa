"""What sampling kernels must give.

Sampling: for a uniform number in the middle of a token's share of the distribution, that token. The
distribution is written out in float64 for one row at a time. Penalties: the plain twin's numbers,
bit for bit, and its counts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling import ALL_MASKED, NOT_FINITE, sampling
from kernels.sampling.sampling import MaskedRows, SamplingInputs
from services.decoder.engine.messages import SamplingParams
from services.decoder.operations.ops import Ops, PlainOps

_LEAST_SHARE = 5e-6  # sums in float32 leave a share's middle by a hundredth of this


class Row(NamedTuple):
    """A row's parameters; top_k 0: all."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ROWS = (
    Row(1.0), Row(0.0), Row(0.5, top_k=4), Row(1.7, top_p=0.7), Row(1.0, 20, 0.8, 0.05),
    Row(0.7, top_k=1, top_p=0.3), Row(1.0, min_p=0.3, top_p=0.95), Row(1.3, 49, 0.999), Row(0.01),
    Row(1.0, top_p=1e-6), Row(1.0, 2000, 0.999), Row(3.0, min_p=1.0),
)  # fmt: skip


def distribution(
    logits: npt.NDArray[np.float32], row: Row | SamplingParams
) -> npt.NDArray[np.float64]:
    """Temperature, min_p, top_k, top_p."""
    scaled = logits.astype(np.float64) / row.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-logits, kind="stable")
    order = order[weights[order] >= row.min_p * (1 - 1e-12)][: row.top_k or None]
    shares = weights[order] / weights[order].sum()
    order = order[np.cumsum(shares) - shares < np.float32(row.top_p)]
    out = np.zeros(len(logits))
    out[order] = weights[order] / weights[order].sum()
    return out


def sampling_inputs(
    rows: Sequence[Row],
    uniforms: npt.NDArray[np.float64],
    vocab_size: int,
    device: torch.device,
    *,
    has_bias: bool = False,
    masks: Sequence[npt.NDArray[np.int32] | None] = (),
) -> SamplingInputs:
    """The inputs of rows without penalties."""
    neutral = (1.0, 0.0, 0.0)
    floats = np.array([(r.temperature, r.top_p, r.min_p, *neutral) for r in rows], np.float32).T
    top_k = np.array([row.top_k or vocab_size for row in rows])
    index = np.full(len(rows), -1)
    given = [number for number, mask in enumerate(masks) if mask is not None]
    index[given] = np.arange(len(given))
    return SamplingInputs(
        rows=torch.arange(len(rows), device=device),
        floats=torch.from_numpy(np.ascontiguousarray(floats)).to(device),
        top_k=torch.from_numpy(top_k).to(device),
        uniforms=torch.from_numpy(uniforms).to(device),
        host_floats=floats,
        host_top_k=top_k,
        has_top_k=any(row.temperature > 0 and row.top_k > 0 for row in rows),
        has_top_p=any(row.temperature > 0 and row.top_p < 1 for row in rows),
        mask_index=torch.from_numpy(index).to(device) if given else None,
        token_masks=torch.from_numpy(np.stack([m for m in masks if m is not None])).to(device)
        if given
        else None,
        bias=(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        if has_bias
        else None,
    )


def mask_of(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """`[vocab_size]` bool → the words of a token mask."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def check(
    sample: Callable[..., Tensor],
    logits: Tensor,
    rows: Sequence[Row],
    seed: int,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> None:
    """All rows at once, and each by itself. `allowed` `[B, V]`: token masks of every other row."""
    chooser, vocab_size = np.random.default_rng(seed), logits.shape[1]
    masks: list[npt.NDArray[np.int32] | None] = [None] * len(rows)
    effective = logits.float().cpu().numpy().copy()
    if allowed is not None:
        for number in range(0, len(rows), 2):
            masks[number] = mask_of(allowed[number])
            effective[number] = np.where(allowed[number], effective[number], -np.inf)
    expected, uniforms = [], []
    for one, row in zip(effective, rows, strict=True):
        if row.temperature == 0:
            expected.append(int(one.argmax()))
            uniforms.append(0.5)
            continue
        shares = distribution(one, row)
        large = np.where(shares > _LEAST_SHARE, shares, 0)
        token = int(chooser.choice(vocab_size, p=large / large.sum()))
        expected.append(token)
        uniforms.append(shares[:token].sum() + 0.5 * shares[token])
    numbers, device = np.array(uniforms), logits.device

    def inputs_of(which: slice, **fields: bool) -> SamplingInputs:
        return sampling_inputs(
            rows[which], numbers[which], vocab_size, device, masks=masks[which], **fields
        )

    assert sample(logits, inputs_of(slice(None), has_bias=True)).tolist() == expected
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        alone = sample(logits[part], inputs_of(part, has_bias=True))
        assert alone.tolist() == expected[part], row
    for has_bias in (False, True):
        broken = logits.clone()
        kinds = (0, torch.nan), (-1, torch.inf), (vocab_size // 2, -torch.inf)
        for number, (place, value) in enumerate(kinds, has_bias):
            broken[number % len(rows) :: 3, place] = value
        fine = torch.isfinite(broken) | (has_bias & (broken == -torch.inf))
        found = sample(broken, inputs_of(slice(None), has_bias=has_bias))
        assert torch.equal(found >= 0, fine.all(-1)) and (found < vocab_size).all()


def check_masked_out(sample: Callable[..., Tensor], logits: Tensor) -> None:
    """A row of which all tokens are masked out fails; its neighbours have their tokens, and one
    that is not finite besides says that.
    """
    vocab_size, none = logits.shape[1], np.zeros(logits.shape[1], np.bool_)
    one = none.copy()
    one[vocab_size - 1] = True
    for row in (Row(0.0), Row(1.0), Row(0.8, 5, 0.9)):
        rows = [row, row, row, row]
        masks = [mask_of(none), mask_of(one), None, mask_of(none)]
        broken = logits[:4].clone()
        broken[3, 1] = torch.nan
        inputs = sampling_inputs(rows, np.full(4, 0.5), vocab_size, logits.device, masks=masks)
        found = sample(broken, inputs).tolist()
        assert found[:2] == [ALL_MASKED, vocab_size - 1] and found[3] == NOT_FINITE
        alone = sampling_inputs(rows[2:3], np.full(1, 0.5), vocab_size, logits.device)
        assert [found[2]] == sample(logits[2:3], alone).tolist()


def check_greedy_masked(
    greedy_masked: Callable[[Tensor, MaskedRows, Tensor, Tensor], None], logits: Tensor
) -> None:
    """Seven rows of nine have masks: any ids, the last one, none; one row each is all equal, not
    finite where the mask allows it, and where it does not.
    """
    vocab_size, device = logits.shape[1], logits.device
    logits = logits[:9].clone()
    logits[3], logits[5, 1], logits[6, 0] = 0.5, torch.nan, torch.inf
    index = [8, 0, 1, 2, 3, 5, 6]
    allowed = np.random.default_rng(0).random((len(index), vocab_size)) < 0.3
    allowed[0] = False
    allowed[0, -1] = allowed[4, 2] = True
    allowed[1] = False
    allowed[4, :2], allowed[5, 1], allowed[6, 0] = False, True, False
    masked = MaskedRows(
        torch.tensor(index, device=device),
        torch.tensor([10 + number for number in index], device=device),
        torch.from_numpy(np.stack([mask_of(one) for one in allowed])).to(device),
    )
    token_ids = torch.full((9,), 77, dtype=torch.int32, device=device)
    last_tokens = torch.full((20,), 99, dtype=torch.int32, device=device)
    greedy_masked(logits, masked, token_ids, last_tokens)
    values = logits.float().cpu().numpy()
    expected = np.where(allowed, values[index], -np.inf).argmax(-1).tolist()
    expected[1], expected[5], expected[6] = ALL_MASKED, NOT_FINITE, NOT_FINITE
    assert expected[0] == vocab_size - 1 and expected[4] == 2
    found = token_ids.tolist()
    assert [found[number] for number in index] == expected
    assert found[4] == found[7] == 77
    kept = last_tokens.tolist()
    assert [kept[10 + number] for number in index] == [max(0, token) for token in expected]
    assert kept[:10] == [99] * 10 and kept[14] == kept[17] == kept[19] == 99


def check_penalties(ops: Ops, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Four rows of six: one has no penalties, one's token is none."""
    torch.manual_seed(vocab_size)
    kinds = [[1.3, 1.0, 1.0, 0.6], [0.5, 0.0, 0.0, -1.0], [0.1, 0.0, 0.4, 0.0]]
    floats = torch.tensor([[0.0] * 4] * 3 + kinds, device=device)
    rows = torch.tensor([4, 0, 5, 1], device=device)
    token_ids = torch.tensor([3, 5, -1, vocab_size - 1], dtype=torch.int32, device=device)
    logits = (torch.randn(4, vocab_size, device=device) * 3).to(dtype)
    raw = logits.clone()
    neutral = sampling_inputs([Row(1.0)] * 4, np.full(4, 0.5), vocab_size, device)
    start = torch.randint(0, 8, (6, vocab_size), dtype=torch.int32, device=device)
    found: list[list[torch.Tensor]] = []
    for each in (PlainOps(), ops):
        told = neutral._replace(seen=start.clone(), rows=rows, floats=floats)
        first = each.penalize(logits, told)
        each.count_tokens(token_ids, told)
        assert told.seen is not None
        found.append([first, each.penalize(first, told), told.seen])
    for expected, actual in zip(*found, strict=True):
        assert expected.dtype == actual.dtype and torch.equal(expected, actual)
    first, second, seen = found[1]
    assert torch.equal(logits, raw) and torch.equal(first[1], raw[1].float())
    assert (first != raw.float()).any(1).tolist() == [True, False, True, True]
    assert (second != first).any(1).tolist() == [True, False, True, True]
    assert (seen - start).nonzero().tolist() == [[1, vocab_size - 1], [4, 3]]
    assert (seen - start).amax() == 2


def check_greedy_rescored(
    kernel: Callable[..., Tensor], vocab_size: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """Checks the best tokens of approximate logits, with rows that are not finite."""
    draw = torch.Generator(device).manual_seed(vocab_size)

    def random(*shape: int) -> Tensor:
        # Whole numbers, so that sums are exact in each order, and some logits are equal.
        return torch.randint(-2, 3, shape, generator=draw, device=device).to(dtype)

    hidden, weight = random(6, width), random(vocab_size, width)
    logits = (hidden.float() @ weight.float().T).round(decimals=-1).to(dtype)
    logits[1, 5], logits[2, -1] = torch.nan, torch.inf
    hidden[3] = torch.inf
    logits[4] = 0.0
    found = kernel(logits, hidden, weight)
    assert found.dtype == torch.int32 and found[1:4].tolist() == [NOT_FINITE] * 3
    assert torch.equal(found, sampling.greedy_rescored(logits, hidden, weight))
    exact = hidden.float() @ weight.float().T
    chosen = exact.gather(1, found.clamp(min=0)[:, None].long()).squeeze(1)
    for row in (0, 5):
        assert chosen[row] >= exact[row, logits[row].argmax()]
