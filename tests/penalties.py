"""What fused penalties must give: the plain twin's numbers, bit for bit, and its counts."""

import torch

from services.decoder.kernels.draw_params import Penalties
from services.decoder.kernels.ops import Ops, PlainOps


def check(ops: Ops, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Four rows of six: one has no penalties, one's token is none."""
    torch.manual_seed(vocab_size)
    kinds = [[1.3, 1.0, 1.0, 0.6], [0.5, 0.0, 0.0, -1.0], [0.1, 0.0, 0.4, 0.0]]
    floats = torch.tensor([[0.0] * 4] * 3 + kinds, device=device)
    rows = torch.tensor([4, 0, 5, 1], device=device)
    token_ids = torch.tensor([3, 5, -1, vocab_size - 1], dtype=torch.int32, device=device)
    logits = (torch.randn(4, vocab_size, device=device) * 3).to(dtype)
    raw = logits.clone()
    start = torch.randint(0, 8, (6, vocab_size), dtype=torch.int32, device=device)
    found: list[list[torch.Tensor]] = []
    for each in (PlainOps(), ops):
        told = Penalties(start.clone(), rows, floats)
        first = each.penalize(logits, told)
        each.count_tokens(token_ids, told)
        found.append([first, each.penalize(first, told), told.seen])
    for expected, actual in zip(*found, strict=True):
        assert expected.dtype == actual.dtype and torch.equal(expected, actual)
    first, second, seen = found[1]
    assert torch.equal(logits, raw) and torch.equal(first[1], raw[1].float())
    assert (first != raw.float()).any(1).tolist() == [True, False, True, True]
    assert (second != first).any(1).tolist() == [True, False, True, True]
    assert (seen - start).nonzero().tolist() == [[1, vocab_size - 1], [4, 3]]
    assert (seen - start).amax() == 2
