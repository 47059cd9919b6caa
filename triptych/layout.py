"""Chooses which cards encode and which decode: shared by both stages, or dedicated to one stage.

Shared cards are always fully used, whatever the mixture of requests. Dedicated cards keep encoding
from slowing down the decoders' steps, but some cards idle if a stage's share of the cards differs
from its share of the work. Encoders therefore get dedicated cards only if
`share of encoding x cards` is nearly a whole number (ADR 0064).

The share is computed from the model's sizes and from measured rates before any process starts,
because the layout determines the processes. It cannot be measured during the warm-up, in which both
stages may run on the same card.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.model_spec import ModelSpec, TextSpec, TowerSpec
from triptych.fit import decoder_need, text_parameters
from triptych.stack import StackError

# FLOP/s of the vision tower and of prefill (also with FP8 weights), and bytes/s of decode steps of
# the 8B model on one H100 (benchmarks/LOG.md: 80 images of 1024² per second; 43.8 prompts of 1,008
# tokens per second, or 59 with FP8 weights; 9.62 ms for a step of 64 rows). On other cards the
# rates have similar proportions.
_TOWER_FLOPS, _PROMPT_FLOPS, _FP8_FLOPS, _DECODE_BYTES = 465e12, 620e12, 840e12, 2.6e12
_ROWS = 64  # rows of a decode step
_ITEM_BYTES = 2
# Least capacity of dedicated cards, relative to shared cards, for `auto` to choose them.
_LEAST = 0.95
_SPLIT = re.compile(r"split:([1-9]\d?)\+([1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Ask:
    """A kind of request.

    Attributes:
        images: number of images.
        edge: pixels per side of the images, which are square.
        text: tokens of text in the prompt.
        answer: tokens of the answer.
    """

    images: int
    edge: int
    text: int
    answer: int


# Two kinds of requests in equal numbers, from the benchmarks that measured layouts.
MIXTURE = (Ask(1, 1024, 34, 64), Ask(4, 640, 76, 150))


@dataclass(frozen=True, slots=True)
class Layout:
    """A division of the cards between encoders and decoders.

    Attributes:
        encoder_cards: number of cards that only encode. 0 if each card has both stages.
        decoder_cards: number of the remaining cards.
    """

    encoder_cards: int
    decoder_cards: int

    @property
    def cards(self) -> int:
        return self.encoder_cards + self.decoder_cards

    def __str__(self) -> str:
        """The value of `--layout` that selects this layout."""
        return f"split:{self.encoder_cards}+{self.decoder_cards}" if self.encoder_cards else "both"

    def capacity(self, share: float) -> float:
        """Throughput relative to shared cards, for a share of encoding in all work."""
        if not self.encoder_cards:
            return 1.0
        of_encoders = self.encoder_cards / (self.cards * share)
        return min(of_encoders, self.decoder_cards / (self.cards * (1 - share)))


def read_layout(text: str, cards: int, ranks: int = 1) -> Layout | None:
    """Parses the value of `--layout`. Returns None for `auto`.

    Args:
        text: `auto`, `both`, or `split:E+D` with E cards of encoders and D cards of decoders.
        cards: number of visible cards.
        ranks: number of cards of each decoder.

    Raises:
        StackError: the value is invalid or does not fit the cards. The message lists layouts that
            fit.
    """
    if text == "auto":
        return None
    split = _SPLIT.fullmatch(text)
    if text != "both" and split is None:
        raise StackError(
            f"--layout {text} is not auto, both or split:E+D (E cards of encoders, D of decoders)",
            2,
        )
    wanted = Layout(int(split[1]), int(split[2])) if split else Layout(0, cards)
    if wanted.cards != cards or wanted.decoder_cards % ranks or not cards:
        fitting = ", ".join(map(str, layouts(cards, ranks)))
        each = f" for decoders of {ranks} cards each" if ranks > 1 else ""
        what = f"what fits: {fitting}" if fitting else "it needs cards (--device cuda)"
        raise StackError(f"--layout {text}: {_cards(cards)} visible{each}; {what}", 2)
    return wanted


def layouts(cards: int, ranks: int = 1) -> Sequence[Layout]:
    """All layouts that use every card, if each decoder has `ranks` cards."""
    return [
        Layout(encoders, cards - encoders)
        for encoders in range(cards)
        if (cards - encoders) % ranks == 0
    ]


def choose(share: float, cards: int, ranks: int = 1, *, beside: bool = True) -> tuple[Layout, str]:
    """Chooses a layout, and returns it with a message that gives the reason.

    Args:
        share: share of encoding in all work.
        cards: number of cards, at least `ranks`.
        ranks: number of cards of each decoder.
        beside: True if a decoder fits a card beside an encoder.
    """
    found = layouts(cards, ranks)
    work = f"encoding is about {share:.0%} of the work, {share * cards:.1f} of {_cards(cards)}"
    splits = [layout for layout in found if layout.encoder_cards]
    if not splits:
        return found[0], f"layout {found[0]}: {work}; no card is left for encoders alone"
    # `max` returns the first of equal layouts, with the most decoders, which have the KV cache.
    best = max(splits, key=lambda layout: layout.capacity(share))
    if not beside:
        return best, f"layout {best}: a decoder does not fit a card beside an encoder; {work}"
    if found[0].encoder_cards or best.capacity(share) >= _LEAST:
        return best, f"layout {best}: {work}"
    serves = f"{best} would have {best.capacity(share):.0%} of this layout's throughput"
    return found[0], f"layout {found[0]}: {work}; {serves}"


def share_of_encoding(spec: ModelSpec, mixture: Sequence[Ask] = MIXTURE) -> float:
    """The vision tower's share of GPU time for a mixture of requests. 0 without a tower."""
    if spec.vision is None:
        return 0.0
    tower, text, quantization = spec.vision.tower, spec.text, spec.checkpoint.quantization
    is_fp8 = quantization is not None and quantization.format.startswith("fp8")
    bits = 8 * _ITEM_BYTES if quantization is None else quantization.bits
    encoding = sum(ask.images * encode_flops(tower, ask.edge) for ask in mixture) / _TOWER_FLOPS
    prompts = decoding = 0.0
    for ask in mixture:
        side = ask.edge // (tower.patch_size * tower.spatial_merge_size)
        prompt = ask.images * side * side + ask.text
        prompts += prompt_flops(text, prompt) / (_FP8_FLOPS if is_fp8 else _PROMPT_FLOPS)
        context = prompt + ask.answer // 2
        decoding += ask.answer * decode_bytes(text, context, bits) / _DECODE_BYTES
    return encoding / (encoding + prompts + decoding)


