"""Run by test_peer_sum.py, a process for each rank: `peer_sum` against its plain twin.

    python -m tests.gpu.peer_sum_rank STORE RANK COUNT

Ranks wait at random before they sum, so that each is now ahead and now behind.
"""

import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import plain
from kernels.launches import captured_graph
from kernels.ranks import peer_sum
from kernels.ranks.peer_buffers import PeerBuffers

ROWS = 300
CASES = (1, 1, 2, 3, 64, 1, 17, 300, 5, 64, 1)
DTYPES = (torch.bfloat16, 5120), (torch.bfloat16, 2048), (torch.float32, 96)


def terms_of(case: int, count: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """All ranks' terms, the same on each; some are zeros of both signs."""
    source = torch.Generator("cuda").manual_seed(case)
    made = torch.randn(count, rows, width, device="cuda", generator=source).to(dtype)
    made[:, 0, :8] = -0.0
    made[0, 0, 4:8] = 0.0
    return made


def wait_at_random() -> None:
    torch.cuda._sleep(random.randrange(200_000))  # cycles: up to 0.1 ms


def check_eager(rank: int, count: int, width: int, dtype: torch.dtype) -> None:
    buffers = PeerBuffers.create(ROWS, width, dtype, torch.device("cuda", rank))
    for case, rows in enumerate(CASES * 4):
        terms = terms_of(case, count, rows, width, dtype)
        residual = terms_of(1000 + case, 1, rows, width, dtype)[0]
        wanted, mine = plain.add_terms(terms, residual), terms[rank].clone()
        if case % 3 == 1:  # three partials of it
            mine = mine.float() * torch.tensor([0.5, 0.5, 0.0], device="cuda")[:, None, None]
        wait_at_random()
        peer_sum.add(mine, residual, buffers)
        assert torch.equal(residual, wanted), f"case {case} of {rows} rows, rank {rank}"


def check_graphs(rank: int, count: int) -> None:
    """Graphs of several sizes on the same buffers, replayed in any order."""
    width, dtype = 4096, torch.bfloat16
    buffers = PeerBuffers.create(ROWS, width, dtype, torch.device("cuda", rank))
    graphs, residuals, wanted, kept = {}, {}, {}, []
    stream = torch.cuda.Stream()
    for rows in (1, 4, 64, 300):
        first, second = (terms_of(rows + 7 * n, count, rows, width, dtype) for n in range(2))
        kept += [first, second]  # graphs read them
        residuals[rows] = torch.zeros(rows, width, dtype=dtype, device="cuda")
        added = residuals[rows]
        for terms in (first, second, first):
            added = plain.add_terms(terms, added)
        wanted[rows] = added
        peer_sum.add(first[rank], torch.zeros_like(added), buffers)  # compiles
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), captured_graph(None) as graph:
            for terms in (first, second, first):
                peer_sum.add(terms[rank], residuals[rows], buffers)
        graphs[rows] = graph
    order = random.Random(1)
    with torch.cuda.stream(stream):
        for _ in range(300):
            rows = order.choice(list(graphs))
            residuals[rows].zero_()
            wait_at_random()
            graphs[rows].replay()
            assert torch.equal(residuals[rows], wanted[rows]), f"{rows} rows, rank {rank}"


def main(store: str, rank: int, count: int) -> None:
    random.seed(rank)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=count, device_id=device
    )
    for dtype, width in DTYPES:
        check_eager(rank, count, width, dtype)
    check_graphs(rank, count)
    dist.destroy_process_group()
    print("agreed")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
