"""What a fused draw must give: for a number in the middle of a token's share, that token.

The distribution is the sampler's, written out in float64 for one row at a time.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.decoder.engine.messages import SamplingParams
from services.decoder.kernels.draw_params import DrawParams

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


def check(draw: Callable[..., Tensor], logits: Tensor, rows: Sequence[Row], seed: int) -> None:
    """All rows at once, and each by itself."""
    chooser, vocab_size = np.random.default_rng(seed), logits.shape[1]
    expected, uniforms = [], []
    for one, row in zip(logits.float().cpu().numpy(), rows, strict=True):
        if row.temperature == 0:
            expected.append(int(one.argmax()))
            uniforms.append(0.5)
            continue
        shares = distribution(one, row)
        large = np.where(shares > _LEAST_SHARE, shares, 0)
        token = int(chooser.choice(vocab_size, p=large / large.sum()))
        expected.append(token)
        uniforms.append(shares[:token].sum() + 0.5 * shares[token])
    fields = [[row.temperature for row in rows], [row.top_p for row in rows]]
    floats = torch.tensor([*fields, [row.min_p for row in rows]]).to(logits.device)
    top_k = torch.tensor([row.top_k or vocab_size for row in rows]).to(logits.device)
    numbers = torch.tensor(uniforms, dtype=torch.float64).to(logits.device)
    params = DrawParams(floats, top_k, numbers, has_top_k=True, has_top_p=True, forbids=True)
    assert draw(logits, params).tolist() == expected
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        alone = DrawParams(
            floats[:, part].contiguous(), top_k[part], numbers[part], row.top_k > 0, row.top_p < 1,
            forbids=True,
        )  # fmt: skip
        assert draw(logits[part], alone).tolist() == expected[part], row
    for place, value in ((0, torch.nan), (-1, torch.inf), (vocab_size // 2, -torch.inf)):
        broken = logits.clone()
        broken[::2, place] = value
        for forbids in (False, True):
            fine = torch.isfinite(broken) | (forbids & (broken == -torch.inf))
            found = draw(broken, params._replace(forbids=forbids))
            assert torch.equal(found >= 0, fine.all(-1)) and (found < vocab_size).all()
