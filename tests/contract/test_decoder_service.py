"""A real gRPC client against the real servicer, front and engine; only the device is simulated."""

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import grpc.aio
import numpy as np
import pytest
from msgspec import structs

from kernels.sampling import ALL_MASKED
from services.common.pb import decoder_pb2 as pb
from services.common.pb import encoder_pb2
from services.common.process.channel import ChannelClosed
from services.common.process.engine_process import EngineProcess
from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.step import Step
from tests import fake_runner
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
from tests.fake_fetch import FAULTS
from tests.fake_runner import VOCAB_SIZE
from tests.noise import PATIENCE_S
from tests.store_state import num_unfinished


async def test_describe_says_what_is_served():
    async with Decoder() as decoder:
        answer = await decoder.stub.Describe(pb.DescribeDecoderRequest())
        assert answer.model_name == "fake"
        assert answer.dtype == encoder_pb2.DTYPE_BFLOAT16
        assert (answer.num_features, answer.hidden, answer.vocab_size) == (2, 8, VOCAB_SIZE)
        assert (answer.max_model_len, answer.block_size, answer.num_blocks) == (256, 4, 64)


async def test_load_says_what_there_is_to_do_unless_the_engine_is_silent():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        assert await decoder.stub.Load(pb.LoadRequest()) == pb.LoadResponse(num_blocks=64)
        decoder.encoder.gate.clear()
        await gateway.submit(submit_of(1, prompt_of(1), image_of(decoder, 0)))
        load = pb.LoadResponse()
        while not load.num_waiting + load.num_running:
            load = await decoder.stub.Load(pb.LoadRequest())
        decoder.encoder.gate.set()
        decoder.metrics.engine = cast("EngineProcess", SimpleNamespace(silence_s=31.0))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await decoder.stub.Load(pb.LoadRequest())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nothing_is_found_in_a_prefix_cache_that_was_emptied():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        cached = []
        for number in range(4):
            if number == 2:
                await decoder.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
            await gateway.submit(submit_of(number, prompt_of(1)))
            assert isinstance(await gateway.end(number), pb.Finished)
            cached.append(gateway.starts[number].num_cached_tokens)
        assert cached[0] == cached[2] == 0 < cached[1] == cached[3]
        assert gateway.tokens[2] == gateway.tokens[0]


async def test_many_sequences_of_many_gateways_get_their_own_tokens():
    async with Decoder() as decoder, contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(Gateway(decoder)) for _ in range(3)]
        for number, (which, gateway) in itertools.product(range(10), enumerate(gateways)):
            image = image_of(decoder, number % 2)
            images = (image,) if number % 3 else ()
            await gateway.submit(submit_of(number, prompt_of(number + 50 * which), *images))
        for which, gateway in enumerate(gateways):
            for number in range(10):
                end = await gateway.end(number)
                assert isinstance(end, pb.Finished), end
                assert end.reason == pb.Finished.REASON_LENGTH
                spans = (ImageSpan(KEYS[number % 2], 3, 6),) if number % 3 else ()
                assert gateway.tokens[number] == alone(prompt_of(number + 50 * which), *spans)
                start = gateway.starts[number]
                assert (start.transfer_s > 0) == bool(spans)
                assert start.prefill_s > 0
        await until(decoder.is_idle)
        assert decoder.encoder.num_calls == 2
        assert decoder.metric("triptych_decoder_sequences_total", outcome="length") == 30
        assert decoder.metric("triptych_decoder_generated_tokens_total") == 240
        assert decoder.metric("triptych_decoder_kv_blocks_used") == 0
        assert decoder.metric("triptych_decoder_kv_usage_ratio") == 0
        assert decoder.metric("triptych_decoder_embedding_cache_hits_total", tier="encoder") == 2
        assert decoder.metric("triptych_decoder_ttft_seconds_count") == 30


async def test_a_step_is_one_message_for_all_sequences():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        for number in range(8):
            await gateway.submit(submit_of(number, prompt_of(number, 4), max_tokens=20))
        await until(lambda: decoder.front.num_sequences == 8)
        decoder.engine.running.set()
        for number in range(8):
            await gateway.end(number)
        assert gateway.num_messages <= 22


