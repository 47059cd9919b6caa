"""Verdicts on grammars that are kept, and texts that have killed the fork that compiled them."""

import pytest

from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.verdicts import StoredVerdict, Verdicts, key_of


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def verdicts(clock):
    return Verdicts(clock)


def test_a_verdict_is_kept(verdicts):
    assert verdicts.find(b"a") is None
    verdicts.store(b"a", StoredVerdict("", is_slow=True))
    verdicts.store(b"b", StoredVerdict("is not a schema"))
    assert verdicts.find(b"a") == StoredVerdict("", is_slow=True)
    assert verdicts.find(b"b") == StoredVerdict("is not a schema")


def test_the_second_death_of_a_text_is_kept_for_an_hour(verdicts, clock):
    verdicts.died(b"a", "takes too long")
    assert verdicts.find(b"a") is None, "the fork may have died of something else"
    clock.now += 3599
    verdicts.died(b"a", "takes too long")
    clock.now += 3599
    assert verdicts.find(b"a") == StoredVerdict("takes too long")
    clock.now += 1
    assert verdicts.find(b"a") is None
    verdicts.died(b"a", "takes too long")
    assert verdicts.find(b"a") is None, "deaths of an hour ago count no more"


def test_deaths_that_are_far_apart_are_no_verdict(verdicts, clock):
    for _ in range(5):
        verdicts.died(b"a", "takes too long")
        clock.now += 3600
        assert verdicts.find(b"a") is None


def test_verdicts_and_deaths_are_bounded(verdicts):
    verdicts.store(b"used", StoredVerdict(""))
    for number in range(5000):
        verdicts.store(b"%d" % number, StoredVerdict(""))
        verdicts.died(b"dead %d" % number, "died")
        verdicts.died(b"dead %d" % number, "died")
        assert verdicts.find(b"used") is not None
    assert verdicts.find(b"0") is None and verdicts.find(b"4999") is not None
    assert verdicts.find(b"dead 0") is None and verdicts.find(b"dead 4999") is not None


def test_keys_differ_by_all_of_a_grammar():
    sources = {
        GrammarSource("regex", "a"),
        GrammarSource("grammar", "a"),
        GrammarSource("regex", "b"),
        GrammarSource("regex", "a", plain_strings=True),
    }
    assert len({key_of(source) for source in sources}) == 4
