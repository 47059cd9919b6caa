"""The outbox of a gateway that does not read."""

import numpy as np

from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import MAX_MESSAGE_BYTES
from services.decoder.engine.messages import PromptLogprobs
from services.decoder.front.outbox import MAX_QUEUED_BYTES, Outbox

SLOW = pb.Failed(code="cancelled", message="the gateway reads too slowly")


async def test_a_sequence_whose_tokens_are_dropped_has_no_good_end():
    outbox = Outbox()
    outbox.add_tokens(1, [5, 6], [])
    await outbox.take()
    for number, end in ((1, pb.Finished(reason=pb.Finished.REASON_STOP)), (2, SLOW)):
        outbox.add_tokens(number, [7, 8], [])
        outbox.add_end(number, end)
    outbox.add_tokens(3, [9], [])
    outbox.discard_tokens(SLOW)
    message = await outbox.take()
    assert message is not None
    assert [e.sequence_id for e in message.events] == [1, 2]
    assert all(e.failed == SLOW and not e.token_ids for e in message.events)


async def test_a_token_alone_needs_no_event():
    outbox = Outbox()
    outbox.takes_bare_tokens = True
    outbox.add_tokens(1, [5], [])  # with its start, say
    outbox.add_token(1, 6)
    outbox.add_token(2, 7)
    outbox.flush()
    outbox.add_token(2, 8)  # merged while the gateway does not read
    outbox.add_token(2, 9)
    outbox.add_end(2, pb.Finished(reason=pb.Finished.REASON_STOP))
    message = await outbox.take()
    assert message is not None
    assert (list(message.sequence_ids), list(message.token_ids)) == ([2], [7])
    found = [(e.sequence_id, list(e.token_ids), e.WhichOneof("end")) for e in message.events]
    assert found == [(1, [5, 6], None), (2, [8, 9], "finished")]

    outbox.add_token(1, 10)
    outbox.flush()
    message = await outbox.take()
    assert message == pb.GenerateEvents(sequence_ids=[1], token_ids=[10])


async def test_a_gateway_that_does_not_ask_for_bare_tokens_gets_events():
    outbox = Outbox()
    outbox.add_token(1, 5)
    outbox.flush()
    message = await outbox.take()
    event = pb.SequenceEvent(sequence_id=1, token_ids=[5])
    assert message == pb.GenerateEvents(events=[event])


async def test_bare_tokens_count_and_are_dropped_with_the_others():
    outbox = Outbox(max_queued_bytes=100)
    outbox.takes_bare_tokens = True
    for _ in range(10):
        outbox.add_token(1, 5)
    assert not outbox.is_full  # the writer could not see them
    outbox.flush()
    assert outbox.is_full
    outbox.add_token(2, 6)
    outbox.add_end(2, SLOW)
    outbox.discard_tokens(SLOW)
    message = await outbox.take()
    assert message == pb.GenerateEvents(events=[pb.SequenceEvent(sequence_id=2, failed=SLOW)])


def vectors_of(start: int, count: int, length: int) -> PromptLogprobs:
    """Vectors of `count` tokens of a prompt, in the order of the tokens."""
    numbers = np.arange(start, start + count, dtype="<f4")
    zeros = bytes(4 * count)
    return PromptLogprobs(start, zeros, zeros, b"", numbers.repeat(length).tobytes())


async def test_a_step_that_is_larger_than_a_message_may_be_is_divided():
    """Vectors of 512 numbers of 40,000 tokens are 82 MB, more than gRPC sends in a message."""
    outbox, length = Outbox(), 512
    outbox.takes_bare_tokens = True
    outbox.add_token(9, 4)
    for number, count in ((1, 40_000), (2, 100), (3, 9_000)):
        outbox.add_prompt_logprobs(number, vectors_of(1, count, length))
        outbox.add_vector(number, bytes(4 * length))
        outbox.add_tokens(number, [0], [])
        outbox.add_start(number, pb.Started(queue_s=1.0))
        outbox.add_end(number, pb.Finished(reason=pb.Finished.REASON_LENGTH))
    assert not outbox.is_full, "the gateway could not read before the step was over"
    outbox.flush()
    outbox.close()
    messages = []
    while (message := await outbox.take()) is not None:
        messages.append(message)
        assert message.ByteSize() < MAX_MESSAGE_BYTES / 3
    num_messages = len(messages)
    assert num_messages > 5
    bare = [(list(message.sequence_ids), list(message.token_ids)) for message in messages]
    assert bare == [([9], [4]), *[([], [])] * (num_messages - 1)]
    events = [event for message in messages for event in message.events]
    for number, count in ((1, 40_000), (2, 100), (3, 9_000)):
        own = [event for event in events if event.sequence_id == number]
        found = [part for event in own for part in event.prompt_logprobs]
        starts = [part.start for part in found]
        assert starts[0] == 1 and starts == sorted(starts)
        numbers = np.frombuffer(b"".join(p.top_logprobs for p in found), "<f4")[::length]
        assert (numbers == np.arange(1, 1 + count)).all()
        assert sum(len(p.ranks) for p in found) == sum(len(p.logprobs) for p in found) == 4 * count
        *before, last = own
        assert last.finished.reason and list(last.token_ids) == [0] and last.started.queue_s == 1.0
        assert not any(event.token_ids or event.WhichOneof("end") for event in before)
        assert [event.vector for event in own if event.vector] == [bytes(4 * length)]


async def test_a_gateway_that_leaves_large_messages_unread_is_behind():
    outbox, start = Outbox(), 1
    while not outbox.is_full:
        outbox.flush()
        outbox.add_prompt_logprobs(1, vectors_of(start, 8192, 320))
        start += 8192
    assert MAX_QUEUED_BYTES < start * 320 * 4 < 2 * MAX_QUEUED_BYTES
    assert await outbox.take() is not None
    outbox.add_end(1, SLOW)
    outbox.discard_tokens(SLOW)
    assert await outbox.take() == pb.GenerateEvents(
        events=[pb.SequenceEvent(sequence_id=1, failed=SLOW)]
    )