async def test_tokens_between_first_and_last_come_without_events_to_gateways_that_read_them():
    expected = alone(prompt_of(1), max_tokens=8)
    async with Decoder() as decoder:
        async with Gateway(decoder) as gateway:
            await gateway.submit(submit_of(1, prompt_of(1)))
            await gateway.end(1)
            assert gateway.tokens[1] == expected
            assert gateway.num_bare_tokens > 0
        async with Gateway(decoder, takes_bare_tokens=False) as older:
            await older.submit(submit_of(1, prompt_of(1)))
            await older.end(1)
            assert older.tokens[1] == expected
            assert older.num_bare_tokens == 0


async def test_the_commands_of_a_batch_run_in_their_order():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        description = await decoder.stub.Describe(pb.DescribeDecoderRequest())
        assert description.takes_batches
        submits = [pb.GenerateCommand(submit=submit_of(n, prompt_of(n))) for n in (1, 2, 3)]
        cancel = pb.GenerateCommand(cancel=pb.Cancel(sequence_id=2))
        await gateway.send_batch(*submits, cancel)
        for number in (1, 3):
            await gateway.end(number)
            assert gateway.tokens[number] == alone(prompt_of(number), max_tokens=8)
        assert (await gateway.end(2)).code == "cancelled"


async def test_logprobs_of_a_prompt_cross_the_wire():
    prompt = prompt_of(1, 100)  # of two steps
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        for number in (1, 2):  # the second time the prefix cache has it
            await gateway.submit(submit_of(number, prompt, prompt_logprobs=2))
            await gateway.end(number)
        for number in (1, 2):
            assert gateway.tokens[number] == alone(prompt)
            found = gateway.prompt_logprobs[number]
            ranks = b"".join(part.ranks for part in found)
            assert np.frombuffer(ranks, "<i4").tolist() == prompt[1:]
            assert [part.start for part in found] == [
                1,
                *np.cumsum([len(part.ranks) // 4 for part in found[:-1]]) + 1,
            ]
            assert all(len(p.top_logprobs) == 2 * len(p.logprobs) for p in found)
        assert gateway.starts[2].num_cached_tokens == 0


async def test_stop_ids_and_logprobs_cross_the_wire():
    expected = alone(prompt_of(1), max_tokens=30)
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1), stop_token_ids=[expected[3]], max_tokens=30)
        submit.sampling.top_logprobs = 1
        await gateway.submit(submit)
        end = await gateway.end(1)
        assert end.reason == pb.Finished.REASON_STOP
        assert gateway.tokens[1] == expected[: expected.index(expected[3]) + 1]
        assert [list(p.top_token_ids) for p in gateway.logprobs[1]] == [
            [token] for token in gateway.tokens[1]
        ]


async def test_extreme_but_lawful_values_are_served():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        submit = submit_of(
            2**64 - 1,
            prompt_of(1),
            max_tokens=2**32 - 1,
            min_tokens=2**32 - 1,
            seed=1,
            top_k=2**32 - 1,
            timeout_s=1e300,
            stop_token_ids=[0],
        )
        await gateway.submit(submit)
        assert isinstance(await gateway.end(2**64 - 1), pb.Finished)
        assert len(gateway.tokens[2**64 - 1]) == 256 - 12


async def test_a_bad_image_fails_its_sequence_only():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        for number, fault in enumerate(f for f in FAULTS if not f.startswith("hang")):
            decoder.encoder.fault = fault
            await gateway.submit(submit_of(2 * number, prompt_of(3), image_of(decoder, 1)))
            await gateway.submit(submit_of(2 * number + 1, prompt_of(4)))
            end = await gateway.end(2 * number)
            assert isinstance(end, pb.Failed), fault
            assert end.code == "embedding_unavailable", fault
            assert end.encoder_address == decoder.encoder_address
            assert gateway.tokens[2 * number] == []
            assert isinstance(await gateway.end(2 * number + 1), pb.Finished)
            assert gateway.tokens[2 * number + 1] == alone(prompt_of(4))
        await until(decoder.is_idle)
        assert decoder.arena.used_bytes == 0


async def test_a_hanging_encoder_times_out():
    async with Decoder(timeout_s=0.2) as decoder, Gateway(decoder) as gateway:
        decoder.encoder.fault = "hangs in the middle"
        await gateway.submit(submit_of(1, prompt_of(1), image_of(decoder, 1)))
        assert (await gateway.end(1)).code == "embedding_unavailable"
        await until(decoder.is_idle)


