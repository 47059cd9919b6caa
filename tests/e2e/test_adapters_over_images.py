"""`triptych serve` with adapters answers about images as PEFT does over Hugging Face's model, in
float32: prompts of equal length, equal greedy tokens, logprobs within 2e-4.

An adapter is served by name or folded into the weights, of the language model alone or of the
vision tower, too.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.e2e.serve_command import ServeCommand, serve_command
from tests.e2e.served_pair import TOLERANCE, Pair, asking, noise, plain, png
from tests.noise import PATIENCE_S

if TYPE_CHECKING:
    from tests.e2e.tiny_video import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

FAMILIES = ("qwen3_vl", "qwen2_vl", "paddleocr_vl", "qwen3_5")
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj|out_proj|in_proj_qkv)"
# Every linear layer, also those of the towers, of all families.
EVERYWHERE = (
    r".*(\.(q|k|v|o|gate|up|down|out)_proj|attn\.qkv|attn\.proj|fc[12]|in_proj_(qkv|z|a|b))"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "language": {"target_modules": LANGUAGE},
    "everywhere": {"target_modules": EVERYWHERE, "use_rslora": True, "r": 3},
}
# Sizes of the changes. With larger ones, logprobs of these families are all zero, or they differ
# from PEFT's by half of the tolerance and more.
SCALES = {"qwen2_vl": 0.15, "qwen3_5": 0.1, "paddleocr_vl": 0.1}
NUM_TOGETHER = 64  # tokens of each answer of a batch; the first of all come before the last of any
PICTURES = [noise(2, *size, 10 + n)[0] for n, size in enumerate(((256, 320), (300, 150)))]
IMAGES = [Image.fromarray(picture) for picture in PICTURES]
PARTS = [{"type": "image_url", "image_url": {"url": png(each)}} for each in PICTURES]
# Long enough that the cache has a state of Qwen3.5's linear attention behind the images.
MESSAGES = [asking(*PARTS, text="What colour is it? " * 40)]


@dataclass
class Family:
    """A tiny checkpoint with adapters.

    Attributes:
        name: name of the family.
        directory: directory with the checkpoint `tiny` and with each adapter under its name.
        model: Hugging Face's model of the checkpoint.
        adapted: PEFT's models, by the names of the adapters.
    """

    name: str
    directory: Path
    model: Any
    adapted: dict[str, Any]

    @classmethod
    def make(cls, name: str, directory: Path, configs: dict[str, dict[str, Any]]) -> "Family":
        from tests.adapters import make_adapter
        from tests.e2e.tiny_video import MAKERS

        model = MAKERS[name](directory / "tiny")
        scale = SCALES.get(name, 0.3)
        adapted = {
            key: make_adapter(model, directory / key, seed, scale=scale, **config)
            for seed, (key, config) in enumerate(configs.items())
        }
        return cls(name, directory, model, adapted)

    def oracle(self, adapter: str | None = None, *, folded: bool = False) -> "Oracle":
        """Returns the oracle of an adapter, or of the base model."""
        from tests.adapters import merged
        from tests.e2e.tiny_video import Oracle
        from tests.parity.rope_index import time_continues

        if adapter is None:
            return Oracle(self.model, self.directory / "tiny")
        found = self.adapted[adapter]
        found = merged(found) if folded else found.base_model.model
        if self.name in ("qwen2_vl", "paddleocr_vl"):
            time_continues(found.model)  # of the copy
        return Oracle(found, self.directory / "tiny")

    def options(self) -> list[str]:
        """Options with which `triptych serve` serves the checkpoint."""
        return ["--model", str(self.directory / "tiny"), "--device", "cpu", "--dtype", "float32"]

    def by_name(self) -> list[str]:
        """Options with which it serves each adapter by its name."""
        return ["--adapter", *(f"{name}={self.directory / name}" for name in self.adapted)]


@pytest.fixture(
    scope="module",
    params=FAMILIES,
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.make(request.param, tmp_path_factory.mktemp(request.param), CONFIGS)


@pytest.fixture
def command(family: Family) -> Iterator[ServeCommand]:
    with serve_command(family.directory, [*family.options(), *family.by_name()]) as command:
        yield command


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_each_name_answers_as_pefts_model(family: Family, command: ServeCommand) -> None:
    """The first answer of a name computes its prompt, and the second one finds it."""
    listed = httpx2.get(f"{command.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    names = {listed[0]["id"]: None} | {name: name for name in family.adapted}
    assert [each["id"] for each in listed] == list(names)
    found = set[tuple[float, ...]]()
    for model, adapter in names.items():
        pair = Pair(family.name, command, family.oracle(adapter))
        first = pair.check(MESSAGES, [], IMAGES, model=model)
        again = pair.check(MESSAGES, [], IMAGES, model=model)
        assert cached(first) == 0 < cached(again)
        content = first["choices"][0]["logprobs"]["content"]
        found.add(tuple(round(each["logprob"], 3) for each in content))
    assert len(found) == len(names)  # control: each adapter changes what is computed


def test_a_folded_adapter_answers_as_pefts_merged_model(family: Family) -> None:
    options = [*family.options(), "--merge-adapter", str(family.directory / "everywhere")]
    with serve_command(family.directory, options) as command:
        oracle = family.oracle("everywhere", folded=True)
        answer = Pair(family.name, command, oracle).check(MESSAGES, [], IMAGES)
        base = family.oracle().answer(plain(MESSAGES), [], IMAGES)[2]
        found = [each["logprob"] for each in answer["choices"][0]["logprobs"]["content"]]
        assert np.abs(np.subtract(found, base)).max() > 10 * TOLERANCE  # control


async def stream(client: httpx2.AsyncClient, model: str) -> tuple[list[float], list[int], list]:
    """Returns the times of an answer's events, its tokens and their logprobs."""
    body = {
        "model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": NUM_TOGETHER,
        "ignore_eos": True, "logprobs": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    times: list[float] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            event = line.removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            for choice in json.loads(event)["choices"]:
                times.append(asyncio.get_running_loop().time())
                tokens += choice.get("token_ids") or []
                logprobs += [
                    e["logprob"] for e in (choice.get("logprobs") or {}).get("content") or []
                ]
    return times, tokens, logprobs


async def test_eight_adapters_of_one_batch_answer_as_pefts_models(tmp_path: Path) -> None:
    parts = [LANGUAGE, EVERYWHERE]
    configs = {
        f"adapter-{n}": {"target_modules": parts[n % 2], "r": n + 1, "use_dora": n in (4, 7)}
        for n in range(8)
    }
    family = Family.make("qwen3_vl", tmp_path, configs)
    with serve_command(tmp_path, [*family.options(), *family.by_name()]) as command:
        async with httpx2.AsyncClient(base_url=command.url, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(stream(client, name) for name in configs))
            # Now all embeddings and prompts are at hand, so that the answers begin together.
            answers = await asyncio.gather(*(stream(client, name) for name in configs))
    started = max(times[0] for times, _, _ in answers)
    assert started < min(times[-1] for times, _, _ in answers), "not all ran together"
    for name, (_, tokens, logprobs) in zip(configs, answers, strict=True):
        meant = family.oracle(name).answer(plain(MESSAGES), [], IMAGES, NUM_TOGETHER)
        assert tokens == meant[1], name
        assert np.abs(np.subtract(logprobs, meant[2])).max() < TOLERANCE, name
    assert len({tuple(tokens) for _, tokens, _ in answers}) == len(configs)
