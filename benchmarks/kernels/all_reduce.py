"""The sum over ranks that follows a projection, by number of rows: which way is the fastest?

    python -m benchmarks.kernels.all_reduce --ranks 2     # a process and a card for each rank

Microseconds of one call in a replayed CUDA graph, the slowest rank's: `nccl` all-reduces in place;
`one-shot` and `two-shot` are torch's, with the copy into symmetric memory that they need; `nccl,
norm` adds to the residual stream and normalises, too. `peers` is `peer_sum.add`, which adds to the
residual stream; `peers, norm` is that and a norm's kernel. Multicast stays off.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from kernels.gemm.add_norm import add_rms_norm, rms_norm
from kernels.ranks import peer_sum
from kernels.ranks.peer_buffers import PeerBuffers

WIDTHS = (1024, 2048, 4096, 5120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1008, 2048)
_CALLS, _REPLAYS = 40, 5
_EPS = 1e-6


def time_us(call: Callable[[], object]) -> float:
    """µs of one call, the slowest rank's."""
    call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            call()
        graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
    found = torch.tensor(start.elapsed_time(end) * 1e3 / _REPLAYS / _CALLS, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def ways(
    rows: int, width: int, buffers: PeerBuffers, shared: Tensor
) -> dict[str, Callable[[], object]]:
    """What is compared, by name."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    term, residual = (torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda") for _ in "tr")
    norm = torch.ones(width, dtype=torch.bfloat16, device="cuda")
    part = shared[: rows * width].view(rows, width)

    def nccl_norm() -> None:
        dist.all_reduce(term)
        add_rms_norm(term, residual, norm, _EPS, pdl=True)

    def one_shot() -> None:
        part.copy_(term)
        torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group)

    def two_shot() -> None:
        part.copy_(term)
        torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group)

    def add_then_norm() -> None:
        peer_sum.add(term, residual, buffers)
        rms_norm(residual, norm, _EPS, pdl=True)

    return {
        "nccl": partial(dist.all_reduce, term),
        "nccl, norm": nccl_norm,
        "one-shot": one_shot,
        "two-shot": two_shot,
        "peers": partial(peer_sum.add, term, residual, buffers),
        "peers, norm": add_then_norm,
    }


def run_rank(rank: int, count: int, store: str) -> None:
    """One rank's part; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=count, device_id=device
    )
    show = partial(print, flush=True) if rank == 0 else lambda *_: None
    shared = symmetric_memory.empty(ROWS[-1] * WIDTHS[-1], dtype=torch.bfloat16, device=device)
    symmetric_memory.rendezvous(shared, dist.group.WORLD)  # type: ignore[arg-type]
    for width in WIDTHS:
        buffers = PeerBuffers.create(ROWS[-1], width, torch.bfloat16, device)
        header = True
        for rows in ROWS if width > WIDTHS[0] else ROWS[:1]:
            found: dict[str, str] = {}
            for name, call in ways(rows, width, buffers, shared).items():
                try:
                    found[name] = f"{time_us(call):.1f}"
                except RuntimeError as error:
                    found[name] = type(error).__name__
                    show(f"{name}: {error}"[:300])
            if header:
                show(f"\n| {width} wide, {count} ranks | KiB | {' | '.join(found)} |")
                show("|--:" * (2 + len(found)) + "|")
                header = False
            show(f"| {rows} | {rows * width // 512} | {' | '.join(found.values())} |")
    dist.destroy_process_group()


def main() -> None:
    """A process for each rank."""
    parser = argparse.ArgumentParser(description="The sum over ranks, by number of rows.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(given.rank, given.ranks, given.store)
        return
    # The library would use NVLink multicast, which this benchmark does not.
    env = ["env", "NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"]
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        command = [*env, sys.executable, "-m", "benchmarks.kernels.all_reduce", *sys.argv[1:]]
        children = [
            subprocess.Popen([*command, "--rank", str(rank), "--store", str(store)])
            for rank in range(given.ranks)
        ]
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):  # the others would wait for it
                for child in children:
                    child.kill()
            time.sleep(0.1)
    if any(child.returncode for child in children):
        raise SystemExit(f"ranks ended with {[child.returncode for child in children]}")


if __name__ == "__main__":
    main()