async def test_text_before_an_image_is_computed_while_it_is_on_its_way():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.encoder.gate.clear()
        await gateway.submit(submit_of(1, prompt_of(1, 20), image_of(decoder, 1, offset=9)))
        await until(lambda: decoder.runner.batches)
        assert decoder.runner.batches == [[(1, 0, 9)]]
        decoder.encoder.gate.set()
        assert isinstance(await gateway.end(1), pb.Finished)
        assert gateway.tokens[1] == alone(prompt_of(1, 20), ImageSpan(KEYS[1], 9, 6))


async def test_an_image_at_hand_costs_no_step_of_its_own():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        for number in (1, 2):
            submit = submit_of(number, prompt_of(number, 20), image_of(decoder, 1, offset=9))
            await gateway.submit(submit)
            assert isinstance(await gateway.end(number), pb.Finished)
        assert [(2, 0, 20)] in decoder.runner.batches
        assert decoder.metric("triptych_decoder_embedding_cache_hits_total", tier="memory") == 1
        await until(decoder.is_idle)


async def test_the_deadline_ends_a_sequence_wherever_it_is():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.encoder.gate.clear()
        await gateway.submit(submit_of(1, prompt_of(1), image_of(decoder, 1), timeout_s=0.2))
        assert (await gateway.end(1)).code == "deadline_exceeded"
        await until(decoder.is_idle)
        # The call to the encoder, unless a busy machine did not begin it in time.
        await until(lambda: decoder.encoder.num_cancelled == decoder.encoder.num_calls)
        decoder.engine.running.clear()
        await gateway.submit(submit_of(2, prompt_of(1), timeout_s=0.05))
        assert (await gateway.end(2)).code == "deadline_exceeded"


async def test_cancel_ends_a_sequence_and_frees_its_blocks():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        await gateway.submit(submit_of(1, prompt_of(1), max_tokens=200))
        await gateway.submit(submit_of(2, prompt_of(2)))
        await gateway.cancel(1)
        await gateway.cancel(77)
        assert (await gateway.end(1)).code == "cancelled"
        decoder.engine.running.set()
        assert isinstance(await gateway.end(2), pb.Finished)
        await gateway.cancel(2)
        await until(decoder.is_idle)
        assert decoder.metric("triptych_decoder_sequences_total", outcome="cancelled") == 1


async def test_a_broken_stream_takes_its_sequences_with_it_and_no_others():
    async with Decoder() as decoder, Gateway(decoder) as survivor:
        async with Gateway(decoder) as gateway:
            decoder.engine.running.clear()
            decoder.encoder.gate.clear()
            for number in range(4):
                images = (image_of(decoder, 1),) if number % 2 else ()
                await gateway.submit(submit_of(number, prompt_of(number), *images, max_tokens=200))
            await survivor.submit(submit_of(1, prompt_of(9)))
            await until(lambda: decoder.front.num_sequences == 5 and decoder.encoder.num_calls == 1)
        await until(lambda: decoder.front.num_streams == 1)
        decoder.engine.running.set()
        assert isinstance(await survivor.end(1), pb.Finished)
        await until(decoder.is_idle)
        await until(lambda: decoder.encoder.num_cancelled == 1)


async def test_a_half_closed_stream_ends_after_its_last_sequence():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        await gateway.submit(submit_of(1, prompt_of(1)))
        await gateway.call.done_writing()
        await gateway.closed()
        assert isinstance(gateway.ends[1], pb.Finished)


async def test_a_command_that_cannot_be_read_ends_its_stream_and_no_other():
    """Nothing behind it would ever be answered."""
    async with Decoder() as decoder, Gateway(decoder) as other:
        decoder.engine.running.clear()
        call = decoder.channel.stream_stream("/triptych.v1.Decoder/Generate")()
        submit = pb.GenerateCommand(submit=submit_of(1, prompt_of(1)))
        await call.write(submit.SerializeToString())
        await call.write(b"\xff")
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError, match="GenerateCommand"):
                async for _ in call:
                    pass
        decoder.engine.running.set()
        await other.submit(submit_of(1, prompt_of(2)))
        assert isinstance(await other.end(1), pb.Finished)
        await until(decoder.is_idle)


