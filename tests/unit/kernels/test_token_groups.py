"""Groups of the tokens of a step, which have one slot each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.text_shapes import TEXT_SHAPES
from kernels.adapters.factors import AdapterRows
from kernels.adapters.token_groups import group_tokens
from kernels.device import DeviceFacts
from services.decoder.models.base import StepContext
from services.decoder.models.transformer import DecoderLayer
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts
from services.decoder.operations.ops import Ops


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


@pytest.mark.parametrize(("count", "is_grouped"), [(64, False), (65, True)])
def test_many_sampled_tokens_are_grouped_once_for_the_last_layer(
    count: int, is_grouped: bool
) -> None:
    """Groups of the whole step would name other tokens."""
    device = DeviceFacts.of(torch.device("cpu"))
    ops = Ops(table.resolve(KernelFacts(device, TEXT_SHAPES["2b"], torch.float32)))
    slots = torch.arange(200) % 4 - 1
    whole = ops.group_adapters(AdapterRows(slots, 3, 0, 3))
    assert whole.groups is not None
    none, nothing = torch.empty(0), torch.empty(0, dtype=torch.int64)
    step = StepContext(ops, ops.for_tokens(200), (none, none), none, nothing, Any, whole)  # type: ignore[arg-type]
    rows = torch.randperm(200)[:count]
    found = step.kernels_of(rows).project.__self__.rows  # type: ignore[attr-defined]
    assert torch.equal(found.slots, slots[rows])
    assert (found.groups is not None) == is_grouped
    if found.groups is not None:
        wanted = group_tokens(slots[rows], 3)
        assert torch.equal(found.groups.tokens, wanted.tokens)
        assert torch.equal(found.groups.slots, wanted.slots)


class _Operations(TorchDispatchMode):
    """Notes the operations of torch in `found`."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_torch_gathers_hidden_states_between_the_groups_and_the_kernels() -> None:
    """The kernels read the groups before their wait, see `kernels.dependent_launch`."""
    events: list[str] = []

    class Output(Exception):
        """The first kernel after the mixer would be launched."""

    class Mixer:
        def __call__(self, *_: object) -> tuple[Tensor, Tensor]:
            return torch.ones(9, 4), torch.ones(9, 4)

        @property
        def output(self) -> None:
            raise Output

    step: Any = SimpleNamespace(kernels=None, kernels_of=lambda _: events.append("groups"))
    layer: Any = SimpleNamespace(mixer=Mixer(), input_layernorm=None)
    rows, stream = torch.tensor([3, 1]), SimpleNamespace()
    with _Operations(events), pytest.raises(Output):
        DecoderLayer.forward(layer, stream, step, rows)  # type: ignore[arg-type]
    assert events[events.index("groups") :] == ["groups", *["aten.index.Tensor"] * 2]
