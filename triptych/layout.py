"""Which cards encode and which decode: both stages on each card, or cards of their own.

Both stages on each card use whatever is there, whatever the requests are. Cards of their own keep
encoding out of the decoders' steps, but idle where their share of the cards is not that of the
work. So encoders get cards of their own only where `share of encoding x cards` is nearly a whole
number (ADR 0064).

The share follows from sizes and from rates that were measured, before a process starts: the layout
decides which processes there are, and a warm-up that both stages do on one card times neither.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.model_spec import ModelSpec, TextSpec, TowerSpec
from triptych.fit import decoder_need, text_parameters
from triptych.stack import StackError

# FLOP/s of vision towers and of prompts, bytes/s of decode steps: what the 8B reaches on one H100
# (benchmarks/LOG.md: 80 images of 1024² and 43.8 prompts of 1,008 tokens a second, 59 with FP8
# weights; 9.62 ms for a step of 64 rows). On other cards the three are in similar proportions.
_TOWER_FLOPS, _PROMPT_FLOPS, _FP8_FLOPS, _DECODE_BYTES = 465e12, 620e12, 840e12, 2.6e12
_ROWS = 64  # that decode together
_ITEM_BYTES = 2
# What cards of their own must at least serve of what both stages on each serve.
_LEAST = 0.95
_SPLIT = re.compile(r"split:([1-9]\d?)\+([1-9]\d?)")


@dataclass(frozen=True, slots=True)
class Ask:
    """A kind of request: square images of so many pixels a side, text and answer in tokens."""

    images: int
    edge: int
    text: int
    answer: int


# Half of the requests each: two of the open loops that layouts were measured with.
MIXTURE = (Ask(1, 1024, 34, 64), Ask(4, 640, 76, 150))


@dataclass(frozen=True, slots=True)
class Layout:
    """Cards of encoders alone (0: both stages are on each card), and of decoders."""

    encoder_cards: int
    decoder_cards: int

    @property
    def cards(self) -> int:
        return self.encoder_cards + self.decoder_cards

    def __str__(self) -> str:
        """As `--layout` takes it."""
        return f"split:{self.encoder_cards}+{self.decoder_cards}" if self.encoder_cards else "both"

    def capacity(self, share: float) -> float:
        """What it serves of what both stages on each card do; `share`: of encoding in all work."""
        if not self.encoder_cards:
            return 1.0
        of_encoders = self.encoder_cards / (self.cards * share)
        return min(of_encoders, self.decoder_cards / (self.cards * (1 - share)))


def read_layout(text: str, cards: int, ranks: int = 1) -> Layout | None:
    """The layout that `--layout` names, on so many cards; None: `auto`.

    Args:
        text: `auto`, `both` or `split:E+D`, of E cards of encoders and D of decoders.
        ranks: cards of each decoder.

    Raises:
        StackError: it has another form, or does not fit the cards; says what can be done.
    """
    if text == "auto":
        return None
    split = _SPLIT.fullmatch(text)
    if text != "both" and split is None:
        raise StackError(f"--layout {text} is none of auto, both and split:E+D (cards of each)", 2)
    wanted = Layout(int(split[1]), int(split[2])) if split else Layout(0, cards)
    if wanted.cards != cards or wanted.decoder_cards % ranks or not cards:
        fitting = ", ".join(map(str, layouts(cards, ranks)))
        each = f" for decoders of {ranks} cards each" if ranks > 1 else ""
        what = f"what fits: {fitting}" if fitting else "it needs cards (--device cuda)"
        raise StackError(f"--layout {text}: {_cards(cards)} visible{each}; {what}", 2)
    return wanted


def layouts(cards: int, ranks: int = 1) -> Sequence[Layout]:
    """All that use every card; `ranks`: cards of each decoder."""
    return [
        Layout(encoders, cards - encoders)
        for encoders in range(cards)
        if (cards - encoders) % ranks == 0
    ]


def choose(share: float, cards: int, ranks: int = 1, *, beside: bool = True) -> tuple[Layout, str]:
    """The layout for a share of encoding, and why, as a line for people.

    Args:
        cards: at least as many as `ranks`.
        ranks: cards of each decoder.
        beside: a decoder fits a card beside an encoder.
    """
    found = layouts(cards, ranks)
    work = f"encoding is about {share:.0%} of the work, {share * cards:.1f} of {_cards(cards)}"
    splits = [layout for layout in found if layout.encoder_cards]
    if not splits:
        return found[0], f"layout {found[0]}: {work}; none is left for encoders alone"
    # Of equal ones more decoders: they hold the KV cache.
    best = max(splits, key=lambda layout: layout.capacity(share))
    if not beside:
        return best, f"layout {best}: a decoder has no room beside an encoder; {work}"
    if found[0].encoder_cards or best.capacity(share) >= _LEAST:
        return best, f"layout {best}: {work}"
    serves = f"{best} would serve {best.capacity(share):.0%} of the most"
    return found[0], f"layout {found[0]}: {work}; {serves}"


def share_of_encoding(spec: ModelSpec, mixture: Sequence[Ask] = MIXTURE) -> float:
    """The vision tower's share of a card's time for a mixture of requests; 0 without a tower."""
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
    """Of one square image: patches' embedding, blocks, mergers."""
    hidden = tower.hidden_size
    patches = (edge // tower.patch_size) ** 2
    pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    block = 2 * patches * (4 * hidden**2 + 2 * hidden * tower.intermediate_size)
    attention = 4 * patches**2 * hidden
    merged = hidden * tower.spatial_merge_size**2
    merger = 2 * (merged**2 + merged * tower.out_hidden_size) / tower.spatial_merge_size**2
    return (
        2.0 * patches * pixels * hidden
        + tower.depth * (block + attention)
        + tower.num_features * patches * merger
    )


def prompt_flops(text: TextSpec, tokens: int) -> float:
    """Of a prompt: linear layers, and causal attention."""
    attention = 2 * tokens**2 * text.num_heads * text.head_dim * len(text.attention_layers)
    return 2.0 * tokens * _active_parameters(text) + attention


def decode_bytes(text: TextSpec, context: int, bits: int) -> float:
    """That are read for a token of an answer, `_ROWS` of which share the weights."""
    linear, _ = text_parameters(text)
    weights = linear * bits / 8 + text.vocab_size * text.hidden_size * _ITEM_BYTES
    return weights / _ROWS + context * decoder_need(text, 0, _ITEM_BYTES, 1).token


def _active_parameters(text: TextSpec) -> float:
    """Of the linear layers that a token meets."""
    linear, _ = text_parameters(text)
    if text.moe is None:
        return linear
    idle = (text.moe.num_experts - text.moe.top_k) * text.moe.intermediate_size
    layers = sum(text.has_experts(layer) for layer in range(text.num_layers))
    return linear - 3.0 * text.hidden_size * idle * layers


def _cards(number: int) -> str:
    return f"{number} card{'' if number == 1 else 's'}"