async def test_an_id_in_use_ends_both_in_one_event():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        await gateway.submit(submit_of(1, prompt_of(1)))
        await gateway.submit(submit_of(1, prompt_of(2)))
        end = await gateway.end(1)
        assert end.code == "invalid_request" and "in use" in end.message
        decoder.engine.running.set()
        await until(decoder.is_idle)
        assert gateway.tokens[1] == []


async def test_more_than_may_wait_are_refused_at_once():
    async with Decoder(max_num_sequences=2, on_gpu=True) as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        for number in range(10):
            await gateway.submit(submit_of(number, prompt_of(number)))
        assert [(await gateway.end(n)).code for n in (8, 9)] == ["overloaded"] * 2
        decoder.engine.running.set()
        for number in range(8):
            assert isinstance(await gateway.end(number), pb.Finished)


async def test_a_part_of_the_places_is_for_tenants_with_less_than_their_share():
    def submit(number: int, tenant: str) -> pb.Submit:
        message = submit_of(number, prompt_of(number))
        message.tenant = tenant
        return message

    async with Decoder(max_num_sequences=2, on_gpu=True) as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        for number in range(8):  # of all eight places
            await gateway.submit(submit(number, "a"))
        assert [(await gateway.end(n)).code for n in (6, 7)] == ["overloaded"] * 2
        for number in (8, 9):
            await gateway.submit(submit(number, "b"))
        decoder.engine.running.set()
        for number in (*range(6), 8, 9):
            assert isinstance(await gateway.end(number), pb.Finished)


async def test_a_gateway_that_does_not_read_is_bounded_and_then_cut():
    small = Decoder(max_queued_bytes=20_000, max_model_len=4096, num_blocks=4096)
    async with small as decoder, Gateway(decoder) as other:
        stream = decoder.front.open_stream()  # no writer takes from its outbox
        for number in range(4):
            decoder.front.submit(stream, submit_of(number, prompt_of(number, 4), max_tokens=4000))
        await until(lambda: not stream.sequences)
        await until(decoder.is_idle)
        message = await stream.outbox.take()
        assert message is not None
        assert [e.failed.code for e in message.events] == ["cancelled"] * 4
        assert len(message.SerializeToString()) < 1000
        await other.submit(submit_of(1, prompt_of(1)))
        assert isinstance(await other.end(1), pb.Finished)


async def test_draining_refuses_new_sequences_and_finishes_the_running_ones():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        batches = decoder.runner.batches

        def pause(step: Step) -> None:
            if len(batches) == 5:  # the first is still running when the second comes
                decoder.engine.running.clear()

        decoder.runner.on_execute = pause
        await gateway.submit(submit_of(1, prompt_of(1), max_tokens=100))
        await gateway.until(lambda: gateway.tokens.get(1))
        await until(lambda: not decoder.engine.running.is_set())
        drained = asyncio.create_task(decoder.front.drain(PATIENCE_S))
        await asyncio.sleep(0)
        await gateway.submit(submit_of(2, prompt_of(2)))
        assert (await gateway.end(2)).code == "overloaded"
        decoder.engine.running.set()
        await drained
        await gateway.closed()
        assert isinstance(gateway.ends[1], pb.Finished)
        assert gateway.tokens[1] == alone(prompt_of(1), max_tokens=100)


async def test_draining_ends_what_takes_too_long():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        await gateway.submit(submit_of(1, prompt_of(1)))
        await until(lambda: decoder.front.is_busy)
        await decoder.front.drain(0.01)
        await gateway.closed()
        assert gateway.ends[1].code == "unavailable"


async def test_draining_offers_only_what_may_outlast_the_grace():
    decoder = Decoder(max_model_len=100_000, num_blocks=30_000)
    async with decoder, Gateway(decoder) as gateway:
        await gateway.submit(submit_of(1, prompt_of(1), max_tokens=90_000))
        await gateway.submit(submit_of(2, prompt_of(2), max_tokens=50))
        await gateway.until(lambda: len(gateway.tokens.get(1, ())) > 10)
        drained = asyncio.create_task(decoder.front.drain(2.0))  # the second ends in the first half
        await gateway.until(lambda: gateway.handed_over)
        before = len(gateway.tokens[1])
        await gateway.until(lambda: len(gateway.tokens[1]) > before)  # it goes on meanwhile
        await gateway.cancel(1)
        await drained
        assert gateway.handed_over == [1]
        assert isinstance(gateway.ends[2], pb.Finished)


