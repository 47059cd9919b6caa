"""The sum over ranks: compiled, and by which way. `interpreted_peer_sum.py` has its result."""

from dataclasses import replace

import pytest
import torch

from kernels import plain
from kernels.device import KNOWN_DEVICES
from kernels.ranks.peer_buffers import BUFFERS, PART, PeerBuffers, most_rows
from services.common.nn.collectives import Ranks

HIDDEN = 2048, 2560, 4096, 5120


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_it_compiles_and_polls_whole_words(count: int) -> None:
    pytest.importorskip("triton")
    from kernels.ranks import peer_sum
    from tests.gpu_compiler import compiled_launches

    own = torch.empty(BUFFERS, 64, count - 1, 5120, dtype=torch.int16)
    peers, turns = torch.empty(count, dtype=torch.int64), torch.empty(64 * 5, dtype=torch.int32)
    term, residual = torch.empty(3, 4, 5120), torch.empty(4, 5120, dtype=torch.bfloat16)
    for name in ("h100", "b200", "a100"):
        gpu = KNOWN_DEVICES[name]
        buffers = PeerBuffers(1, own, peers, turns, gpu.supports_pdl)
        with compiled_launches(gpu) as launches:
            peer_sum.add(term, residual, buffers)
        (launch,) = launches
        assert launch.grid == (4, 5)
        polls = [line for line in launch.ptx.splitlines() if "ld.volatile" in line]
        # A peer's store of 4 bytes is seen whole or not at all.
        assert len(polls) >= count - 1
        assert all("ld.volatile.global.v4.b32" in line for line in polls)


@pytest.mark.parametrize("width", HIDDEN)
def test_the_way_depends_on_the_shape_alone(width: int) -> None:
    """Decodes go by peers with 2, 4 and 8 ranks; the memory for that is bounded."""
    for count in (2, 4, 8):
        rows = most_rows(count, width, torch.bfloat16)
        assert rows >= 48
        assert BUFFERS * rows * (count - 1) * width * 2 <= 112 << 20
        assert most_rows(count, width, torch.float32) == rows // 2
    assert most_rows(3, width, torch.bfloat16) == 0
    assert most_rows(2, width, torch.bfloat16) >= 2048  # all prompts that graphs hold


class Doubling(Ranks):
    """One of two ranks with the same terms."""

    def all_reduce(self, term: torch.Tensor) -> torch.Tensor:
        return term.mul_(2)


def test_without_peers_the_library_sums() -> None:
    terms = torch.randn(2, 3, 96).bfloat16()
    terms[1] = terms[0]
    residual = torch.randn(3, 96).bfloat16()
    wanted = plain.add_terms(terms, residual)
    ranks = Doubling(0, 2)
    assert ranks.with_peers(64, 96, torch.bfloat16, torch.device("cpu")) is ranks
    partials = terms[0].float() * torch.tensor([0.5, 0.5])[:, None, None]
    ranks.add(partials, residual)
    assert torch.equal(residual, wanted)
    # More rows than the buffers have: the same.
    own = torch.zeros(BUFFERS, 2, 1, 96, dtype=torch.int16)
    buffers = PeerBuffers(0, own, torch.zeros(2), torch.zeros(2 * PART), pdl=False)
    residual = torch.zeros(3, 96).bfloat16()
    replace(ranks, peers=buffers).add(terms[0].clone(), residual)
    assert torch.equal(residual, terms[0] * 2)
