"""`triptych serve` with a text model: gateway and decoder alone, answers equal to HF's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.e2e.browser import Page
from tests.e2e.serve_command import ServeCommand, serve_command
from tests.gateway_fixtures import asking, image_url
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import TEXT_CONFIG, vocab_size, write_conversation_files
from triptych.demo import SAMPLES

if TYPE_CHECKING:  # torch and transformers are imported where they are used: see tiny_tower.py
    from tests.parity.oracle import Oracle

pytestmark = pytest.mark.e2e

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many stars are there?"},
]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> "Oracle":
    from tests.parity.text_oracle import Qwen3Config, make_text_oracle

    directory = tmp_path_factory.mktemp("model") / "tiny-qwen3"
    config = Qwen3Config(
        **TEXT_CONFIG, vocab_size=vocab_size(), tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    oracle = make_text_oracle(config, directory)
    write_conversation_files(directory)
    return oracle


@pytest.fixture(scope="module")
def command(oracle: "Oracle", tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    options = ["--model", str(oracle.directory), "--device", "cpu", "--dtype", "float32"]
    options += ["--grpc", "tcp"]
    with serve_command(tmp_path_factory.mktemp("serve"), options) as command:
        yield command


@pytest.fixture(scope="module")
def expected(oracle: "Oracle") -> list[int]:
    """HF's greedy token ids, from HF's rendering of the messages."""
    from transformers import PreTrainedTokenizerFast

    from tests.parity.oracle import Prompt

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(oracle.directory / "tokenizer.json"), eos_token="<|im_end|>"
    )
    prompt = tokenizer.apply_chat_template(
        MESSAGES,
        chat_template=(oracle.directory / "chat_template.jinja").read_text(),
        add_generation_prompt=True,
    )["input_ids"]
    return oracle.generate(Prompt(prompt, [], [], None), NUM_TOKENS)[0]


def chat(command: ServeCommand, **fields: object) -> httpx2.Response:
    body = {
        "model": "tiny-qwen3", "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "logprobs": True, "skip_special_tokens": False, **fields,
    }  # fmt: skip
    return httpx2.post(f"{command.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def not_white_space(expected: list[int]) -> dict[str, int]:
    """The greedy answer is white space alone, which is held back: reasoning may follow it."""
    return {str(token_id): -100 for token_id in expected}


def test_no_encoder_and_no_redis_run(command: ServeCommand) -> None:
    services = command.services()
    assert {"services.gateway", "services.decoder"} <= services.keys()
    assert not any("encoder" in name.replace("decoder", "") or "redis" in name for name in services)
    assert "is a text model" in command.log_path.read_text()


def test_whole_answer_equals_hf_greedy(
    command: ServeCommand, oracle: "Oracle", expected: list[int]
) -> None:
    tokenizer = ModelTokenizer.from_directory(oracle.directory)
    choice = chat(command).json()["choices"][0]
    found = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    assert found == [tokenizer.token_bytes(token_id) for token_id in expected]
    assert choice["finish_reason"] == "length"


def test_streamed_answer_is_the_whole_one(command: ServeCommand, expected: list[int]) -> None:
    sampled = {"logit_bias": not_white_space(expected)}
    whole = chat(command, **sampled).json()["choices"][0]["message"]["content"]
    lines = chat(command, stream=True, **sampled).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    pieces = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert "".join(pieces) == whole
    assert sum(map(bool, pieces)) > 1


def test_an_image_is_refused(command: ServeCommand) -> None:
    response = chat(command, messages=asking(image_url()))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert error["message"].endswith("the model takes no images")


def test_the_page_offers_no_images(
    command: ServeCommand, expected: list[int], browser: Page
) -> None:
    with browser.new_tab() as page:
        page.open(command.url + "/")
        page.wait_for("document.getElementById('model')?.textContent.startsWith('tiny-qwen3')")
        assert page.evaluate("document.getElementById('attach').offsetParent === null")
        assert "image" not in page.evaluate("document.body.innerText")
        page.drop_file("main", SAMPLES / "shapes.png")
        refused = "“shapes.png” was not added: this model reads text only."
        page.wait_for(f"document.getElementById('notice').innerText.includes('{refused}')")
        page.send_with(logit_bias=not_white_space(expected), max_tokens=NUM_TOKENS)
        page.type("#text", "How many stars are there?")
        page.press_enter()
        page.wait_for("document.querySelector('.assistant .bubble')?.textContent.length > 0")
        assert page.evaluate("document.querySelectorAll('main img, #attached img').length") == 0
        assert page.console == []


def test_encoder_options_are_refused(oracle: "Oracle", tmp_path: Path) -> None:
    from triptych import cli

    assert cli.main(["serve", "--model", str(oracle.directory), "--encoders", "1"]) == 2


def test_a_dead_engine_ends_the_stack_and_is_named(command: ServeCommand) -> None:
    """The last of these tests."""
    command.services()["services.decoder.engine_main"].kill()
    assert command.process.wait(PATIENCE_S) != 0
    log = command.log_path.read_text()
    assert "the engine process ended (SIGKILL)" in log
    assert "decoder-0 ended while serving" in log
