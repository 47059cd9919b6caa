"""Drafts under token masks change no answer: mask processes, the decoder's front and engine.

The model is random, so its tokens are right only if each mask is exactly that of its place.
"""

import json
from typing import Any

import jsonschema
import pytest

from services.common.pb import decoder_pb2 as pb
from tests.contract.test_structured_output import SCHEMA, ask, grammar, text_of, told
from tests.decoder_service_harness import Decoder, Gateway, prompt_of, submit_of, until
from tests.known_drafts import KnownSources, from_answer
from tests.tiny_tokenizer import added_ids, write_text_model_directory

pytestmark = pytest.mark.thorough

END, THOUGHT = added_ids()["<|im_end|>"], added_ids()["</think>"]
LONG = {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "string", "maxLength": 40}}
LARK = 'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[1-9][0-9]?/'
# A grammar, or none; and sampling parameters.
FORMS: list[tuple[pb.Grammar | None, dict[str, object]]] = [
    (grammar("JSON_SCHEMA", SCHEMA), {}),
    (grammar("JSON_SCHEMA", LONG), {}),
    (grammar("JSON_SCHEMA", SCHEMA, begins_after=[THOUGHT]), {}),
    (grammar("REGEX", "[ab]{3}-?c{1,20}"), {"min_tokens": 6}),
    (grammar("CHOICE", ["red", "red circle", 'a "b"\n']), {}),
    (grammar("GRAMMAR", LARK), {}),
    (None, {"allowed_token_ids": list(range(20, 60))}),
    (None, {"bad_words": [pb.TokenIds(ids=[number]) for number in range(0, 300, 2)]}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_text_model_directory(tmp_path_factory.mktemp("model"))


async def answers(model, known: dict[int, list[int]] | None, share: float) -> tuple[dict, Any]:
    """Tokens of all forms, four times. With `known` answers, drafts are made from them."""
    async with Decoder(
        model_directory=model, num_blocks=900, max_model_len=512, max_num_sequences=64,
        max_drafts=0 if known is None else 5,
    ) as decoder:  # fmt: skip
        if known is not None:
            decoder.engine.engine.speculation.sources = KnownSources(
                lambda message, index: from_answer(message, known[message.sequence_id], index),
                share,
            )
        found = {}
        async with Gateway(decoder) as gateway:
            for number in range(1, 4 * len(FORMS) + 1):
                form, fields = FORMS[number % len(FORMS)]
                fields = {"max_tokens": 120, **fields}
                if form is not None:
                    await ask(gateway, number, form, **fields)
                else:
                    submit = submit_of(number, prompt_of(number), seed=number, **fields)
                    await gateway.submit(submit)
            for number in range(1, 4 * len(FORMS) + 1):
                ids, end = await told(gateway, number)
                assert isinstance(end, pb.Finished), end
                found[number] = ids
        await until(decoder.is_idle)
        return found, decoder.engine.engine.stats().drafts


@pytest.mark.parametrize("share", [0.6, 1.0])
async def test_answers_under_masks_are_equal_with_drafts(model, share):
    expected, none = await answers(model, None, 0.0)
    assert none is None
    for number, ids in expected.items():
        if number % len(FORMS) == 0:
            jsonschema.validate(json.loads(text_of(ids)), SCHEMA)
    found, totals = await answers(model, expected, share)
    assert found == expected
    assert totals.num_accepted > 100
    assert (totals.num_accepted < totals.num_drafts) == (share < 1.0)
