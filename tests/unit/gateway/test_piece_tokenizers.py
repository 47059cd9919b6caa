"""SentencePiece tokenizers, as of Llama 2 and Mistral 7B: the ids and texts of transformers."""

import json
import random

import pytest
from tokenizers import Tokenizer

from services.common.model_spec import ModelSpecError
from services.gateway.answers.detokenizer import Choice
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.cases import cases
from tests.piece_tokenizers import PREPEND, REPLACE, SPACES, definition, metaspace

transformers = pytest.importorskip("transformers")

KINDS = ["llama2", "mistral", "always", "yi"]
INST = ("[INST]", "[/INST]")
# First and last code points of scripts, and of punctuation, symbols and emoji.
SCRIPTS = [
    (0x21, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x58A), (0x591, 0x5F4),
    (0x600, 0x6FF), (0x700, 0x74F), (0x780, 0x7B1), (0x900, 0x97F), (0x980, 0x9FB), (0xA01, 0xA76),
    (0xA81, 0xAF1), (0xB82, 0xBFA), (0xC00, 0xC7F), (0xC80, 0xCF2), (0xD00, 0xD7F), (0xD81, 0xDF4),
    (0xE01, 0xE5B), (0xE81, 0xEDF), (0xF00, 0xFDA), (0x1000, 0x109F), (0x10A0, 0x10FF),
    (0x1200, 0x137C), (0x13A0, 0x13F4), (0x1780, 0x17F9), (0x1820, 0x1878), (0x2000, 0x206F),
    (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F),
]  # fmt: skip
WORDS = ["the", "The", "fox", "naïve", "  ", "\n", "\t", " ", "булок", '{"name": 41}', "<0xE2>"]


def text_of(rng: random.Random) -> str:
    """A text of words and of characters of a few scripts, with blanks anywhere."""
    parts = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.4:
            parts.append(rng.choice(WORDS))
        else:
            first, last = rng.choice(SCRIPTS)
            parts.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 4))))
        if rng.random() < 0.6:
            parts.append(" " * rng.randint(1, 2))
    return "".join(parts)


def reference(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Returns transformers' tokenizer of the same file."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(definition(kind, INST))),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def streamed(tokenizer: ModelTokenizer, ids: list[int], **fields: object) -> list[str]:
    """The text so far after each token of an answer."""
    request = ChatRequest([{"role": "user", "content": "hi"}], "m")
    for name, value in fields.items():
        setattr(request, name, value)
    choice, text, found = Choice(0, request, tokenizer, None), "", []
    for token_id in ids:
        update = choice.feed(TokenEvent(0, [token_id]))
        text += "".join(part.text for part in update.parts)
        found.append(text)
        if update.finish_reason is not None:
            break
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_thirty_scripts(kind):
    """Ids equal those of transformers. The streamed text of each prefix is the decoded one, without
    the bytes of a character that is not complete yet, which transformers writes as U+FFFD.
    """
    ours, theirs, rng = ModelTokenizer(definition(kind, INST)), reference(kind), random.Random(kind)
    num_prefixes, num_texts = 0, cases(300, 2500)
    for _ in range(num_texts):
        text = text_of(rng)
        ids = ours.encode_text(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text, add_special_tokens=True) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids), text
        for count, so_far in enumerate(streamed(ours, ids), 1):
            whole = theirs.decode(ids[:count])
            if "\ufffd" in whole:
                continue
            assert so_far == whole, (text, count)
            num_prefixes += 1
    assert num_prefixes > 8 * num_texts


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
