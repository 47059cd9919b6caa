"""Token masks from processes of their own: the same masks, failures, and what follows a crash."""

import asyncio
import json
import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.common.channel import ChannelClosed, EngineChannel, create_socket_pair
from services.common.errors import InvalidGrammar
from services.decoder import engine_main, mask_processes
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import (
    FrontMessage,
    MaskMemory,
    MaskMemoryOpened,
    NewTokens,
    Shutdown,
    StepDone,
    TokenMask,
    TokenMasks,
)
from services.decoder.grammar import Demands, Grammar, Grammars
from services.decoder.mask_messages import FromEngine, MaskSettings
from services.decoder.mask_processes import MaskProcesses, num_mask_processes
from services.decoder.mask_rows import open_rows
from services.decoder.metrics import DecoderMetrics
from tests.engine_harness import prompt_of
from tests.fake_runner import (
    FakeRunner,
    add_message,
    expected_tokens,
    mask_of,
    runner_info,
)
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

END = added_ids()["<|im_end|>"]
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["ab", "ba"]}, "minItems": 30})
DEMANDS = Demands(Grammar("json_schema", SCHEMA, (), (END,)))


class FirstMasks:
    """The front's channel to the engine."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[object] = asyncio.Queue()

    def send(self, *messages: object) -> None:
        for message in messages:
            self.sent.put_nowait(message)


class Processes:
    """Real processes around a fake engine."""

    def __init__(self, tmp_path, count: int) -> None:
        (tmp_path / "tokenizer.json").write_text(tokenizer_json())
        self._settings = MaskSettings(
            link=0, directory=str(tmp_path), vocab_size=vocab_size(), end_ids=(END,), num_rows=8,
            num_threads=1,
        )  # fmt: skip
        self._pairs = [create_socket_pair() for _ in range(count)]
        self.links = [EngineChannel[object](end, FrontMessage) for _, end in self._pairs]
        self.registry, self.engine = CollectorRegistry(), FirstMasks()
        self.failures: asyncio.Queue[tuple[int, Exception]] = asyncio.Queue()
        self.rows: dict[int, np.ndarray] = {}

    async def __aenter__(self) -> "Processes":
        metrics = DecoderMetrics(self.registry)
        links = [link for link, _ in self._pairs]
        self.masks = await MaskProcesses.start(links, self._settings, self.engine, metrics)
        self.masks.for_front(lambda *failure: self.failures.put_nowait(failure))
        self.running = asyncio.create_task(self.masks.run())
        for number, link in enumerate(self.links):
            (memory,) = await self.receive(number)
            assert isinstance(memory, MaskMemory) and memory.link == number
            self.rows[number] = open_rows(memory)
            link.send(MaskMemoryOpened())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.masks.close()
        for _, end in self._pairs:
            end.close()

    async def receive(self, number: int) -> list[object]:
        messages = await asyncio.to_thread(self.links[number].receive, PATIENCE_S)
        assert messages, "no answer"
        return messages

    async def first_mask(self) -> tuple[int, np.ndarray]:
        """The link, and the words."""
        message = await asyncio.wait_for(self.engine.sent.get(), PATIENCE_S)
        if isinstance(message, TokenMask):  # before the process knew that its rows are read
            return -1, np.frombuffer(message.mask, np.int32)
        assert isinstance(message, TokenMasks)
        return message.link, self.rows[message.link][message.rows[0], : -(-vocab_size() // 32)]


async def test_masks_of_processes_are_those_of_the_front(tmp_path):
    async with Processes(tmp_path, 2) as processes:
        grammars = Grammars(tmp_path, vocab_size(), lambda seconds: None)
        words = grammars.num_words
        alone = np.zeros((1, grammars.num_mask_words), np.int32)
        matcher = await grammars.matcher(DEMANDS)
        grammars.fill([(matcher, [], 0)], alone)
        for number in (1, 2):  # a process each
            processes.masks.add(number, DEMANDS, [])
            _, mask = await processes.first_mask()
            assert (mask == alone[0, :words]).all()
        for _ in range(12):
            bits = np.unpackbits(alone[0, :words].view(np.uint8), bitorder="little")
            token = int(np.flatnonzero(bits)[-1])
            grammars.fill([(matcher, [token], 0)], alone)
            for link in processes.links:
                link.send(NewTokens([1, 2, 7], [[token], [token], [token]]))
            found: list[int] = []
            for number in (0, 1):
                (answer,) = await processes.receive(number)
                assert isinstance(answer, TokenMasks) and answer.link == number
                assert answer.num_generated == [matcher.num_generated]
                found += answer.sequence_ids
                (row,) = answer.rows
                assert (processes.rows[number][row, :words] == alone[0, :words]).all()
            assert sorted(found) == [1, 2]
        processes.masks.remove(1)
        grammars.close()
        compiled = "decoder_grammar_compile_seconds_count"
        for _ in range(int(10 * PATIENCE_S)):
            if processes.registry.get_sample_value(compiled) == 2:
                break
            await asyncio.sleep(0.1)
        assert processes.registry.get_sample_value(compiled) == 2
        assert processes.registry.get_sample_value("decoder_token_mask_seconds_count")


async def test_a_grammar_that_is_none_fails_its_sequence(tmp_path):
    async with Processes(tmp_path, 1) as processes:
        processes.masks.add(3, Demands(Grammar("regex", "(", (), (END,))), [])
        number, error = await asyncio.wait_for(processes.failures.get(), PATIENCE_S)
        assert number == 3 and isinstance(error, InvalidGrammar)
        assert "the regular expression is not valid" in error.message


async def test_a_process_that_ends_is_noticed(tmp_path):
    async with Processes(tmp_path, 2) as processes:
        processes.masks._processes[1].process.kill()
        with pytest.raises(ChannelClosed):
            await asyncio.wait_for(processes.running, PATIENCE_S)


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (4, 0), (8, 4), (16, 8), (64, 8)])
def test_there_are_processes_where_there_are_cores(monkeypatch, cores, count):
    monkeypatch.setattr(mask_processes, "num_cpus", lambda: cores)
    assert num_mask_processes() == count


def test_the_engine_sends_tokens_to_the_links_and_takes_their_masks():
    """A link that is closed is left alone: the front exits."""
    runner = FakeRunner(runner_info())
    engine = Engine(runner, overlap=True)
    front, end = create_socket_pair()
    pairs = [create_socket_pair() for _ in range(2)]
    links = [EngineChannel[FrontMessage](link, FrontMessage) for _, link in pairs]
    channel = EngineChannel[FrontMessage](end, FrontMessage)
    running = threading.Thread(
        target=engine_main.run, args=(engine, channel, lambda: {}, links), daemon=True
    )
    running.start()
    message = add_message(5, prompt_of(1, 9), max_tokens=4, token_masks=True)
    runner.messages[5] = message
    to_engine = EngineChannel[object](front, StepDone)
    process = EngineChannel[object](pairs[0][0], FromEngine)
    pairs[1][0].close()
    to_engine.send(message)
    tokens, _ = expected_tokens(message, engine.max_model_len)

    def send_mask(sender: EngineChannel[object], count: int) -> None:
        mask = mask_of(message.sampling.seed, count)
        sender.send(TokenMask(5, count, b"" if mask is None else mask.tobytes()))

    send_mask(to_engine, 0)
    for count in range(1, 4):
        assert process.receive(PATIENCE_S) == [NewTokens([5], [[tokens[count - 1]]])]
        send_mask(process, count)
    to_engine.send(Shutdown())
    running.join(PATIENCE_S)
    assert not running.is_alive()
    for each in (front, end, pairs[0][0], pairs[0][1], pairs[1][1]):
        each.close()
