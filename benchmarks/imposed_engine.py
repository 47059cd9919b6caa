"""The engine process of `benchmarks.imposed`: a decoder's engine whose acceptance is imposed.

The model computes each step, and the sampled tokens are replaced by those of random answers on
their way to the engine. Drafts are tokens of these answers, each right with a stated probability;
see `known_answers`.
"""

import json
import random
from typing import Any

import numpy as np

from benchmarks.known_answers import ImposedDrafts, ScriptedRunner, StatedDrafts, StatedSources
from services.common.process.engine_process import leave
from services.decoder import engine_main
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence
from services.decoder.settings import DecoderSettings


class ImposedSettings(DecoderSettings):
    """A decoder's settings, and what is imposed.

    Attributes:
        rate: probability that a draft is right.
        token_ids: ids of which answers are made, as JSON.
    """

    rate: float
    token_ids: str


class ImposedEngine(Engine):
    """An engine with known answers. See `Engine` for the arguments."""

    settings: ImposedSettings

    def __init__(self, runner: Any, **options: Any) -> None:  # noqa: ANN401 - `Engine`'s
        self._known: dict[int, list[int]] = {}
        self._token_ids: list[int] = json.loads(self.settings.token_ids)
        driven: Any = ScriptedRunner(runner, self._known)
        super().__init__(driven, **options)
        kind = ImposedDrafts if runner.info.has_draft_head else StatedDrafts
        self.speculation.sources = StatedSources(self._known, self.settings.rate, kind)

    def add(self, message: AddSequence) -> None:
        prompt = np.frombuffer(message.prompt_token_ids, np.int32).tolist()
        draw = random.Random(message.sequence_id)
        answer = draw.choices(self._token_ids, k=message.sampling.max_tokens)
        self._known[message.sequence_id] = [*prompt, *answer]
        super().add(message)


def _read_settings(settings_json: str | bytes) -> DecoderSettings:
    ImposedEngine.settings = ImposedSettings.model_validate_json(settings_json)
    return ImposedEngine.settings


class _Settings:
    model_validate_json = staticmethod(_read_settings)


def main() -> int:
    """Runs the engine process; returns its exit status."""
    replaced: Any = engine_main
    replaced.DecoderSettings, replaced.Engine = _Settings, ImposedEngine
    return engine_main.main()


if __name__ == "__main__":
    leave(main())
