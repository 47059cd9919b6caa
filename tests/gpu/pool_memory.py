"""Run by test_decoder_gpu.py: what of its share a decoder leaves, in a process of its own, since
graphs and kernels of other tests would count as this one's.

Prints bytes left when it is ready, bytes left after the largest step, and blocks of the pool.
"""

import json
import sys
from pathlib import Path

import torch

from services.decoder.engine.run.runner_factory import (
    RunnerOptions,
    _run_largest_step,
    create_runner,
)
from tests.gpu.decoder_2b import GPU, options


def main() -> None:
    """Arguments: the model's directory, the process's share of the card, bytes others have."""
    directory, share, others = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    chosen = options(load_format="dummy", kv_cache_bytes=None, memory_fraction=share)
    runner = create_runner(RunnerOptions(model_directory=directory, **chosen))
    left: list[int] = []
    for is_ready in (True, False):
        if not is_ready:
            _run_largest_step(runner)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(GPU)
        left.append(int(total * share) - (total - free - others))
    print(json.dumps([*left, runner.info.num_blocks]))


if __name__ == "__main__":
    main()
