"""SentencePiece tokenizers, as of Llama 2 and Mistral 7B: the ids and texts of transformers."""

import codecs
import json
import random
import re
import unicodedata
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.model_spec import ModelSpecError
from services.gateway.answers.detokenizer import Choice
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.cases import cases
from tests.piece_tokenizers import ADDED, PREPEND, REPLACE, SPACES, definition, metaspace

transformers = pytest.importorskip("transformers")

KINDS = ["llama2", "mistral", "always", "yi"]
INST = ("[INST]", "[/INST]")
FIRST_BYTE = len(ADDED)  # id of the token `<0x00>`
# Bytes that end, begin and cannot be in a character of UTF-8.
BYTES = [0x80, 0x9F, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xC0, 0xF8, 0xFF]
# Scripts, with the first and the last code point of their characters. The Unicode name of each
# character begins with the name of its script (`ETHIOPIC SYLLABLE HA`).
SCRIPTS = {
    "LATIN": (0x41, 0x24F), "GREEK": (0x370, 0x3FF), "CYRILLIC": (0x400, 0x4FF),
    "ARMENIAN": (0x531, 0x58A), "HEBREW": (0x591, 0x5F4), "ARABIC": (0x600, 0x6FF),
    "SYRIAC": (0x700, 0x74F), "THAANA": (0x780, 0x7B1), "NKO": (0x7C0, 0x7FA),
    "DEVANAGARI": (0x900, 0x97F), "BENGALI": (0x980, 0x9FB), "GURMUKHI": (0xA01, 0xA76),
    "GUJARATI": (0xA81, 0xAF1), "ORIYA": (0xB01, 0xB77), "TAMIL": (0xB82, 0xBFA),
    "TELUGU": (0xC00, 0xC7F), "KANNADA": (0xC80, 0xCF2), "MALAYALAM": (0xD00, 0xD7F),
    "SINHALA": (0xD81, 0xDF4), "THAI": (0xE01, 0xE5B), "LAO": (0xE81, 0xEDF),
    "TIBETAN": (0xF00, 0xFDA), "MYANMAR": (0x1000, 0x109F), "GEORGIAN": (0x10A0, 0x10FF),
    "ETHIOPIC": (0x1200, 0x137C), "CHEROKEE": (0x13A0, 0x13F4),
    "CANADIAN SYLLABICS": (0x1400, 0x167F), "OGHAM": (0x1680, 0x169C), "RUNIC": (0x16A0, 0x16F0),
    "KHMER": (0x1780, 0x17F9), "MONGOLIAN": (0x1820, 0x1878), "TIFINAGH": (0x2D30, 0x2D7F),
    "HIRAGANA": (0x3041, 0x309F), "KATAKANA": (0x30A0, 0x30FF), "BOPOMOFO": (0x3105, 0x312F),
    "CJK": (0x4E00, 0x9FFF), "YI": (0xA000, 0xA48C), "HANGUL": (0xAC00, 0xD7A3),
    "GOTHIC": (0x10330, 0x1034A),
}  # fmt: skip
# Characters of no script: ASCII, combining marks, unassigned code points, punctuation and emoji.
OTHERS = [(0x21, 0x7E), (0x300, 0x36F), (0x378, 0x379), (0x2000, 0x206F), (0x1F300, 0x1F64F)]
WORDS = ["the", "The", "fox", "naïve", "  ", "\n", "\t", " ", "булок", '{"name": 41}', "<0xE2>"]


def characters_of(script: str) -> list[str]:
    first, last = SCRIPTS[script]
    found = map(chr, range(first, last + 1))
    return [character for character in found if unicodedata.name(character, "").startswith(script)]


CHARACTERS = [characters_of(script) for script in SCRIPTS]
CHARACTERS += [[chr(point) for point in range(first, last + 1)] for first, last in OTHERS]


