"""Groups of the tokens of a step, which have one slot each."""

import pytest
import torch

pytest.importorskip("triton")
from kernels.adapters.token_groups import group_tokens


@pytest.mark.parametrize(("count", "num_tokens", "size"), [(8, 1088, 64), (3, 5, 4), (2, 66, 64)])
def test_each_token_is_in_one_group_of_its_slot(count: int, num_tokens: int, size: int) -> None:
    torch.manual_seed(0)
    for most in (0, 1, count):  # without adapters, one slot, all slots
        slots = torch.randint(-1, most, (num_tokens,))
        groups = group_tokens(slots, count, size)
        assert groups.tokens.shape == (num_tokens // size + count + 1, size)
        seen: list[int] = []
        for tokens, slot in zip(groups.tokens.tolist(), groups.slots.tolist(), strict=True):
            own = [token for token in tokens if token >= 0]
            assert tokens == own + [-1] * (size - len(own))
            assert own == sorted(own)
            assert (slot == -2) == (not own)
            assert {int(slots[token]) for token in own} <= {slot}
            seen += own
        assert sorted(seen) == list(range(num_tokens))


def test_as_many_groups_as_can_be() -> None:
    """Slots whose tokens just begin a group."""
    slots = torch.tensor([-1] * 5 + [0] * 5 + [1])
    groups = group_tokens(slots, 2, 4)
    assert groups.slots.tolist() == [-1, -1, 0, 0, 1]
