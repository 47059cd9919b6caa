import asyncio
import math

import numpy as np

from services.common.pb import decoder_pb2 as pb
from services.decoder.images.known_encoders import KnownEncoders
from tests.decoder_service_harness import (
    KEYS,
    Decoder,
    Gateway,
    alone,
    image_of,
    prompt_of,
    submit_of,
    until,
)
from tests.fake_runner import VOCAB_SIZE


def _bad(**changes: object) -> pb.Submit:
    submit = submit_of(1, prompt_of(1))
    for name, value in changes.items():
        setattr(submit, name, value)
    return submit


def _ids(*ids: int) -> bytes:
    return np.asarray(ids, "<i8").astype("<u4").tobytes()


def _ref(**changes: object) -> pb.ImageRef:
    return pb.ImageRef(**{"image_key": KEYS[0], "offset": 3, "num_tokens": 4, **changes})


HOSTILE = {
    "no prompt": _bad(prompt_token_ids=b""),
    "half a token": _bad(prompt_token_ids=b"\0" * 6),
    "id beyond the vocabulary": _bad(prompt_token_ids=_ids(1, VOCAB_SIZE)),
    "id beyond the vocabulary in a long prompt": _bad(
        prompt_token_ids=_ids(*[1] * 300, VOCAB_SIZE)
    ),
    "negative id": _bad(prompt_token_ids=_ids(1, 2**32 - 1)),
    "huge id": _bad(prompt_token_ids=_ids(1, 2**31)),
    "half a generated token": _bad(generated_token_ids=b"\0" * 6),
    "generated id beyond the vocabulary": _bad(generated_token_ids=_ids(1, VOCAB_SIZE)),
    "nothing left to generate": _bad(generated_token_ids=_ids(*range(8))),
    "short positions": _bad(positions=_ids(1, 2, 3)),
    "negative positions": _bad(positions=_ids(*[2**32 - 1] * 36)),
    "positions beyond the context": _bad(positions=_ids(*[10**6] * 36)),
    "positive delta": _bad(position_delta=1),
    "delta below the prompt": _bad(position_delta=-13),
    "short key": submit_of(1, prompt_of(1), _ref(image_key=b"short")),
    "empty image": submit_of(1, prompt_of(1), _ref(num_tokens=0)),
    "image beyond the prompt": submit_of(1, prompt_of(1), _ref(offset=9)),
    "image at 2^32": submit_of(1, prompt_of(1), _ref(offset=2**32 - 1, num_tokens=2**32 - 1)),
    "images overlap": submit_of(1, prompt_of(1), _ref(), _ref(image_key=KEYS[1], offset=6)),
    "images out of order": submit_of(1, prompt_of(1), _ref(offset=8), _ref(offset=0)),
    "two sizes": submit_of(1, prompt_of(1), _ref(), _ref(offset=8, num_tokens=2)),
    "image beyond the arena": submit_of(
        1, prompt_of(1, 250), _ref(num_tokens=240), _ref(image_key=KEYS[1], offset=243)
    ),
    "negative temperature": submit_of(1, prompt_of(1), temperature=-1.0),
    "NaN temperature": submit_of(1, prompt_of(1), temperature=math.nan),
    "infinite temperature": submit_of(1, prompt_of(1), temperature=math.inf),
    "top_p zero": submit_of(1, prompt_of(1), top_p=0.0),
    "top_p above one": submit_of(1, prompt_of(1), top_p=1.5),
    "min_p above one": submit_of(1, prompt_of(1), min_p=1.5),
    "no repetition penalty": submit_of(1, prompt_of(1), repetition_penalty=0.0),
    "tiny repetition penalty": submit_of(1, prompt_of(1), repetition_penalty=1e-37),
    "infinite presence penalty": submit_of(1, prompt_of(1), presence_penalty=math.inf),
    "NaN frequency penalty": submit_of(1, prompt_of(1), frequency_penalty=math.nan),
    "bias beyond the vocabulary": submit_of(1, prompt_of(1), logit_bias={VOCAB_SIZE: 1.0}),
    "NaN bias": submit_of(1, prompt_of(1), logit_bias={1: math.nan}),
    "too many biases": submit_of(1, prompt_of(1), logit_bias=dict.fromkeys(range(1025), 1.0)),
    "stop id beyond the vocabulary": submit_of(1, prompt_of(1), stop_token_ids=[2**31]),
    "too many stop ids": submit_of(1, prompt_of(1), stop_token_ids=[1] * 1025),
    "too many prompt logprobs": submit_of(1, prompt_of(1), prompt_logprobs=21),
    "no tokens": submit_of(1, prompt_of(1), max_tokens=0),
    "too many logprobs": submit_of(1, prompt_of(1), top_logprobs=21),
    "huge salt": _bad(cache_salt=b"x" * 257),
    "negative timeout": submit_of(1, prompt_of(1), timeout_s=-1.0),
    "NaN timeout": submit_of(1, prompt_of(1), timeout_s=math.nan),
}


