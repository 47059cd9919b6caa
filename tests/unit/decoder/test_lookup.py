"""Drafts from the sequence's own text and from the client's prediction."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.schedule.lookup import MIN_MATCH, NO_TOKEN, PromptLookup


def ids(*numbers: int) -> "array[int]":
    return array("i", numbers)


def lookup(text: "array[int]", prediction: "array[int] | None" = None) -> PromptLookup:
    return PromptLookup(text, prediction or ids())


def test_drafts_are_what_followed_the_last_tokens_before() -> None:
    found = lookup(ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3))
    assert found.propose(3) == [4, 5, 6]
    assert lookup(ids(1, 2, 3, 4, 9, 2, 3)).propose(3) == []  # two tokens are too few


def test_the_place_moves_on_with_accepted_tokens_and_is_left_at_another_token() -> None:
    text = ids(1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3)
    found = lookup(text)
    assert found.propose(2) == [4, 5]
    text.extend((4, 5, 6))
    found.read(text)
    assert found.propose(2) == [7, 8]
    text.append(50)
    found.read(text)
    assert found.propose(2) == []


def test_of_several_places_the_one_with_the_longest_equal_text_is_chosen() -> None:
    text = ids(9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 6, 9, 1, 2, 3)
    assert lookup(text).propose(1) == [4]
    assert lookup(text[1:]).propose(1) == [6]  # of two equal ones, the last


def test_what_repeats_itself_goes_on() -> None:
    assert lookup(ids(5, 6, 7, 5, 6, 7)).propose(7) == [5, 6, 7, 5, 6, 7, 5]
    assert lookup(ids(4, 4, 4, 4)).propose(3) == [4, 4, 4]


def test_an_image_is_never_proposed_and_never_matches() -> None:
    text = ids(1, 2, 3, 4, NO_TOKEN, NO_TOKEN, NO_TOKEN, 9, 1, 2, 3)
    assert lookup(text).propose(5) == [4]
    assert lookup(ids(*[NO_TOKEN] * 5, 7, *[NO_TOKEN] * 3)).propose(3) == []


def test_a_prediction_is_copied_from_its_start_and_found_again_behind_a_change() -> None:
    text = ids(70, 71)
    found = lookup(text, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert found.propose(4) == [1, 2, 3, 4] and found.is_prediction
    text.extend((1, 2, 30, 31))
    found.read(text)
    assert found.propose(4) == []
    text.extend((5, 6, 7))
    found.read(text)
    assert found.propose(4) == [8, 9] and found.is_prediction
    text.extend((8, 9, 99))
    found.read(text)
    assert found.propose(4) == [] and not found.is_prediction


def test_an_answer_returns_to_the_text_that_it_has_left() -> None:
    """Behind a new value, a shorter one and a longer one, each by one equal token."""
    key, other, end = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9]
    text = ids(*key, 20, *other, 21, *end, *key)
    found = lookup(text)
    assert found.propose(2) == [20, 5]
    for value, first, then in (([30], 5, [6, 7, 8]), ([31, 32, 33], 9, [9, 9, 1])):
        for token_id in (*value, first):
            assert found.propose(8)[:1] != [token_id]
            text.append(token_id)
            found.read(text)
        assert found.propose(3) == then
        text.extend(then)
        found.read(text)


def test_a_return_that_was_wrong_is_not_tried_again() -> None:
    text = ids(1, 2, 3, 4, 5, 6, 7, 8, 40, 1, 2, 3)
    found = lookup(text)
    drafts = [found.propose(2)]
    for token_id in (30, 6, 31, 8, 32):
        text.append(token_id)
        found.read(text)
        drafts.append(found.propose(2))
    assert drafts == [[4, 5], [], [7, 8], [], [], []]


def test_an_answer_that_stays_away_returns_by_three_tokens_alone() -> None:
    text = ids(*range(1, 40), 1, 2, 3)
    found = lookup(text)
    assert found.propose(1) == [4]
    for token_id in (*range(100, 117), 6):
        text.append(token_id)
        found.read(text)
        assert found.propose(1) == []
    text.extend((7, 8))
    found.read(text)
    assert found.propose(1) == [9]


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=40),
    answer=st.lists(st.integers(0, 3), max_size=40),
    prediction=st.lists(st.integers(0, 3), max_size=20),
    most=st.integers(1, 6),
)
def test_each_draft_continues_some_equal_text(
    prompt: list[int], answer: list[int], prediction: list[int], most: int
) -> None:
    """By exhaustive search, from the last token on. Three equal tokens always have drafts."""
    text = array("i", prompt)
    found = PromptLookup(text[:], array("i", prediction))
    follows = bool(prediction)  # the answer has begun as the prediction
    for number, token_id in enumerate(answer):
        text.append(token_id)
        found.read(text)
        follows = follows and prediction[: number + 1] == answer[: number + 1]
        drafts = found.propose(most)
        assert len(drafts) <= most
        last = text.tolist()
        if follows and number + 1 < len(prediction):
            assert drafts == prediction[number + 1 : number + 1 + most]
            continue
        places = {
            length: [
                (source, place)
                for source in (prediction, last)
                for place in range(length, len(source))
                if source[place - length : place] == last[-length:] and len(last) >= length
            ]
            for length in (1, MIN_MATCH)
        }
        assert drafts or not places[MIN_MATCH]
        if drafts:
            assert drafts in [
                (source + drafts)[place : place + len(drafts)] for source, place in places[1]
            ]


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_short_texts_have_no_drafts(length: int) -> None:
    assert lookup(ids(*range(length))).propose(4) == []


def test_large_ids_do_not_collide() -> None:
    big = 262_143
    assert lookup(ids(big, big - 1, big - 2, 5, 7, big, big - 1, big - 2)).propose(2) == [5, 7]


def has_reason(text: list[int]) -> bool:
    """Returns whether drafts may start behind the next token of a text that was never drafted."""
    found = lookup(ids(*text))
    assert found.propose(4) == []
    return found.prospect() != 0.0


def test_drafts_may_start_behind_two_tokens_that_stand_earlier() -> None:
    assert has_reason([9, 1, 2, 3, 4, 7, 1, 2])
    assert not has_reason([9, 1, 2, 3, 4, 7, 8, 2])
    assert not has_reason([9, 1, 2, 3, 4, 1, 7, 2])
    assert not has_reason([9, 1, 2, 3, 4, 7, 1, NO_TOKEN])
    assert not has_reason([1, 2, 3, 4])  # the last two tokens themselves


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=3, max_size=30),
    answer=st.lists(st.integers(0, 9), max_size=20),
)
def test_a_pair_of_tokens_is_found_wherever_it_stands(prompt: list[int], answer: list[int]) -> None:
    """By exhaustive search, except for a pair at the very start."""
    text = array("i", prompt)
    found = PromptLookup(text[:], ids())
    for token_id in answer:
        text.append(token_id)
        found.read(text)
        if found.propose(1) or found._left is not None:
            continue
        last = text.tolist()
        pairs = [last[place - 2 : place] for place in range(3, len(last))]
        assert (found.prospect() != 0.0) == (last[-2:] in pairs)


def follow(found: PromptLookup, text: "array[int]", tokens: list[int]) -> list[float]:
    """Appends tokens, and returns the prospect behind each of them, 0 where there are drafts."""
    prospects: list[float] = []
    for token_id in tokens:
        text.append(token_id)
        found.read(text)
        prospects.append(0.0 if found.propose(4) else found.prospect())
    return prospects


def test_the_prospect_of_a_pair_follows_what_came_behind_pairs_before() -> None:
    text = ids(*range(100, 400))
    found = lookup(text)
    firsts: list[float] = []
    for start in range(110, 350, 30):  # quotations, each behind new tokens
        prospects = follow(found, text, [start + 500, *range(start, start + 6)])
        assert prospects[3:] == [0.0] * 4
        firsts.append(prospects[2])
    assert firsts == sorted(firsts)
    assert firsts[0] < 0.0 < 0.15 < firsts[1] and 0.7 < firsts[-1] < 1.0
    for start in range(110, 350, 30):  # the same pairs, behind which the answer goes elsewhere
        firsts.append(follow(found, text, [start + 501, start + 1, start + 2, start + 503])[2])
    assert firsts[8:] == sorted(firsts[8:], reverse=True)
    assert firsts[-1] < firsts[7] - 0.3


def test_drafts_of_which_the_first_is_wrong_lower_the_prospect() -> None:
    """Each quotation ends behind its third token, so that waiting would verify a wrong draft."""
    text = ids(*range(100, 400))
    found = lookup(text)
    prospects = []
    for start in range(110, 350, 30):
        prospects.append(follow(found, text, [start + 500, *range(start, start + 3), 900])[2])
    assert max(prospects) < 0.0


def test_the_number_of_equal_tokens_grows_and_ends_with_the_quotation() -> None:
    text = ids(*range(1, 30), 80, 5, 6, 7)
    found = lookup(text)
    assert found.num_equal() == 3
    for count, token_id in enumerate(range(8, 14), start=4):
        text.append(token_id)
        found.read(text)
        assert found.num_equal() == count
    text.append(90)
    found.read(text)
    assert found.num_equal() == 0 and found.propose(4) == []
