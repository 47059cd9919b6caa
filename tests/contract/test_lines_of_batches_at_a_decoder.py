"""Tokens of the lines of batches: a decoder sends them in few events, and loses none."""

import pytest

from services.common.errors import Unavailable
from services.common.pb import decoder_pb2 as pb
from services.decoder.engine.messages import StepDone
from tests.decoder_service_harness import Decoder, Gateway, alone, prompt_of, submit_of


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 18, 40])
async def test_tokens_of_a_batchs_line_come_in_few_events(num_tokens):
    expected = alone(prompt_of(1), max_tokens=num_tokens)
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1), max_tokens=num_tokens)
        submit.background = True
        await gateway.submit(submit)
        end = await gateway.end(1)
        assert isinstance(end, pb.Finished) and end.reason == pb.Finished.REASON_LENGTH
        assert gateway.tokens[1] == expected
        assert gateway.num_bare_tokens == 0
        assert decoder.metric("triptych_decoder_ttft_seconds_count") == 0
        # The first token, 16 at a time, and the rest with the end.
        assert gateway.num_messages <= 2 + num_tokens // 16


async def test_a_line_that_ends_early_has_all_its_tokens():
    """The gateway may continue it at another decoder, behind the tokens that it has."""
    whole = alone(prompt_of(1), max_tokens=200)
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1), max_tokens=200)
        submit.background = True
        front, dispatch = decoder.front, decoder.front._dispatch

        def dispatched(done: StepDone) -> None:
            dispatch(done)
            for sequence in [s for s in front._sequences.values() if s.num_generated == 21]:
                front._fail(sequence, Unavailable("the decoder ends"))

        front._dispatch = dispatched  # type: ignore[method-assign]
        await gateway.submit(submit)
        assert (await gateway.end(1)).code == "unavailable"
        assert gateway.tokens[1] == whole[:21]