async def test_hostile_submissions_fail_alone():
    async with Decoder(arena_pages=2) as decoder, Gateway(decoder) as gateway:
        for number, (name, submit) in enumerate(HOSTILE.items(), 100):
            submit.sequence_id = number
            for image in submit.images:
                image.encoder_address = decoder.encoder_address
            await gateway.submit(submit)
            end = await gateway.end(number)
            assert isinstance(end, pb.Failed), name
            assert end.code == "invalid_request", (name, end)
            assert end.message, name
        too_long = submit_of(1, prompt_of(1, 256))
        await gateway.submit(too_long)
        assert (await gateway.end(1)).code == "context_length_exceeded"
        await gateway.submit(submit_of(2, prompt_of(2)))
        assert isinstance(await gateway.end(2), pb.Finished)
        assert gateway.tokens[2] == alone(prompt_of(2))


async def test_a_text_model_refuses_images_and_needs_no_positions():
    async with Decoder(num_features=0) as decoder, Gateway(decoder) as gateway:
        image = _ref(encoder_address=decoder.encoder_address)
        await gateway.submit(submit_of(1, prompt_of(1), image))
        end = await gateway.end(1)
        assert isinstance(end, pb.Failed) and end.code == "invalid_request"
        assert "takes no images" in end.message
        await gateway.submit(submit_of(2, prompt_of(2)))
        assert isinstance(await gateway.end(2), pb.Finished)
        assert gateway.tokens[2] == alone(prompt_of(2))
        await until(decoder.is_idle)
        assert decoder.arena.used_bytes == 0


async def test_a_foreign_encoder_is_not_dialled(caplog):
    """A gateway names the encoder; a decoder dials those of its setting alone."""
    dialled = asyncio.Event()
    canary = await asyncio.start_server(lambda *_: dialled.set(), "127.0.0.1", 0)
    foreign = f"127.0.0.1:{canary.sockets[0].getsockname()[1]}"
    async with canary, Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.fetcher.known = KnownEncoders([decoder.encoder_address])
        for number in (1, 2):
            image = image_of(decoder, 0, 3)
            image.encoder_address = foreign
            await gateway.submit(submit_of(number, prompt_of(number), image))
            end = await gateway.end(number)
            assert isinstance(end, pb.Failed) and end.code == "embedding_unavailable"
            assert end.encoder_address == foreign
            assert end.message == f"DECODER_ENCODER_ADDRESSES does not list the encoder {foreign}"
            assert (
                decoder.metric("triptych_decoder_embedding_fetch_errors_total", kind="foreign")
                == number
            )
        assert sum("is not dialled" in r.getMessage() for r in caplog.records) == 1
        assert not dialled.is_set()
        image = image_of(decoder, 0, 3)
        await gateway.submit(submit_of(3, prompt_of(3), image))
        assert isinstance(await gateway.end(3), pb.Finished)
        await until(decoder.is_idle)
