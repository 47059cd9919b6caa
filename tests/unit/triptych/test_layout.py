"""Which cards encode: the share of the work, and the rule."""

from dataclasses import replace
from itertools import pairwise

import pytest

from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from triptych.layout import (
    MIXTURE,
    Ask,
    Layout,
    choose,
    decode_bytes,
    layouts,
    read_layout,
    share_of_encoding,
)
from triptych.options import DEMONSTRATION_MODEL
from triptych.stack import StackError


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(DEMONSTRATION_MODEL)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cards", [1, 2, 3, 4, 8])
def test_all_cards_are_used_by_whole_decoders(cards: int, ranks: int) -> None:
    for layout in layouts(cards, ranks):
        assert layout.cards == cards and layout.decoder_cards % ranks == 0 < layout.decoder_cards
        assert read_layout(str(layout), cards, ranks) == layout


@pytest.mark.parametrize(
    ("share", "cards", "chosen"),
    [
        (0.25, 1, "both"),
        (0.25, 2, "both"),  # half a card: one would idle half of the time
        (0.5, 2, "split:1+1"),
        (0.25, 4, "split:1+3"),
        (0.25, 3, "both"),
        (0.25, 8, "split:2+6"),
        (0.31, 8, "both"),
        (0.02, 8, "both"),
        (0.75, 4, "split:3+1"),
    ],
)
def test_encoders_have_cards_where_their_share_is_nearly_whole(
    share: float, cards: int, chosen: str
) -> None:
    assert str(choose(share, cards)[0]) == chosen


def test_no_layout_serves_more_than_both_stages_on_each_card() -> None:
    for cards in range(1, 9):
        for share in (0.05, 0.2, 0.37, 0.5, 0.8):
            found = [layout.capacity(share) for layout in layouts(cards)]
            assert found[0] == 1.0 and max(found) <= 1.0
            chosen, _ = choose(share, cards)
            assert chosen.capacity(share) >= 0.95


def test_a_card_that_ranks_leave_over_encodes() -> None:
    assert choose(0.2, 3, ranks=2)[0] == Layout(1, 2)
    assert choose(0.2, 5, ranks=2)[0] == Layout(1, 4)
    assert choose(0.2, 8, ranks=8)[0] == Layout(0, 8)
    assert choose(0.5, 8, ranks=4)[0] == Layout(4, 4)


def test_what_does_not_fit_beside_an_encoder_gets_whole_cards() -> None:
    assert choose(0.1, 2, beside=False)[0] == Layout(1, 1)
    assert choose(0.1, 8, beside=False)[0] == Layout(1, 7)
    assert choose(0.1, 1, beside=False)[0] == Layout(0, 1)  # the check of memory says why not
    assert "does not fit a card beside an encoder" in choose(0.1, 2, beside=False)[1]


def test_the_reason_names_the_share_and_what_was_not_taken() -> None:
    assert choose(0.25, 2)[1] == (
        "layout both: encoding is about 25% of the work, 0.5 of 2 cards; "
        "split:1+1 would have 67% of this layout's throughput"
    )
    assert choose(0.25, 4)[1].endswith("encoding is about 25% of the work, 1.0 of 4 cards")
    assert "no card is left for encoders alone" in choose(0.2, 2, ranks=2)[1]


@pytest.mark.parametrize(
    ("text", "cards", "ranks", "said"),
    [
        ("split:1+1", 4, 1, "4 cards visible; what fits: both, split:1+3, split:2+2, split:3+1"),
        ("both", 3, 2, "for decoders of 2 cards each; what fits: split:1+2"),
        ("split:0+2", 2, 1, "is not auto, both or split"),
        ("Both", 2, 1, "is not auto, both or split"),
        ("split:1+1", 0, 1, "it needs cards"),
        ("both", 1, 2, "it needs cards"),
    ],
)
def test_a_layout_that_does_not_fit_comes_with_those_that_do(
    text: str, cards: int, ranks: int, said: str
) -> None:
    with pytest.raises(StackError) as caught:
        read_layout(text, cards, ranks)
    assert said in str(caught.value)


def test_more_pixels_are_more_encoding_and_longer_answers_less(spec: ModelSpec) -> None:
    assert spec.vision is not None
    shares = [share_of_encoding(spec, [Ask(1, edge, 32, 64)]) for edge in (256, 512, 1024)]
    assert all(low < high for low, high in pairwise(shares))
    answers = [share_of_encoding(spec, [Ask(1, 512, 32, answer)]) for answer in (1, 64, 512)]
    assert all(high > low for high, low in pairwise(answers))
    assert share_of_encoding(spec, [Ask(0, 512, 32, 64)]) == 0.0
    assert 0 < share_of_encoding(spec) < 1
    assert share_of_encoding(replace(spec, vision=None), MIXTURE) == 0.0


def test_a_token_reads_its_share_of_the_weights_and_its_context(spec: ModelSpec) -> None:
    text = spec.text
    token = 2 * text.num_kv_heads * text.head_dim * 2 * len(text.attention_layers)
    assert decode_bytes(text, 1000, 16) - decode_bytes(text, 0, 16) == 1000 * token
    assert decode_bytes(text, 0, 8) < decode_bytes(text, 0, 16)
