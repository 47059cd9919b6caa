"""An engine on a FakeRunner, driven step by step, that notes and checks all that comes out."""

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence
from tests.fake_runner import FakeRunner, expected_tokens, runner_info

KEYS = tuple(bytes([n]) * 32 for n in range(1, 5))


class Harness:
    """An engine with everything that came out of it, and a front that holds image references."""

    def __init__(self, *, overlap: bool = True, prefix_caching: bool = True, **info: int) -> None:
        self.runner = FakeRunner(runner_info(**info))
        self.engine = Engine(
            self.runner,
            overlap=overlap,
            out_of_memory=(MemoryError,),
            prefix_caching=prefix_caching,
            least_partial_tokens=1,
        )
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.event_steps: list[int] = []
        self.added: dict[int, AddSequence] = {}
        self._next_offset = 0
        self._idle_steps = 0
        self._held: dict[int, list[int]] = {}

    def add(self, message: AddSequence, *, images_ready: bool = True) -> None:
        self.added[message.sequence_id] = message
        self.engine.add(message)
        if images_ready:
            for span in message.images:
                self.image(message.sequence_id, span.key)

    def image(self, sequence_id: int, key: bytes) -> None:
        if sequence_id in self.ends:
            return
        self._next_offset += 4096
        self.runner.arena[self._next_offset] = key
        self._held.setdefault(sequence_id, []).append(self._next_offset)
        self.engine.image_ready(sequence_id, key, self._next_offset)

    def step(self) -> None:
        done = self.engine.step()
        self.engine.check_integrity()
        # A step that only reads the last one's end may come to nothing; two of them are a deadlock.
        waits = done is None and self.engine.has_work
        self._idle_steps = self._idle_steps + 1 if waits else 0
        assert self._idle_steps < 2, "there is work, and nothing runs"
        for event in done.events if done else ():
            assert event.sequence_id not in self.ends, "an event after the end"
            self.tokens.setdefault(event.sequence_id, []).extend(event.token_ids)
            if event.end is not None:
                self.ends[event.sequence_id] = event.end.reason
                self.messages[event.sequence_id] = event.end.message
                for offset in self._held.pop(event.sequence_id, ()):
                    # The front may evict now; a step that still reads there sees another image.
                    self.runner.arena[offset] = b"evicted"

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def assert_all_as_alone(self) -> None:
        for number, message in self.added.items():
            tokens, reason = expected_tokens(message, self.engine.max_model_len)
            if self.ends[number] in ("aborted", "failed"):
                assert self.tokens.get(number, []) == tokens[: len(self.tokens.get(number, []))]
            else:
                assert (self.tokens[number], self.ends[number]) == (tokens, reason)

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7) % 997 for i in range(length)]
