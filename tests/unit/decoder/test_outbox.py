"""The outbox of a gateway that does not read."""

from services.common.pb import decoder_pb2 as pb
from services.decoder.outbox import Outbox

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
