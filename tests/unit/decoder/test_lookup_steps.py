"""Steps of a lone request with lookup, on a simulated device that has the times of an H200."""

import random

import pytest

from benchmarks.known_answers import Text, repeating_text
from benchmarks.lookup_steps import simulate

_VOCAB_SIZE = 151936


@pytest.mark.parametrize(
    ("kind", "most", "ms"), [("quote", 130, 1.45), ("json", 215, 2.45), ("prediction", 30, 0.4)]
)
def test_texts_that_repeat_themselves_take_few_steps(kind: str, most: int, ms: float) -> None:
    """With at most 8 drafts and without waiting, they took 145, 239 and 45 steps."""
    text = repeating_text(kind, 1024, 400, _VOCAB_SIZE)
    found = simulate(text, 15)
    assert found.num_steps <= most
    assert found.ms <= ms


def test_a_lone_request_never_waits_for_long_where_nothing_is_repeated() -> None:
    """Pairs of tokens that come again, as in prose, and no longer repetitions."""
    draw = random.Random(3)
    words = [[draw.randrange(1, 5000), draw.randrange(1, 5000)] for _ in range(40)]
    tokens = [token for _ in range(300) for token in (*draw.choice(words), draw.randrange(1, 5000))]
    text = Text(tokens[:300], tokens[300:700])
    assert simulate(text, 15).ms <= 1.01 * simulate(text, 0).ms