async def test_a_dead_engine_fails_all_sequences():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.engine.running.clear()
        decoder.encoder.gate.clear()
        for number in range(3):
            await gateway.submit(submit_of(number, prompt_of(number), image_of(decoder, 1)))
        await until(lambda: decoder.front.num_sequences == 3)
        decoder.engine.die()
        decoder.engine.running.set()
        for number in range(3):
            assert (await gateway.end(number)).code == "engine_lost"
        with pytest.raises(ChannelClosed):
            await decoder.running
        assert not decoder.front.is_busy
        await gateway.submit(submit_of(9, prompt_of(9)))
        assert (await gateway.end(9)).code == "overloaded"


async def test_non_finite_logits_fail_the_sequence_not_its_neighbours():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.runner.poisoned.add(KEYS[2])
        await gateway.submit(submit_of(1, prompt_of(1), image_of(decoder, 2)))
        await gateway.submit(submit_of(2, prompt_of(2), image_of(decoder, 3)))
        end = await gateway.end(1)
        assert end.code == "internal_error" and "finite" in end.message
        assert isinstance(await gateway.end(2), pb.Finished)
        await until(decoder.is_idle)


async def test_constraints_that_leave_no_token_are_the_requests_fault(monkeypatch):
    """Such as ids that are allowed and, before `min_tokens`, stop ids or bad words."""
    monkeypatch.setattr(fake_runner, "token_of", lambda *_: ALL_MASKED)
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        await gateway.submit(submit_of(1, prompt_of(1)))
        end = await gateway.end(1)
        assert end.code == "no_token_allowed" and "constraints leave no token" in end.message
        await until(decoder.is_idle)


async def test_a_prompt_that_only_the_engine_finds_too_long_is_the_requests_fault():
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        decoder.front.engine = structs.replace(decoder.engine.ready, max_model_len=1 << 20)
        await gateway.submit(submit_of(1, prompt_of(1, decoder.engine.ready.max_model_len)))
        await gateway.submit(submit_of(2, prompt_of(2)))
        end = await gateway.end(1)
        assert end.code == "context_length_exceeded" and "prompt is too long" in end.message
        assert isinstance(await gateway.end(2), pb.Finished)
        assert (
            decoder.metric("triptych_decoder_sequences_total", outcome="context_length_exceeded")
            == 1
        )
        await until(decoder.is_idle)


async def test_images_wait_for_room_and_all_are_served():
    async with Decoder(arena_pages=2) as decoder, Gateway(decoder) as gateway:
        for number in range(12):
            images = [
                image_of(decoder, (number + i) % 8, offset=2 + 5 * i, num_tokens=4)
                for i in range(2)
            ]
            await gateway.submit(submit_of(number, prompt_of(number, 14), *images))
        for number in range(12):
            assert isinstance(await gateway.end(number), pb.Finished)
            spans = [ImageSpan(KEYS[(number + i) % 8], 2 + 5 * i, 4) for i in range(2)]
            assert gateway.tokens[number] == alone(prompt_of(number, 14), *spans)
        await until(decoder.is_idle)


async def test_an_image_that_was_read_makes_room_while_its_answer_is_being_written():
    async with Decoder(arena_pages=1) as decoder, Gateway(decoder) as gateway:
        engine, batches = decoder.engine, decoder.runner.batches

        def pause(step: Step) -> None:
            if len(batches) == 5:  # the image has been read; most of the answer is to be written
                engine.running.clear()

        decoder.runner.on_execute = pause
        await gateway.submit(submit_of(1, prompt_of(1), image_of(decoder, 1), max_tokens=200))
        await gateway.submit(submit_of(2, prompt_of(2), image_of(decoder, 2), max_tokens=2))
        # An image in the arena is not enough: the engine has to be told of it before it goes on.
        await until(lambda: KEYS[2] in decoder.front.images.ready_keys(2))
        decoder.runner.on_execute = None
        engine.running.set()
        await gateway.until(lambda: len(gateway.ends) == 2)
        assert list(gateway.ends) == [2, 1]
        await until(decoder.is_idle)


