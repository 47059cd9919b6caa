"""Encode calls that fail after the decoder has sent events of the same request."""

import threading

from services.common.errors import Unavailable
from tests.fakes import forever, once
from tests.gateway_fixtures import asking
from tests.unit.gateway.test_attempts import answer, new_image


def test_late_encode_failure_after_the_first_token_is_no_failure(stack):
    """The decoder had the embedding from its own cache."""

    begun = threading.Event()

    async def fail_late(submit):
        await once(begun.is_set)(submit)
        raise Unavailable("too late")

    stack.encoder.before = fail_late
    stack.decoder.delay_s = 0.04
    body = {"model": "tiny", "messages": asking(new_image()), "stream": True}
    with stack.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as got:
        text = ""
        for piece in got.iter_text():
            text += piece
            if '"content":"A' in text:
                begun.set()
    assert text.endswith("data: [DONE]\n\n")
    assert len(stack.decoder.submits) == 1


def test_an_encode_failure_after_prompt_logprobs_costs_a_retry(pair):
    """A decoder scores the tokens before an image without the image's embedding."""
    scored = threading.Event()

    async def stall_once(submit):
        if not scored.is_set():
            scored.set()
            await forever(submit)

    async def fail_when_scored(submit):
        await once(scored.is_set)(submit)
        for encoder in pair.encoders:
            encoder.before = None
        raise Unavailable("x")

    for decoder in pair.decoders:
        decoder.before_tokens = stall_once
    for encoder in pair.encoders:
        encoder.before = fail_when_scored
    response = pair.chat(messages=asking(new_image()), prompt_logprobs=1)
    assert answer(response) == "A red circle."
    scores = response.json()["prompt_logprobs"]
    assert scores[0] is None
    assert all(scores[1:])
    assert sum(len(decoder.submits) for decoder in pair.decoders) == 2
