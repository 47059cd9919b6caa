"""When a mailbox wakes its consumer."""

import asyncio

import numpy as np
import pytest

from services.common.errors import Overloaded, Unavailable
from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.metrics import Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.request.completion import Completion
from services.gateway.request.mailbox import Mailbox, Message
from tests.slots import slot_of

TOKEN = TokenEvent(0, (1,))


async def test_each_event_wakes_the_consumer_by_default() -> None:
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(TOKEN)
    assert await taking == [TOKEN]


async def test_a_portion_of_tokens_is_taken_at_once() -> None:
    mailbox = Mailbox(portion=3)
    taking = asyncio.create_task(mailbox.take())
    for _ in range(2):
        await asyncio.sleep(0)
        mailbox.put(TOKEN)
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(TOKEN)
    assert await taking == [TOKEN] * 3


async def test_large_messages_are_not_collected() -> None:
    """Their bytes are bounded, and a full mailbox would end the request."""
    mailbox = Mailbox(portion=32)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(TOKEN, num_bytes=100_000)
    assert await asyncio.wait_for(taking, 60) == [TOKEN]


@pytest.mark.parametrize(
    "news",
    [
        TokenEvent(0, (1,), started=pb.Started()),
        TokenEvent(0, (1,), finish_reason="length"),
        TokenEvent(0, error=Unavailable("lost")),
        TokenEvent(0, (1,), decoder_drains=True),
        TokenEvent(0, prompt_logprobs=[pb.PromptLogprobs(start=1)]),
        Overloaded("full"),
    ],
)
async def test_anything_but_tokens_wakes_the_consumer_at_once(news: Message) -> None:
    mailbox = Mailbox(portion=32)
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(TOKEN)
    mailbox.put(news)
    assert await taking == [TOKEN, news]


@pytest.mark.parametrize(
    ("sent_whole", "options", "answer_format", "portion"),
    [
        (False, {}, AnswerFormat(), 1),
        (True, {}, AnswerFormat(), 32),
        (True, {"stop": ["end"]}, AnswerFormat(), 1),
        (True, {}, AnswerFormat(reasoning="open"), 1),
    ],
)
def test_only_tokens_that_nobody_waits_for_are_read_in_portions(
    sent_whole: bool, options: dict[str, list[str]], answer_format: AnswerFormat, portion: int
) -> None:
    request = Completion(
        "id",
        ChatRequest([], **options),
        Prompt(np.zeros(1, np.int32), None, 0),
        [],
        pb.SamplingParams(),
        slot_of(),
        answer_format,
        cache_salt=b"",
        deadline=1e12,
        timings=Timings(),
        encode_sources=[],
    )
    request.sent_whole = sent_whole
    assert request.portion == portion
