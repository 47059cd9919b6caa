"""An engine that computes nothing: at each tick, every sequence it has gets one more token.

`benchmarks.gateway` runs a decoder around it, so that all before and behind the model can be
measured without one. It notes when it sent each token, by the request's seed.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from services.common.families import read_spec
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.engine_process import accept
from services.common.process.heartbeat import Ping, Pong
from services.decoder.engine.messages import (
    AbortSequence,
    AddSequence,
    EndOfSequence,
    EngineInfo,
    EngineStats,
    FrontMessage,
    SequenceEvent,
    Shutdown,
    StartOfSequence,
    StepDone,
)
from services.decoder.settings import DecoderSettings

MAX_SEQUENCES = 1024
_MAX_MODEL_LEN = 1 << 20
_NUM_BLOCKS = 1 << 20


class NullSettings(DecoderSettings):
    """A decoder's settings, and those of the engine that computes nothing.

    Attributes:
        interval_s: from tick to tick.
        token_id: what every token is.
        log: where to write, at the end, when each token was sent.
    """

    interval_s: float
    token_id: int
    log: Path


@dataclass(slots=True)
class NullEngine:
    """Sequences and the clock that feeds them.

    Attributes:
        token_id: what every token is.
        sent: seed of a request -> when each of its tokens left, in seconds of the monotonic clock;
            of sequences with equal seeds, together.
    """

    token_id: int
    sent: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    _running: dict[int, AddSequence] = field(default_factory=dict[int, AddSequence])
    _num_tokens: dict[int, int] = field(default_factory=dict[int, int])  # of running sequences

    def handle(self, message: FrontMessage) -> None:
        """Takes a message of the front."""
        if isinstance(message, AddSequence):
            self._running[message.sequence_id] = message
            self._num_tokens[message.sequence_id] = 0
            self.sent[message.sampling.seed] = []
        elif isinstance(message, AbortSequence):
            self._running.pop(message.sequence_id, None)
            self._num_tokens.pop(message.sequence_id, None)

    def step(self) -> StepDone | None:
        """One token for each sequence; None where there is none."""
        if not self._running:
            return None
        now = time.monotonic()
        events = [self._advance(message, now) for message in list(self._running.values())]
        stats = EngineStats(len(self._running), 0, _NUM_BLOCKS, _NUM_BLOCKS, 0, 0, 0, 0)
        return StepDone(events, stats)

    def _advance(self, message: AddSequence, now: float) -> SequenceEvent:
        self.sent[message.sampling.seed].append(now)
        count = self._num_tokens[message.sequence_id] = self._num_tokens[message.sequence_id] + 1
        start = StartOfSequence(0, 0.0, 0.0) if count == 1 else None
        end = None
        if count == message.sampling.max_tokens:
            end = EndOfSequence("length")
            del self._running[message.sequence_id], self._num_tokens[message.sequence_id]
        return SequenceEvent(message.sequence_id, [self.token_id], [], end, start)


def run(engine: NullEngine, channel: EngineChannel[FrontMessage], interval_s: float) -> None:
    """Ticks until the front exits. A late tick does not delay the ones after it."""
    due = time.monotonic()
    while True:
        for message in channel.receive(max(0.0, due - time.monotonic())):
            match message:
                case Shutdown():
                    return
                case Ping():
                    channel.send(Pong())
                case _:
                    engine.handle(message)
        if time.monotonic() >= due:
            due += interval_s
            done = engine.step()
            if done is not None:
                channel.send(done)


def main() -> None:
    """The process."""
    end = accept()
    settings = NullSettings.model_validate_json(end.settings_json)
    channel = EngineChannel[FrontMessage](end.end, FrontMessage)
    engine, spec = NullEngine(settings.token_id), read_spec(settings.model)
    channel.send(
        EngineInfo(
            model_name="null", dtype="float32", hidden=spec.text.hidden_size,
            num_features=0 if spec.vision is None else spec.vision.tower.num_features,
            vocab_size=spec.text.vocab_size, max_model_len=_MAX_MODEL_LEN, block_size=16,
            num_blocks=_NUM_BLOCKS,
            max_num_sequences=MAX_SEQUENCES, max_batched_tokens=MAX_SEQUENCES,
        )
    )  # fmt: skip
    with suppress(ChannelClosed):
        run(engine, channel, settings.interval_s)
    settings.log.write_text(json.dumps(engine.sent))


if __name__ == "__main__":
    main()
