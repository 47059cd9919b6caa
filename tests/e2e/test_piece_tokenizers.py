"""Models with SentencePiece tokenizers through the HTTP API, against Hugging Face.

The models have random weights, so their answers have bytes that are no UTF-8. transformers writes
U+FFFD for each byte of a run of byte tokens that is not UTF-8 as a whole. Triptych has written the
characters before the wrong byte by then, and writes one U+FFFD for each wrong sequence.
"""

import asyncio
import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.e2e.cluster import Service, wait_until
from tests.noise import PATIENCE_S
from tests.piece_tokenizers import SPACE, definition
from triptych.probes import gateway_ready

if TYPE_CHECKING:  # torch and transformers are imported where they are used: see tiny_tower.py
    from transformers import PreTrainedTokenizerFast

    from tests.parity.oracle import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.slow]

ADDED = ("[INST]", "[/INST]")
SPECIAL = ("<unk>", "<s>", "</s>", *ADDED)
TOLERANCE = 5e-4  # of logprobs, as in test_text_families.py
# Llama 2 writes `[INST]` as text, Mistral as an added token.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "[INST] {{ message['content'] | trim }} [/INST]{% else %}"
    " {{ message['content'] | trim }}{% if not loop.last %}{{ eos_token }}{% endif %}"
    "{% endif %}{% endfor %}"
)
NUM_TOKENS = 24
MESSAGES = [
    {"role": "user", "content": "What is in the picture? 漢字 🙂 naïve <s>"},
    {"role": "assistant", "content": "A red circle."},
    {"role": "user", "content": "  and the fox?"},
]