def text_of(rng: random.Random) -> str:
    """A text of words and of characters of a few scripts, with blanks anywhere."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.4:
            parts.append(rng.choice(WORDS))
        else:
            parts.append("".join(rng.choices(rng.choice(CHARACTERS), k=rng.randint(1, 4))))
        if rng.random() < 0.6:
            parts.append(" " * rng.randint(1, 2))
    return "".join(parts)


def reference(kind: str) -> Any:
    """Returns transformers' tokenizer of the same file."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(definition(kind, INST))),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def streamed(tokenizer: ModelTokenizer, ids: list[int], **fields: object) -> list[str]:
    """The text so far after each token of an answer, and the text at its end."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    request = ChatRequest(messages, "m")
    for name, value in fields.items():
        setattr(request, name, value)
    choice, text, found = Choice(0, request, tokenizer, None), "", []
    for token_id in ids:
        update = choice.feed(TokenEvent(0, [token_id]))
        text += "".join(part.text for part in update.parts)
        found.append(text)
        if update.finish_reason is not None:
            return found
    update = choice.feed(TokenEvent(0, finish_reason="length"))
    return [*found, text + "".join(part.text for part in update.parts)]


def complete_characters(so_far: str, whole: str) -> str:
    """Returns the complete characters of a text whose last character may have only some bytes.

    transformers writes U+FFFD for each byte of a run of byte tokens that is not UTF-8 as a whole,
    so complete characters of the run are U+FFFD, too: `字` and two of three bytes of `漢` are five.

    Args:
        so_far: the beginning of a text, as transformers decodes it.
        whole: the whole text, which has no U+FFFD.
    """
    certain = so_far.rstrip("\ufffd")
    assert whole.startswith(certain)
    num_bytes = len(certain.encode()) + len(so_far) - len(certain)
    return whole.encode()[:num_bytes].decode(errors="ignore")


def byte_runs(tokens: list[str]) -> list[bytes]:
    """Returns the bytes of each run of byte tokens. The last ones are empty if a piece is last."""
    joined = "".join(t if re.fullmatch("<0x..>", t) else "|" for t in tokens)
    return [bytes.fromhex(re.sub("<0x|>", "", run)) for run in joined.split("|")]


def is_utf8(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


def test_scripts_are_thirty():
    """Counts Hiragana and Katakana as one script, and no punctuation and emoji."""
    assert len(SCRIPTS.keys() - {"KATAKANA"}) >= 30
    assert all(len(characters_of(script)) > 20 for script in SCRIPTS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_thirty_scripts(kind):
    """Ids equal those of transformers. The streamed text of each prefix is the decoded one, without
    the bytes of a character that is not complete yet. `make nightly` has 10,000 texts of each kind,
    `make test` the first 1,000.
    """
    ours, theirs, rng = ModelTokenizer(definition(kind, INST)), reference(kind), random.Random(kind)
    num_prefixes, num_incomplete, num_texts = 0, 0, cases(1000, 10_000)
    seen: set[str] = set()
    for _ in range(num_texts):
        text = text_of(rng)
        seen.update(text)
        ids = ours.encode_text(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text, add_special_tokens=True) == theirs.encode(text)
        whole = theirs.decode(ids)
        assert ours.decode(ids) == whole, text
        assert "\ufffd" not in whole
        *prefixes, at_end = streamed(ours, ids)
        assert at_end == whole, text
        for count, so_far in enumerate(prefixes, 1):
            expected = theirs.decode(ids[:count])
            if expected.endswith("\ufffd"):
                expected = complete_characters(expected, whole)
                num_incomplete += 1
            assert so_far == expected, (text, count)
            num_prefixes += 1
    assert num_prefixes > 16 * num_texts
    assert num_incomplete > 0.4 * num_prefixes
    assert all(seen & set(characters) for characters in CHARACTERS)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_no_characters(kind):
    """A random model writes bytes that are not UTF-8. transformers writes U+FFFD for each byte of
    a run of byte tokens that has one of them. The streamed text has the run's characters, and one
    U+FFFD for each wrong sequence of bytes. An incomplete character at the end is left out.
    """
    ours, theirs, rng = ModelTokenizer(definition(kind)), reference(kind), random.Random(kind)
    wrong = re.compile("\ufffd+")
    num_wrong, num_texts = 0, cases(200, 2000)
    for _ in range(num_texts):
        ids: list[int] = []
        for _ in range(rng.randint(1, 5)):
            ids += ours.encode_text(text_of(rng))[: rng.randint(1, 9)]
            ids += [FIRST_BYTE + rng.choice(BYTES) for _ in range(rng.randint(0, 3))]
        runs = byte_runs(theirs.convert_ids_to_tokens(ids))
        bad = [run for run in runs if not is_utf8(run)]
        num_wrong += len(bad)
        whole, rest = theirs.decode(ids), iter(bad)
        assert [len(found) for found in wrong.findall(whole)] == [len(run) for run in bad]
        expected = wrong.sub(lambda _, rest=rest: next(rest).decode(errors="replace"), whole)
        assert ours.decode(ids) == expected, ids
        if not is_utf8(runs[-1]):
            complete = codecs.getincrementaldecoder("utf-8")("replace").decode(runs[-1])
            expected = expected.removesuffix(runs[-1].decode(errors="replace")) + complete
        assert streamed(ours, ids)[-1] == expected, ids
    assert num_wrong > num_texts


@pytest.mark.parametrize("kind", KINDS)
def test_text_between_added_tokens(kind):
    ours, theirs = ModelTokenizer(definition(kind, INST)), reference(kind)
    text = "<s>[INST] What is in the picture? [/INST] A red circle.</s>[INST]  Why?[/INST]"
    ids: list[int] = []
    for piece in ("<s>", "[INST]", " What is in the picture? ", "[/INST]", " A red circle.",
                  "</s>", "[INST]", "  Why?", "[/INST]"):  # fmt: skip
        added = ours.added.get(piece)
        ids += [added.token_id] if added else ours.encode_text(piece, is_first=not ids)
    assert ids == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_has_no_space_before_it(kind):
    ours = ModelTokenizer(definition(kind))
    ids = ours.encode_continuation("fox")
    assert b"".join(map(ours.token_bytes, ids)) == b"fox"


def test_only_an_answer_loses_the_space_at_its_beginning():
    """A text that continues a prompt, or a message, keeps the space between the two."""
    ours = ModelTokenizer(definition("llama2"))
    ids = ours.encode_text("fox jumps")
    assert streamed(ours, ids)[-1] == "fox jumps"
    assert streamed(ours, ids, messages=[])[-1] == " fox jumps"
    assert streamed(ours, ids, continue_final_message=True)[-1] == " fox jumps"
    spaces = ours.encode_text("  fox")
    assert streamed(ours, spaces)[-1] == "  fox"
    assert streamed(ModelTokenizer(definition("yi")), ids)[-1] == " fox jumps"


def test_stop_strings_across_bytes_and_pieces():
    ours = ModelTokenizer(definition("mistral"))
    ids = ours.encode_text("the fox 🙂 and the dog 漢字 end")
    assert streamed(ours, ids, stop=["字 e"])[-1] == "the fox 🙂 and the dog 漢"
    assert streamed(ours, ids, stop=["🙂"])[-1] == "the fox "


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {"byte_fallback": False}}, "byte_fallback"),
        ({"normalizer": {"type": "NFKC"}}, "NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {**metaspace("first"), "replacement": "_"}}, "replacement"),
        ({"decoder": {"type": "Metaspace"}}, "Metaspace"),
        ({"decoder": None}, "decoder of none"),
        ({"decoder": {"type": "Sequence", "decoders": [
            SPACES, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 1}]}}, "Strip"),
        ({"decoder": {"type": "Sequence", "decoders": [
            {**SPACES, "content": "_"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}}, "Replace"),
    ],
)  # fmt: skip
def test_other_forms_are_refused_by_name(change, named):
    found = definition("llama2")
    for part, value in change.items():
        found[part] = {**found[part], **value} if part == "model" else value
    with pytest.raises(ModelSpecError, match=named):
        ModelTokenizer(found)


def test_a_single_normalizer_is_read_like_a_sequence():
    found = {**definition("yi"), "normalizer": REPLACE}
    assert ModelTokenizer(found).encode_text("the fox")
    plain = ModelTokenizer(found).encode_text("fox")
    found["normalizer"] = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
    assert ModelTokenizer(found).encode_text("fox") != plain
