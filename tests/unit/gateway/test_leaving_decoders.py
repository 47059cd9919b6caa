"""A decoder that says it is about to go hands its sequences over, if another one can take them."""

from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import PROTOCOL
from services.gateway.clients.served_model import ServedModel
from tests.noise import wait_until


def text_of(response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_an_answer_that_may_outlast_its_decoder_goes_on_at_another_one(pair):
    text_of(pair.chat())
    first = next(d for d in pair.decoders if d.submits)
    second = next(d for d in pair.decoders if d is not first)
    first.leave_after, first.delay_s = 2, 0.05
    handovers = pair.metric("triptych_gateway_handovers_total")
    response = pair.chat(n=2, include_stage_times=True)
    assert [c["message"]["content"] for c in response.json()["choices"]] == ["A red circle."] * 2
    assert len(second.submits) == 2
    # It is rid of them before its grace is over; that may come after the answer.
    wait_until(lambda: len(first.cancelled) == 2, "the first decoder's sequences are cancelled")
    assert pair.metric("triptych_gateway_handovers_total") == handovers + 1
    assert response.json()["stage_times_ms"]["handover"] > 0


def test_an_answer_stays_where_it_is_while_no_other_decoder_can_take_it(stack):
    stack.decoder.leave_after = 1
    assert text_of(stack.chat()) == "A red circle."
    assert len(stack.decoder.submits) == 1
    assert not stack.decoder.cancelled


def test_an_answer_leaves_two_decoders_at_most(pair):
    for decoder in pair.decoders:
        decoder.leave_after, decoder.delay_s = 1, 0.02
    text_of(pair.chat())
    assert sum(len(d.submits) for d in pair.decoders) == 2  # one each: nobody goes back
    assert text_of(pair.chat()) == "A red circle."


def described(*lengths: int, fingerprint: bytes = b"") -> list[pb.DescribeDecoderResponse]:
    return [
        pb.DescribeDecoderResponse(max_model_len=length, fingerprint=fingerprint, protocol=PROTOCOL)
        for length in lengths
    ]


def test_a_longer_context_serves_and_a_much_shorter_one_does_not():
    served = ServedModel()
    served.follow_context(described(4096, 4100))
    assert served.max_model_len == 4096
    longer, nearly, shorter = described(8192, 4000, 2048)
    assert not served.misfit_of_decoder(longer)
    assert not served.misfit_of_decoder(nearly)
    assert served.misfit_of_decoder(shorter) == "its context is 2048 tokens, not 4096"


def test_a_shorter_context_is_adopted_when_the_longer_one_is_gone():
    served = ServedModel(max_model_len=4096)
    served.adopt(described(4096, 2048))
    assert served.max_model_len == 4096
    served.adopt([])
    assert served.max_model_len == 4096
    served.adopt(described(1024, 2048, 2048))
    assert served.max_model_len == 2048
