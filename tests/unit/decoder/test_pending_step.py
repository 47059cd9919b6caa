"""The way of a step's tokens back to the host."""

from typing import cast

import torch

from services.decoder.engine.run.pending_step import DevicePendingStep, PinnedBuffer, Readback
from services.decoder.engine.run.sampler import Sampled


class FakeEvent:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def query(self) -> bool:
        return "copied" in self.calls


class PretendedGpu(Readback):
    """A readback of a GPU with memory and events of a host."""

    def __init__(self) -> None:
        super().__init__(4, torch.device("cuda"))
        self.made: list[FakeEvent] = []

    def new_buffer(self) -> PinnedBuffer:
        self.made.append(FakeEvent())
        event = cast(torch.cuda.Event, self.made[-1])
        return PinnedBuffer(torch.full((4,), -9, dtype=torch.int32), event, self.free)

    def mark(self) -> torch.cuda.Event:
        self.made.append(FakeEvent())
        self.made[-1].record()
        return cast(torch.cuda.Event, self.made[-1])

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def test_buffers_and_events_are_used_again_when_their_step_was_read_and_not_before() -> None:
    readback = PretendedGpu()

    def launch(*token_ids: int) -> DevicePendingStep:
        sampled = Sampled(torch.tensor(token_ids, dtype=torch.int32), None)
        return DevicePendingStep(readback.tokens(sampled))

    first, second = launch(1, 2, 3), launch(4)
    assert len(readback.made) == 2, "two are in flight"
    assert first.result().token_ids.tolist() == [[1], [2], [3]]
    third = launch(5, 6)
    assert len(readback.made) == 2
    assert readback.made[0].calls == ["record", "synchronize", "record"]
    assert first.result().token_ids.tolist() == [[1], [2], [3]], "what was read stays"
    assert second.result().token_ids.tolist() == [[4]]
    assert third.result().token_ids.tolist() == [[5], [6]]
    over = DevicePendingStep(readback.tokens(None))
    assert over.result().token_ids.tolist() == []
    assert len(readback.made) == 2


def test_tokens_are_read_before_the_drafts_behind_them_are_there() -> None:
    readback = PretendedGpu()
    tokens = readback.tokens(Sampled(torch.tensor([1, 2], dtype=torch.int32), None))
    tokens.drafts = readback.drafts(torch.tensor([[3, 4], [5, 6]], dtype=torch.int32))
    of_tokens, of_drafts = readback.made
    pending = DevicePendingStep(tokens)
    assert pending.result().token_ids.tolist() == [[1], [2]]
    assert of_tokens.calls == ["record", "synchronize"] and of_drafts.calls == ["record"]
    drafts = pending.drafts()
    assert drafts is not None and drafts.tolist() == [[3, 4], [5, 6]]
    assert of_drafts.calls == ["record", "synchronize"]
    plain = DevicePendingStep(readback.tokens(None))
    assert plain.result().token_ids.tolist() == [] and plain.drafts() is None


def test_a_step_is_done_when_its_tokens_are_on_the_host() -> None:
    readback = PretendedGpu()
    pending = DevicePendingStep(
        readback.tokens(Sampled(torch.tensor([1], dtype=torch.int32), None))
    )
    assert not pending.is_done()
    readback.made[0].calls.append("copied")
    assert pending.is_done() and pending.result().token_ids.tolist() == [[1]]
    readback.made[0].calls.clear()  # the buffer belongs to another step
    assert pending.is_done()
    assert not DevicePendingStep(None).is_done(), "it waits for token masks"
