"""Tokens that go straight from a decoder's client to the connection, and those that must not."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.common.errors import InternalError, Unavailable
from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.clients.token_event import TokenEvent
from services.gateway.endpoints.direct_tokens import DirectTokens
from services.gateway.forms.openai import ChatRequest
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.request.attempts import Attempts
from services.gateway.request.completion import Completion
from tests.noise import turns
from tests.slots import slot_of

METRICS = GatewayMetrics()
FIRST = TokenEvent(0, (1,), started=pb.Started())


class Decoder:
    """A pod that keeps what it was sent."""

    description = None
    session = address = "decoder"

    def __init__(self) -> None:
        self.generated: list[bytes] = []
        self.num_cancelled = 0

    def submit(self, submit: pb.Submit, *_: object) -> int:
        self.generated.append(submit.generated_token_ids)
        return len(self.generated)

    def cancel(self, _: int) -> None:
        self.num_cancelled += 1


class Answer:
    """A request that runs on `Decoder`, and a list of the tokens that came in each way."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self.direct: list[int] = []
        self.batches: list[list[int]] = []
        self.may_take = True
        self.resumes = asyncio.Event()
        self.resumes.set()
        completion = Completion(
            "id", ChatRequest([]), Prompt(np.zeros(8, np.int32), None, 0), [],
            pb.SamplingParams(max_tokens=8), slot_of(), AnswerFormat(), cache_salt=b"",
            deadline=1e12, timings=Timings(), encode_sources=[],
        )  # fmt: skip
        pools: Any = SimpleNamespace(choose=lambda *_: self.decoder)
        self.attempts = Attempts(completion, pools, pools, METRICS, 60.0, sink=self)
        self.task = asyncio.create_task(self._run())

    def take(self, choice: int, token_ids: Sequence[int]) -> bool:
        assert choice == 0
        if self.may_take:
            self.direct += token_ids
        return self.may_take

    async def _run(self) -> None:
        async with aclosing(self.attempts.events()) as batches:
            async for events in batches:
                self.batches.append([token for event in events for token in event.token_ids])
                await self.resumes.wait()

    async def token(self, token_id: int) -> None:
        await self.event(TokenEvent(0, (token_id,)))

    async def event(self, event: TokenEvent) -> None:
        self.attempts.receive(event)
        await turns()


async def started() -> Answer:
    answer = Answer()
    await turns()
    await answer.event(FIRST)
    return answer


async def ended(answer: Answer) -> None:
    await answer.event(TokenEvent(0, (9,), finish_reason="stop"))
    await answer.task


async def test_a_token_in_the_middle_of_an_answer_wakes_no_task() -> None:
    answer = await started()
    for token_id in (2, 3):
        await answer.token(token_id)
    await ended(answer)
    assert answer.direct == [2, 3]
    assert answer.batches == [[1], [9]]


async def test_the_first_token_of_an_attempt_is_yielded() -> None:
    answer = Answer()
    await turns()
    await answer.token(1)
    await ended(answer)
    assert answer.direct == []
    assert answer.batches == [[1], [9]]


async def test_no_token_overtakes_one_that_waits() -> None:
    answer = await started()
    answer.resumes.clear()
    answer.may_take = False
    await answer.event(TokenEvent(0, (2, 3)))  # The task is now busy with these.
    answer.may_take = True
    await answer.token(4)
    answer.resumes.set()
    await turns()
    await answer.token(5)
    await ended(answer)
    assert answer.batches == [[1], [2, 3], [4], [9]]
    assert answer.direct == [5]


async def test_a_token_that_cannot_be_sent_now_is_yielded() -> None:
    answer = await started()
    answer.may_take = False
    await answer.token(2)
    answer.may_take = True
    await answer.token(3)
    await ended(answer)
    assert (answer.batches, answer.direct) == ([[1], [2], [9]], [3])


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent(0, (2,), predicted=(1, 0)), TokenEvent(0, (2,), [pb.TokenLogprobs()]),
        TokenEvent(0, (2,), prompt_logprobs=[pb.PromptLogprobs()]),
    ],
    ids=["prediction", "logprobs", "prompt_logprobs"],
)  # fmt: skip
async def test_an_event_with_more_than_tokens_is_yielded(event: TokenEvent) -> None:
    answer = await started()
    await answer.event(event)
    await ended(answer)
    assert (answer.batches, answer.direct) == ([[1], [2], [9]], [])


async def test_all_tokens_are_yielded_while_the_answer_may_move() -> None:
    answer = await started()
    answer.attempts._can_move = lambda: False  # pyright: ignore[reportPrivateUsage]
    await answer.event(TokenEvent(0, (2,), decoder_drains=True))
    await answer.token(3)
    await ended(answer)
    assert (answer.batches, answer.direct) == ([[1], [2], [3], [9]], [])


async def test_another_decoder_continues_after_the_tokens_of_both_ways() -> None:
    answer = await started()
    await answer.token(2)
    await answer.event(TokenEvent(0, error=Unavailable("lost")))
    await answer.token(3)  # the first token of the second attempt
    await ended(answer)
    assert answer.decoder.generated == [b"", np.array([1, 2], "<i4").tobytes()]
    assert (answer.batches, answer.direct) == ([[1], [3], [9]], [2])


async def test_a_fault_ends_its_own_request_and_not_the_decoders_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await started()
    monkeypatch.setattr(answer, "direct", None)
    await answer.token(2)
    with pytest.raises(InternalError):
        await answer.task
    assert answer.decoder.num_cancelled == 1
    assert "tokens could not be sent" in caplog.text


class Choice:
    def __init__(self, *, is_plain: bool = True) -> None:
        self.is_plain = is_plain
        self.fed: list[int] = []

    def feed_plain(self, token_ids: tuple[int, ...]) -> str:
        self.fed += token_ids
        return "" if token_ids == (0,) else "a"  # 0 ends within a character


class Connection:
    def __init__(self, *, can_write: bool = True) -> None:
        self.can_write_now = lambda: can_write
        self.written: list[bytes] = []
        self.write_now = self.written.append


class Writer:
    def text(self, choice: int, text: str) -> bytes:
        return b"%d%b" % (choice, text.encode())


def direct(choice: Choice, connection: Connection) -> DirectTokens:
    completion: Any = SimpleNamespace(choices=[choice])
    exchange: Any = connection
    return DirectTokens(completion, exchange, Writer())


def test_the_text_of_a_token_is_written() -> None:
    choice, connection = Choice(), Connection()
    tokens = direct(choice, connection)
    assert tokens.take(0, (0,))
    assert tokens.take(0, (5,))
    assert choice.fed == [0, 5]
    assert connection.written == [b"0a"]  # An empty piece would end the stream.


@pytest.mark.parametrize(
    ("is_plain", "can_write"), [(False, True), (True, False)], ids=["not plain", "slow client"]
)
def test_a_token_that_is_not_taken_changes_nothing(is_plain: bool, can_write: bool) -> None:
    choice, connection = Choice(is_plain=is_plain), Connection(can_write=can_write)
    assert not direct(choice, connection).take(0, (5,))
    assert (choice.fed, connection.written) == ([], [])
