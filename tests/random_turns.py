"""Turns of an engine on a device that it shares, which begin and become due at random times."""

import random

from services.decoder.engine.engine import Engine
from services.decoder.engine.step import Step


class RandomTurns:
    """Implements `Turns`. Fails a test if the engine launches a step without a turn, or ends a turn
    while a step is in flight.

    Args:
        seed: seed of the random numbers.
        due: probability that a turn is due whenever the engine asks.
        free: probability that a turn begins whenever the engine asks.
    """

    def __init__(self, seed: int, due: float, free: float = 0.5) -> None:
        self.num_turns = 0
        self.waited_s = 0.0
        self.is_waiting = False
        self.is_mine = False
        self.due, self.free = due, free
        self.num_ended = 0
        self._random = random.Random(seed)
        self._engine: Engine | None = None

    @property
    def is_due(self) -> bool:
        return self.is_mine and self._random.random() < self.due

    def try_take(self) -> bool:
        if not self.is_mine:
            self.is_mine = self._random.random() < self.free
            self.num_turns += self.is_mine
            self.is_waiting = not self.is_mine
        return self.is_mine

    def release(self) -> None:
        assert self._engine is None or not self._engine.pending, "a step is in flight"
        self.num_ended += self.is_mine
        self.is_mine = self.is_waiting = False

    def watch(self, engine: Engine) -> None:
        """Checks what the engine does from now on."""
        self._engine = engine
        execute = engine.runner.execute

        def checked(step: Step) -> object:
            assert self.is_mine, "a step was launched without a turn"
            return execute(step)

        engine.runner.execute = checked  # type: ignore[method-assign,assignment]