def decoded(parts: list[bytes]) -> str:
    """Returns the characters that parts of a text complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(parts))


class Stack:
    """A decoder and a gateway of one checkpoint, and its oracle."""

    def __init__(self, kind: str, directory: Path) -> None:
        from tests.parity.text_oracle import CONFIGS, make_text_oracle

        found = definition(kind, ADDED if kind == "mistral" else ())
        config = CONFIGS["llama-llama3"]()
        config.vocab_size, config.bos_token_id, config.eos_token_id = 704, 1, 2
        self.oracle: Oracle = make_text_oracle(config, directory / "model")
        model = self.oracle.directory
        (model / "tokenizer.json").write_text(json.dumps(found))
        names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
        (model / "tokenizer_config.json").write_text(json.dumps(names))
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
        self.decoder = Service(
            "decoder", directory / "decoder.log", model=model, device="cpu", dtype="float32",
            kv_cache_bytes=32 << 20,
        )  # fmt: skip
        self.gateway = Service(
            "gateway", directory / "gateway.log", model=model, served_model_name="tiny",
            decoder_addresses=self.decoder.address,
        )  # fmt: skip

    def post(self, path: str, **fields: object) -> dict:
        body = {"model": "tiny", **fields}
        url = f"http://{self.gateway.address}{path}"
        return httpx2.post(url, json=body, timeout=PATIENCE_S).raise_for_status().json()

    def chat(self, **fields: object) -> dict:
        given = {"messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS, **fields}
        return self.post("/v1/chat/completions", **given)

    def is_ready(self) -> bool:
        return asyncio.run(gateway_ready(self.gateway.host, self.gateway.port))

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_file=str(self.oracle.directory / "tokenizer.json"),
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            clean_up_tokenization_spaces=False,
        )

    def text_of(self, ids: list[int]) -> str:
        """Returns the text of tokens without special ones, before a space at its beginning is cut.

        Equal to transformers' text if all bytes are UTF-8 (tests/unit/gateway).
        """
        return decoded(self.bytes_of(ids, with_added=False))

    def bytes_of(self, ids: list[int], *, with_added: bool = True) -> list[bytes]:
        """Returns the bytes of each token. An id that the vocabulary does not use has none."""
        found: list[bytes] = []
        for token in self.tokenizer().convert_ids_to_tokens(ids):
            if token is None or (token in SPECIAL and not with_added):
                found.append(b"")
            elif token.startswith("<0x"):
                found.append(bytes.fromhex(token[3:5]))
            else:
                found.append(token.replace(SPACE, " ").encode())
        return found

    def generate(self, ids: list[int], count: int = NUM_TOKENS) -> list[int]:
        """Returns the greedy tokens of transformers."""
        from tests.parity.oracle import Prompt

        return self.oracle.generate(Prompt(ids, [], [], None), count)[0]


@pytest.fixture(scope="module", params=["llama2", "mistral"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    stack = Stack(request.param, tmp_path_factory.mktemp(request.param))
    try:
        stack.decoder.start()
        stack.gateway.start()
        wait_until(stack.is_ready, 120.0, "the gateway is ready")
        yield stack
    finally:
        stack.gateway.stop()
        stack.decoder.stop()


def test_prompts_and_answers_equal_those_of_transformers(stack: Stack) -> None:
    """The `<s>` in the first message is text for us, so the oracle's prompt has none."""
    tokenizer: Any = stack.tokenizer()
    messages = [{**m, "content": m["content"].replace(" <s>", "")} for m in MESSAGES]
    ids = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE)["input_ids"]
    answer = stack.chat(messages=messages, ignore_eos=True, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids
    tokens = stack.generate(ids)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == tokens
    assert choice["message"]["content"] == stack.text_of(tokens).removeprefix(" ")
    marked = stack.chat(return_token_ids=True)["prompt_token_ids"]
    assert marked.count(1) == ids.count(1), "the name of an added token is text"


def test_a_stream_has_the_text_and_the_logprobs_of_the_whole_answer(stack: Stack) -> None:
    whole = stack.chat(ignore_eos=True, logprobs=True)["choices"][0]
    body = {
        "model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "logprobs": True, "stream": True,
    }  # fmt: skip
    url, text, entries = f"http://{stack.gateway.address}/v1/chat/completions", "", []
    with httpx2.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    entries += (choice.get("logprobs") or {}).get("content") or ()
    assert text == whole["message"]["content"]
    assert names_of(entries) == names_of(whole["logprobs"]["content"])


def names_of(entries: list[dict]) -> list[tuple[str, list[int]]]:
    return [(entry["token"], entry["bytes"]) for entry in entries]


def test_logprobs_equal_those_of_transformers(stack: Stack) -> None:
    from tests.parity.oracle import Prompt

    answer = stack.chat(ignore_eos=True, logprobs=True, top_logprobs=2, return_token_ids=True)
    prompt = Prompt(answer["prompt_token_ids"], [], [], None)
    tokens, logits = stack.oracle.generate(prompt, NUM_TOKENS)
    (choice,), expected = answer["choices"], logits.float().log_softmax(-1)
    entries = choice["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == stack.bytes_of(tokens)
    for entry, values in zip(entries, expected, strict=True):
        assert entry["logprob"] == pytest.approx(float(values.max()), abs=TOLERANCE)
        top, places = values.topk(2)
        assert [found["logprob"] for found in entry["top_logprobs"]] == pytest.approx(
            top.tolist(), abs=TOLERANCE
        )
        assert [bytes(found["bytes"]) for found in entry["top_logprobs"]] == stack.bytes_of(
            places.tolist()
        )


def with_logprobs(stack: Stack, **fields: object) -> tuple[str, list[bytes]]:
    """Returns an answer's text, and the bytes of its tokens, of which the logprobs have a copy."""
    (choice,) = stack.chat(logprobs=True, return_token_ids=True, **fields)["choices"]
    if choice["finish_reason"] == "stop":
        assert choice["token_ids"].pop() == 2, "the end token has no entry"
    data = stack.bytes_of(choice["token_ids"])
    names = [(part.decode(errors="replace"), list(part)) for part in data]
    assert names_of(choice["logprobs"]["content"]) == names
    return choice["message"]["content"] or "", data


def test_the_bytes_of_logprobs_are_those_of_the_answer(stack: Stack) -> None:
    text, data = with_logprobs(stack, ignore_eos=True)
    data = [part for part in data if part.decode(errors="replace") not in SPECIAL]
    assert text == decoded(data).removeprefix(" ") and "\ufffd" in text


def test_the_bytes_of_logprobs_have_the_blank_before_an_answer(stack: Stack) -> None:
    number = stack.tokenizer().convert_tokens_to_ids("▁an")
    text, data = with_logprobs(stack, ignore_eos=True, logit_bias={str(number): 100})
    assert data == [b" an"] * NUM_TOKENS and text == "an" + " an" * (NUM_TOKENS - 1)


def test_a_character_of_several_tokens_has_its_bytes_in_logprobs(stack: Stack) -> None:
    wanted = "the 漢字 🙂 naïve  fox"
    text, data = with_logprobs(stack, structured_outputs={"choice": [wanted]}, max_tokens=100)
    assert text == wanted == b"".join(data).decode()
    assert "🙂".encode()[:1] in data and "漢".encode()[2:] in data


@pytest.mark.parametrize("is_skipped", [True, False])
def test_the_bytes_of_a_special_token_are_its_name(stack: Stack, is_skipped: bool) -> None:
    bias = {"ignore_eos": True, "logit_bias": {"2": 100}}
    text, data = with_logprobs(stack, skip_special_tokens=is_skipped, **bias)
    assert data == [b"</s>"] * NUM_TOKENS
    assert text == ("" if is_skipped else "</s>" * NUM_TOKENS)


@pytest.mark.parametrize("is_special", [False, True], ids=["", "special tokens as text"])
@pytest.mark.parametrize("echo", [False, True], ids=["", "echo"])
def test_a_completion_continues_its_prompt(stack: Stack, echo: bool, is_special: bool) -> None:
    """Its logprobs name the tokens and their places: those of the prompt's tokens as transformers
    has them, those of the answer's by the characters that the tokens before complete.
    """
    tokenizer, prompt = stack.tokenizer(), "The quick 漢字</s> brown 🙂"
    encoded = tokenizer(prompt, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    fields: dict = {"logit_bias": {"2": 100}, "skip_special_tokens": False} if is_special else {}
    (choice,) = stack.post(
        "/v1/completions", prompt=prompt, echo=echo, logprobs=1, temperature=0,
        max_tokens=NUM_TOKENS, ignore_eos=True, **fields,
    )["choices"]  # fmt: skip
    tokens = [2] * NUM_TOKENS if is_special else stack.generate(ids)
    in_text = stack.bytes_of(tokens, with_added=is_special)
    beginning = prompt if echo else ""
    assert choice["text"] == beginning + decoded(in_text)
    found = choice["logprobs"]
    data = stack.bytes_of([*ids, *tokens] if echo else tokens)
    assert found["tokens"] == [part.decode(errors="replace") for part in data]
    expected = [first for first, _ in encoded["offset_mapping"]] if echo else []
    expected += [len(beginning + decoded(in_text[:count])) for count in range(NUM_TOKENS)]
    assert found["text_offset"] == expected
    tops = zip(found["tokens"], found["top_logprobs"], strict=True)
    assert all(top is None or token in top for token, top in tops)


def test_answers_obey_grammars(stack: Stack) -> None:
    schema = {
        "type": "object", "required": ["name", "age"], "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99},
        },
    }  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(6):
        answer = stack.chat(
            response_format=wanted, temperature=1.5, seed=seed, max_tokens=200
        )["choices"][0]  # fmt: skip
        assert answer["finish_reason"] == "stop"
        found = json.loads(answer["message"]["content"])
        assert set(found) == {"name", "age"} and len(found["name"]) <= 8 and found["age"] <= 99
    chosen = stack.chat(structured_outputs={"choice": ["naïve 漢", "булок"]}, temperature=1.0)
    assert chosen["choices"][0]["message"]["content"] in ("naïve 漢", "булок")


def test_tokenize_and_detokenize(stack: Stack) -> None:
    tokenizer, text = stack.tokenizer(), "  the fox 漢字"
    found = stack.post("/tokenize", prompt=text, add_special_tokens=True, return_token_strs=True)
    assert found["tokens"] == tokenizer.encode(text)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    for ids in (found["tokens"], found["tokens"][1:]):
        assert stack.post("/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids)
