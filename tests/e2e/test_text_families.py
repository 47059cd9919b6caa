"""Each text family through the HTTP API: gateway and decoder processes, no encoder, against HF.

Tokens are equal, and their log-probabilities agree within 5e-4: those of logits that agree within
2e-4 (tests/parity/test_text_families.py).
"""

import asyncio
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.e2e.cluster import Service, wait_until
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import added_ids, vocab_size, write_conversation_files
from triptych.probes import gateway_ready

if TYPE_CHECKING:  # torch and transformers are imported where they are used: see tiny_tower.py
    from torch import Tensor

    from tests.parity.oracle import Oracle

# Every night: tests/parity/test_text_families.py compares their logits, test_text_only_stack.py
# asks a text model through the services.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.slow]

FAMILIES = (
    "qwen3-odd-heads-tied", "qwen2-odd-heads-yarn", "llama-llama3", "mistral-wide-heads",
    "qwen3-moe-odd-heads-dense-between",
)  # fmt: skip
AT_LOAD = "qwen3-moe-odd-heads-dense-between in FP8"  # --quantization fp8
PACKED = {  # → writer of tests, its layout
    "qwen2-odd-heads-yarn in 4 bit": ("packed_checkpoints", "ct-channel-zeros"),
    "llama-llama3 in MXFP8": ("mxfp8_checkpoints", "mxfp8"),
}
BOS = "<|endoftext|>"
NUM_TOKENS = 16
TOLERANCE = 5e-4
CONVERSATIONS = {
    "short": [{"role": "user", "content": "What is a square?"}],
    "longer than the unscaled context": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 8},
        {"role": "assistant", "content": "How many stars are there?"},
        {"role": "user", "content": "A red circle, 中文 and 0123456789."},
    ],
}


@dataclass
class Stack:
    """A decoder and a gateway of one checkpoint, and its oracle."""

    oracle: "Oracle"
    decoder: Service
    gateway: Service

    def chat(self, messages: list[dict[str, str]], **fields: object) -> httpx2.Response:
        body = {
            "model": "tiny", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS,
            "ignore_eos": True, "logprobs": True, "skip_special_tokens": False, **fields,
        }  # fmt: skip
        url = f"http://{self.gateway.address}/v1/chat/completions"
        return httpx2.post(url, json=body, timeout=PATIENCE_S)

    def is_ready(self) -> bool:
        return asyncio.run(gateway_ready(self.gateway.host, self.gateway.port))

    def expected(self, messages: list[dict[str, str]]) -> "tuple[int, list[int], Tensor]":
        """HF's: length of the rendered prompt, greedy tokens, logits that they come from."""
        from transformers import PreTrainedTokenizerFast

        from tests.parity.oracle import Prompt

        directory = self.oracle.directory
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>", bos_token=BOS
        )
        ids = tokenizer.apply_chat_template(
            messages,
            chat_template=(directory / "chat_template.jinja").read_text(),
            add_generation_prompt=True,
        )["input_ids"]
        tokens, logits = self.oracle.generate(Prompt(ids, [], [], None), NUM_TOKENS)
        return len(ids), tokens, logits


@pytest.fixture(scope="module", params=[*FAMILIES, *PACKED, AT_LOAD])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    from tests.parity.text_oracle import CONFIGS, make_text_oracle

    directory = tmp_path_factory.mktemp("stack")
    config = CONFIGS[request.param.partition(" in ")[0]]()
    config.vocab_size = vocab_size()
    oracle = make_text_oracle(config, directory / "model")
    if request.param in PACKED:
        oracle = packed(oracle, *PACKED[request.param])
    if request.param == AT_LOAD:
        round_to_fp8(oracle)
    write_conversation_files(oracle.directory)
    if request.param.startswith("llama"):
        write_bos(oracle.directory)
    decoder = Service(
        "decoder", directory / "decoder.log", model=oracle.directory, device="cpu",
        dtype="float32", kv_cache_bytes=32 << 20,
        quantization="fp8" if request.param == AT_LOAD else "",
    )  # fmt: skip
    gateway = Service(
        "gateway", directory / "gateway.log", model=oracle.directory, served_model_name="tiny",
        decoder_addresses=decoder.address,
    )  # fmt: skip
    stack = Stack(oracle, decoder, gateway)
    try:
        decoder.start()
        gateway.start()
        wait_until(stack.is_ready, 120.0, "the gateway is ready")
        yield stack
    finally:
        gateway.stop()
        decoder.stop()


def packed(oracle: "Oracle", writer: str, layout: str) -> "Oracle":
    """The model quantized, and Hugging Face's with the weights that are meant."""
    from tests.parity.oracle import Oracle

    directory = oracle.directory.with_name(layout)
    write = importlib.import_module(f"tests.{writer}").write
    meant = write(oracle.directory, directory, layout)
    missing, unexpected = oracle.model.load_state_dict(meant, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return Oracle(directory, oracle.model, oracle.spec)


def round_to_fp8(oracle: "Oracle") -> None:
    """Hugging Face's model gets what weights are after quantization, expert by expert."""
    from tests.fp8_checkpoints import quantize, unpack

    block = (1, None)
    for name, parameter in oracle.model.named_parameters():
        is_left = "layers" not in name or name.endswith("mlp.gate.weight") or parameter.dim() < 2
        for matrix in [] if is_left else parameter.data.view(-1, *parameter.shape[-2:]):
            matrix.copy_(unpack(*quantize(matrix, block), block))


def write_bos(directory: Path) -> None:
    """A template that writes BOS itself, as Llama's does."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": BOS}))
    path = directory / "chat_template.jinja"
    path.write_text("{{- bos_token }}" + path.read_text())


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_answers_equal_hf_greedy(stack: Stack, messages: list[dict[str, str]]) -> None:
    length, tokens, logits = stack.expected(messages)
    answer = stack.chat(messages).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == length
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    token_bytes = ModelTokenizer.from_directory(stack.oracle.directory).token_bytes
    assert [bytes(entry["bytes"]) for entry in entries] == list(map(token_bytes, tokens))
    expected = logits.float().log_softmax(-1)
    for index, entry in enumerate(entries):
        assert entry["logprob"] == pytest.approx(
            float(expected[index, tokens[index]]), abs=TOLERANCE
        )


def test_an_end_of_sequence_token_ends_an_answer(stack: Stack) -> None:
    """One that only generation_config.json lists: the second of its two."""
    messages = CONVERSATIONS["short"]
    bias = {str(added_ids()["<|endoftext|>"]): 100}
    answer = stack.chat(messages, ignore_eos=False, logit_bias=bias).raise_for_status().json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