def encode_flops(tower: TowerSpec, edge: int) -> float:
    """FLOPs of encoding a square image: patch embedding, blocks and mergers."""
    hidden = tower.hidden_size
    patches = (edge // tower.patch_size) ** 2
    pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    block = 2 * patches * tower.block_weights
    attention = 4 * patches * tower.attended(patches) * hidden
    merged = hidden * tower.spatial_merge_size**2
    merger = 2 * (merged**2 + merged * tower.out_hidden_size) / tower.spatial_merge_size**2
    return (
        2.0 * patches * pixels * hidden
        + tower.depth * (block + attention)
        + tower.num_features * patches * merger
    )


def prompt_flops(text: TextSpec, tokens: int) -> float:
    """FLOPs of a prompt: linear layers and causal attention."""
    attention = 2 * tokens**2 * text.num_heads * text.head_dim * len(text.attention_layers)
    return 2.0 * tokens * _active_parameters(text) + attention


def decode_bytes(text: TextSpec, context: int, bits: int) -> float:
    """Bytes that are read per generated token, if `_ROWS` rows share the reading of the weights."""
    linear, _ = text_parameters(text)
    weights = linear * bits / 8 + text.vocab_size * text.hidden_size * _ITEM_BYTES
    return weights / _ROWS + context * decoder_need(text, 0, _ITEM_BYTES, 1).token


def _active_parameters(text: TextSpec) -> float:
    """Number of parameters of the linear layers that a token activates."""
    linear, _ = text_parameters(text)
    if text.moe is None:
        return linear
    idle = (text.moe.num_experts - text.moe.top_k) * text.moe.intermediate_size
    layers = sum(text.has_experts(layer) for layer in range(text.num_layers))
    return linear - 3.0 * text.hidden_size * idle * layers


def _cards(number: int) -> str:
    return f"{number} card{'' if number == 1 else 's'}"
