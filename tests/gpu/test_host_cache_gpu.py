"""Copies of KV blocks between a GPU and the host, beside work that changes the blocks at once."""

import numpy as np
import pytest
import torch

from services.decoder.engine.run.host_cache import HostPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_as_they_were(dtype: torch.dtype) -> None:
    """There are more blocks than the buffer has room for, and each is changed once it is saved."""
    sizes = (8, 600, 2, 16, 8, 128)
    content = torch.randint(0, 256, (*sizes[:-1], 128 * dtype.itemsize), dtype=torch.uint8)
    pool = content.cuda().view(dtype)
    cache = HostPool(pool, 600, 100)
    order = np.random.default_rng(0).permutation(512)
    rounds = 2
    for number in range(rounds):
        half = order[number * 256 : (number + 1) * 256]
        cache.save(np.stack((half, 599 - half), 1))
        pool.view(torch.uint8)[:, torch.from_numpy(half).cuda()] = 0
    assert int(pool.view(torch.uint8)[:, :512].max()) == 0
    targets = np.random.default_rng(1).permutation(512)
    for number in range(rounds):
        half = slice(number * 256, (number + 1) * 256)
        cache.load(np.stack((targets[half], 599 - order[half]), 1))
    found = pool.view(torch.uint8).cpu()
    assert torch.equal(found[:, targets], content[:, order])
    assert torch.equal(found[:, 512:], content[:, 512:])
