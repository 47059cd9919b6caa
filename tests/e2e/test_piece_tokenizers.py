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
from typing import TYPE_CHECKING

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


class Stack:
    """A decoder and a gateway of one checkpoint, and its oracle."""

    def __init__(self, kind: str, directory: Path) -> None:
        from tests.parity.text_oracle import CONFIGS, make_text_oracle

        found = definition(kind, ADDED if kind == "mistral" else ())
        config = CONFIGS["llama-llama3"]()
        config.vocab_size = 704
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
        data = b""
        for token in self.tokenizer().convert_ids_to_tokens(ids):
            if token is None:
                continue  # an id that the vocabulary does not use
            if token.startswith("<0x"):
                data += bytes([int(token[3:5], 16)])
            elif token not in ("<unk>", "<s>", "</s>", *ADDED):
                data += token.replace(SPACE, " ").encode()
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data)

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
    tokenizer = stack.tokenizer()
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


def test_a_stream_has_the_text_of_the_whole_answer(stack: Stack) -> None:
    whole = stack.chat(ignore_eos=True)["choices"][0]["message"]["content"]
    body = {
        "model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    url, text = f"http://{stack.gateway.address}/v1/chat/completions", ""
    with httpx2.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content") or "" if choices else ""
    assert text == whole


def test_a_completion_continues_its_prompt(stack: Stack) -> None:
    prompt = "The quick brown"
    tokens = stack.generate(stack.tokenizer().encode(prompt))
    fields = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answer = stack.post("/v1/completions", echo=True, **fields)["choices"][0]["text"]
    assert answer == prompt + stack.text_of(tokens)


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
