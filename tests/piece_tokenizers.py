"""Small tokenizers of SentencePiece's kind, as files of Llama 2, Mistral 7B and Yi have them."""

import json
from functools import cache

from tokenizers import Tokenizer, models, normalizers, trainers

SPACE = "▁"
PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
ADDED = ["<unk>", "<s>", "</s>"]
_TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox is gone.",
    "What is in the picture? A red circle, a blue square and three green triangles.",
    'def answer(name: str) -> dict:\n    return {"name": name, "age": 41, "tags": ["a", "b"]}\n',
    "Über naïve Äpfel und öffentliche Straßen, déjà vu, señor, ça va?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
]


def metaspace(scheme: str) -> dict:
    """Returns the pre-tokenizer that writes a space before a text: `first`, `always`, `never`."""
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


@cache
def _vocabulary() -> str:
    """A BPE with tokens of 256 bytes, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    names = [*ADDED, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer.to_str()


def definition(kind: str, more_added: tuple[str, ...] = ()) -> dict:
    """Returns a parsed tokenizer.json.

    Args:
        kind: `llama2` (`Prepend`), `mistral` (a space before the first text alone), `always` (a
            space before each text between added tokens) or `yi` (no space before a text).
        more_added: names of added tokens beside `<unk>`, `<s>` and `</s>`.
    """
    found = json.loads(_vocabulary())
    base = found["added_tokens"][0]
    first = len(found["model"]["vocab"])
    ids = {name: found["model"]["vocab"][name] for name in ADDED}
    ids |= {name: first + index for index, name in enumerate(more_added)}
    found["added_tokens"] = [
        {**base, "id": number, "content": name, "special": True, "normalized": False}
        for name, number in ids.items()
    ]
    found["normalizer"], found["pre_tokenizer"] = REPLACE, None
    decoders = [SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if kind == "llama2":
        found["normalizer"] = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
    elif kind in ("mistral", "always"):
        found["normalizer"] = None
        found["pre_tokenizer"] = metaspace("first" if kind == "mistral" else "always")
    if kind != "yi":
        decoders.append(STRIP)
    found["decoder"] = {"type": "Sequence", "decoders": decoders}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    found["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}},
    }
    return found