async def _preempt(decoder: Decoder, gateway: Gateway, before_it: Callable[[], None]) -> None:
    """Two sequences, one image after the other, that grow until there is no room for both."""
    engine, batches = decoder.engine, decoder.runner.batches

    def pause(step: Step) -> None:
        if len(batches) in (3, 6):  # the first one writes; both do
            engine.running.clear()

    decoder.runner.on_execute = pause
    for number in (1, 2):
        image = image_of(decoder, number)
        await gateway.submit(submit_of(number, prompt_of(number), image, max_tokens=40))
    # An image in the arena is not enough: the engine could pause before it is told of it.
    await until(lambda: KEYS[2] in decoder.front.images.ready_keys(2))
    engine.running.set()
    await until(lambda: len(batches) > 6 and not engine.running.is_set())
    await gateway.until(lambda: gateway.tokens.get(2))
    assert decoder.metric("triptych_decoder_preemptions_total") == 0
    before_it()
    engine.running.set()
    await gateway.until(lambda: len(gateway.ends) == 2)
    await until(decoder.is_idle)
    assert decoder.metric("triptych_decoder_preemptions_total") > 0


async def test_a_preempted_sequence_fetches_an_evicted_image_again():
    async with Decoder(arena_pages=1, num_blocks=14) as decoder, Gateway(decoder) as gateway:
        await _preempt(decoder, gateway, decoder.arena.evict_unreferenced)
        for number in (1, 2):
            span = ImageSpan(KEYS[number], 3, 6)
            assert gateway.tokens[number] == alone(prompt_of(number), span, max_tokens=40)
        assert decoder.encoder.num_calls == 3


async def test_a_preempted_sequence_whose_image_cannot_be_fetched_again_fails():
    async with Decoder(arena_pages=1, num_blocks=14) as decoder, Gateway(decoder) as gateway:

        def lose_the_image() -> None:
            decoder.encoder.fault = "dies"
            decoder.arena.evict_unreferenced()

        await _preempt(decoder, gateway, lose_the_image)
        ends = [gateway.ends[number] for number in (1, 2)]
        assert [isinstance(end, pb.Failed) for end in ends] == [False, True]
        assert ends[1].code == "embedding_unavailable"
        written = gateway.tokens[2]
        span = ImageSpan(KEYS[2], 3, 6)
        assert written == alone(prompt_of(2), span, max_tokens=40)[: len(written)]


@pytest.mark.parametrize("num_generated", [1, 4, 17, 39])
async def test_a_sequence_is_continued_behind_the_tokens_of_another_decoder(num_generated):
    whole = alone(prompt_of(1), ImageSpan(KEYS[1], 3, 6), max_tokens=40)
    async with Decoder() as decoder, Gateway(decoder) as gateway:
        submit = submit_of(1, prompt_of(1), image_of(decoder, 1), max_tokens=40, top_logprobs=2)
        submit.generated_token_ids = np.asarray(whole[:num_generated], "<i4").tobytes()
        await gateway.submit(submit)
        end = await gateway.end(1)
        assert isinstance(end, pb.Finished) and end.reason == pb.Finished.REASON_LENGTH
        assert gateway.tokens[1] == whole[num_generated:]
        assert len(gateway.logprobs[1]) == 40 - num_generated
        await until(decoder.is_idle)


async def test_nothing_is_left_after_a_storm():
    rng = np.random.default_rng(7)
    async with Decoder(arena_pages=4, num_blocks=24) as decoder:
        for _ in range(6):
            async with Gateway(decoder) as gateway:
                for number in range(20):
                    images = (image_of(decoder, int(rng.integers(8))),) if number % 2 else ()
                    decoder.encoder.fault = "dies" if rng.random() < 0.2 else None
                    await gateway.submit(submit_of(number, prompt_of(number), *images))
                    if rng.random() < 0.3:
                        await gateway.cancel(int(rng.integers(number + 1)))
                await gateway.until(lambda g=gateway: len(g.ends) >= 10)
        await until(decoder.is_idle)
        # What was cancelled ends a few turns of the loop later.
        await until(lambda: not decoder.front.num_streams)
        await until(lambda: not decoder.front.images.num_fetches)
        assert not num_unfinished(decoder.source.store) and not decoder.arena.has_claims
        gc.collect()
        assert not decoder.front.images.num_fetches and not decoder.front.images.num_sequences
