"""The outbox of a gateway that does not read."""

from services.common.pb import decoder_pb2 as pb
from services.decoder.front.outbox import Outbox

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
    assert outbox.is_full
    outbox.add_token(2, 6)
    outbox.add_end(2, SLOW)
    outbox.discard_tokens(SLOW)
    message = await outbox.take()
    assert message == pb.GenerateEvents(events=[pb.SequenceEvent(sequence_id=2, failed=SLOW)])
