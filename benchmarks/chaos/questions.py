"""The requests of a run: a catalogue drawn from a seed, each with an answer that never varies.

Small ones for the most part, so that many fit into a run: texts and images, greedy and sampled with
a seed, several choices, log-probabilities, penalties, stop strings, structured output, a few long
answers, a few mistakes.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.workloads import WORDS, chat_fields, data_url, random_image

MODEL = "demo"
_NUM_IMAGES = 24
_QUESTIONS = (
    "What do you see?", "How many circles are there?", "Which colour is the square?",
    "What is written here?", "What is left of the triangle?", "Describe the picture.",
)  # fmt: skip
_SAMPLING: Sequence[dict[str, Any]] = (
    {},
    {},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.8, "repetition_penalty": 1.1, "logit_bias": {"300": 2.0}},
)
_EXTRAS: Sequence[dict[str, Any]] = (
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": ["e", "zz"]},
    {"min_tokens": 4},
)
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_STRUCTURED = {
    "type": "json_schema", "json_schema": {"name": "found", "schema": _SCHEMA, "strict": True}
}  # fmt: skip
_MISTAKES: Sequence[dict[str, Any]] = (
    {"temperature": 3}, {"max_tokens": 0}, {"top_p": 0}, {"n": 0}, {"stop": ["x"] * 17},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        number: its place in the catalogue.
        fields: of its JSON, streamed or not.
        status: of its answer.
        num_images: in it.
    """

    number: int
    fields: dict[str, Any]
    status: int
    num_images: int

    def body(self, *, stream: bool, salt: str) -> bytes:
        """The JSON. `salt` keeps it from caches that others have filled; it changes no answer."""
        fields = dict(self.fields)
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if salt:
            fields["cache_salt"] = salt
        return json.dumps(fields).encode()


def questions(seed: int, count: int) -> list[Question]:
    """The catalogue."""
    rng = random.Random(f"questions/{seed}")
    pixels = np.random.default_rng(seed)
    images = [data_url(random_image(pixels, 96 + 32 * (i % 4), 128)) for i in range(_NUM_IMAGES)]
    return [_question(number, rng, images) for number in range(count)]


def _question(number: int, rng: random.Random, images: Sequence[str]) -> Question:
    kind, shown, tokens, num_words = rng.random(), 0, rng.randint(1, 6), rng.randint(2, 10)
    extra: dict[str, Any] = dict(rng.choice(_SAMPLING))
    if kind < 0.30:
        shown = 1
    elif kind < 0.34:
        shown = 2
    elif kind < 0.36:
        tokens, extra = rng.randint(40, 140), {**extra, "ignore_eos": True}
    elif kind < 0.38:
        num_words = rng.randint(100, 300)
    elif kind < 0.40:
        tokens, extra = 40, {"temperature": 0.8, "response_format": _STRUCTURED}
    elif kind < 0.52:
        extra |= rng.choice(_EXTRAS)
        tokens = max(tokens, 4)
    text = rng.choice(_QUESTIONS) if shown else " ".join(rng.choices(WORDS, k=num_words))
    urls = rng.sample(list(images), shown)
    fields = chat_fields(MODEL, text, tokens, urls, ignore_eos=False)
    del fields["stream"], fields["stream_options"]
    fields |= extra | {"seed": rng.getrandbits(31)}
    has_mistake = rng.random() < 0.03
    if has_mistake:
        fields |= rng.choice(_MISTAKES)
    return Question(number, fields, 400 if has_mistake else 200, shown)
