"""Run by interpreted.py.

One rank runs; the others' terms are written where their launches would have written them, before.
In float16: the interpreter rounds no bfloat16.
"""

import torch
from torch import Tensor

from kernels import plain
from kernels.ranks import peer_buffers, peer_sum
from kernels.ranks.peer_buffers import BUFFERS, PART, PeerBuffers
from tests.unit.kernels import interpreter as interpreter

ROWS, WORDS = 4, {torch.float16: torch.int16, torch.float32: torch.int32}


def sent(term: Tensor) -> Tensor:
    """A term's bits, without -0.0."""
    return term.masked_fill(term == 0, 0.0).view(WORDS[term.dtype])


def check(rank: int, count: int, width: int, dtype: torch.dtype) -> None:
    word = WORDS[dtype]
    empty = torch.iinfo(word).min
    memory = [
        torch.full((BUFFERS, ROWS, count - 1, width), empty, dtype=word) for _ in range(count)
    ]
    peers = torch.tensor([each.data_ptr() for each in memory])
    turns = torch.zeros(ROWS * -(-width // PART), dtype=torch.int32)
    buffers = PeerBuffers(rank, memory[rank], peers, turns, pdl=False)
    others = [peer for peer in range(count) if peer != rank]
    parts = [slice(first, min(first + PART, width)) for first in range(0, width, PART)]
    launches = [0] * ROWS  # of each row
    for case, rows in enumerate((1, 3, 3, 1, 4, 4, 1)):
        terms = torch.randn(count, rows, width).to(dtype)
        terms[:, 0, :4] = -0.0  # a sum of them alone
        terms[rank, 0, 2:4] = 0.0
        residual = torch.randn(rows, width).to(dtype)
        wanted = plain.add_terms(terms, residual)
        sums = plain.add_terms(terms, torch.zeros_like(residual))
        two_shots = rows > peer_buffers.one_shot_rows(count, width, dtype)

        def owner(row: int, part: int) -> int:
            return (row + part) % count

        for row in range(rows):
            mine = memory[rank][launches[row] % BUFFERS, row]
            for place, peer in enumerate(others):
                for part, columns in enumerate(parts):
                    if not two_shots or owner(row, part) == rank:
                        mine[place, columns] = sent(terms[peer, row, columns])
                    elif owner(row, part) == peer:
                        mine[place, columns] = sent(sums[row, columns])
        own_term = terms[rank]
        if case % 2:  # split-K partials
            own_term = own_term.float() * torch.tensor([0.5, 0.5])[:, None, None]
        peer_sum.add(own_term, residual, buffers)
        assert torch.equal(residual, wanted), (rank, count, rows)
        for row in range(rows):
            now = launches[row] % BUFFERS
            for peer in others:
                found = memory[peer][now, row, rank - (rank > peer)]
                for part, columns in enumerate(parts):
                    if not two_shots or owner(row, part) == peer:
                        assert torch.equal(found[columns], sent(terms[rank, row, columns]))
                    elif owner(row, part) == rank:
                        assert torch.equal(found[columns], sent(sums[row, columns]))
                    # Else it is empty, or of a launch of these turns before.
            assert (memory[rank][(now + 2) % BUFFERS, row] == empty).all()
            launches[row] += 1
        for each in others:  # which empty theirs
            memory[each].fill_(empty)


for case in (
    (0, 2, 2048, torch.float16), (1, 2, 96, torch.float32), (2, 4, 96, torch.float16),
    (0, 3, 1056, torch.float32),
):  # fmt: skip
    check(*case)
# One row in one shot, more in two.
peer_buffers._ONE_SHOT_BYTES = {2: 4200, 3: 4300, 4: 4200}  # pyright: ignore[reportPrivateUsage]
for case in (
    (0, 2, 2048, torch.float16), (2, 4, 2080, torch.float16), (3, 4, 1056, torch.float32),
    (1, 3, 1056, torch.float32),
):  # fmt: skip
    check(*case)
print("agreed")
