"""vLLM's server tests about adapters, asked of our server: tests/entrypoints/serve/lora.

The cases are those of vLLM's `test_lora_adapters.py`, in its order and with its names, by OpenAI's
client. Where an answer of ours differs, the case says why. The model is a tiny text model, and the
adapters are random: a case that looks at text compares answers with each other.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serve_command import ServeCommand, serve_command
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import TEXT_CONFIG, vocab_size, write_conversation_files

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]

MODEL = "tiny-qwen3"
PROMPTS = ["Hello there", "Foo bar bazz buzz"]
# Twelve, because each adapter that is loaded has a slot: none is swapped to make room.
SLOTS = 12


def write_adapter(directory: Path, seed: int, *, has_head: bool = False, **config: Any) -> Path:
    """Writes a random adapter for the tiny model that changes each answer.

    Args:
        directory: directory of the adapter, which is made.
        seed: seed of its values.
        has_head: True if its file has an output head.
        config: options of the adapter.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    hidden, rank = TEXT_CONFIG["hidden_size"], 4
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(TEXT_CONFIG["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        size = TEXT_CONFIG["intermediate_size"]
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
    if has_head:
        head = torch.randn(vocab_size(), hidden, generator=generator)
        tensors["base_model.model.lm_head.weight"] = head
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(options | config))
    return directory


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of adapters, and of one that is not valid."""
    folder = tmp_path_factory.mktemp("adapters")
    invalid = folder / "invalid"
    invalid.mkdir()
    (invalid / "adapter_config.json").write_text("this is not json")
    found = {name: write_adapter(folder / name, n) for n, name in enumerate(("one", "two"))}
    return found | {"invalid": invalid}


@pytest.fixture(scope="module")
def command(
    places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeCommand]:
    from tests.parity.text_oracle import Qwen3Config, make_text_oracle

    directory = tmp_path_factory.mktemp("model") / MODEL
    given: dict[str, Any] = {**TEXT_CONFIG, "vocab_size": vocab_size(), "bos_token_id": None}
    given |= {"tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": None}
    config = Qwen3Config(**given)
    make_text_oracle(config, directory)
    write_conversation_files(directory)
    options = ["--model", str(directory), "--device", "cpu", "--dtype", "float32", "--grpc", "tcp"]
    options += ["--adapter", f"tiny-lora={places['one']}"]
    options += ["--max-adapters", str(SLOTS), "--max-adapter-rank", "64"]
    with serve_command(tmp_path_factory.mktemp("serve"), options) as command:
        yield command


@pytest.fixture
async def client(command: ServeCommand) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client, after whose test the adapters that the test has loaded are unloaded."""
    url = f"{command.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
        yield client
        for model in (await client.models.list()).data[1:]:
            if model.id != "tiny-lora":
                body = {"lora_name": model.id}
                await client.post("unload_lora_adapter", cast_to=str, body=body)


async def load(client: openai.AsyncOpenAI, name: str, path: object, **more: bool) -> str:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await client.post("load_lora_adapter", cast_to=str, body=body)


async def complete(client: openai.AsyncOpenAI, name: str, **more: Any) -> list[str]:
    made = await client.completions.create(
        model=name, prompt=PROMPTS, max_tokens=5, temperature=0, **more
    )
    return [choice.text for choice in made.choices]


async def test_static_lora_lineage(client: openai.AsyncOpenAI, places: dict[str, Path]) -> None:
    """The `root` is a name, because clients learn no paths of the decoders' file system."""
    served, *adapters = (await client.models.list()).data
    assert served.id == MODEL and served.model_dump()["parent"] is None
    (adapter,) = (each.model_dump() for each in adapters)
    assert (adapter["id"], adapter["parent"]) == ("tiny-lora", MODEL)
    assert served.model_dump()["root"] == MODEL and adapter["root"] == "tiny-lora"
    assert str(places["one"]) not in json.dumps(adapter)


async def test_dynamic_lora_lineage(client: openai.AsyncOpenAI, places: dict[str, Path]) -> None:
    assert "success" in await load(client, "tiny-lora-3", places["one"])
    found = (await client.models.list()).data[-1].model_dump()
    assert (found["id"], found["root"], found["parent"]) == ("tiny-lora-3",) * 2 + (MODEL,)


async def test_load_lora_adapter_with_same_name_replaces_inplace(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    await load(client, "first", places["one"])
    await load(client, "second", places["two"])
    meant = [await complete(client, name) for name in ("first", "second")]
    assert meant[0] != meant[1] != await complete(client, MODEL)
    assert "success" in (await load(client, "replaceable", places["one"])).lower()
    assert await complete(client, "replaceable") == meant[0]
    replaced = await load(client, "replaceable", places["two"], load_inplace=True)
    assert "success" in replaced.lower()
    assert await complete(client, "replaceable") == meant[1]


async def test_load_lora_adapter_with_load_inplace_false_errors(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    await load(client, "loaded", places["one"])
    with pytest.raises(openai.BadRequestError, match="already been loaded"):
        await load(client, "loaded", places["one"])


async def test_dynamic_lora_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await load(client, "notfound", "/not/an/adapter")


async def test_dynamic_lora_invalid_files(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    """vLLM answers 500. The files are the caller's, so that the answer is a 400 here."""
    with pytest.raises(openai.BadRequestError):
        await load(client, "invalid-json", places["invalid"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 1024}, "rank 1024 is not supported"),
        # DoRA is served here. The file of this adapter has no magnitudes.
        ({"use_dora": True}, "use_dora and the magnitudes in the file differ"),
        # A head in `modules_to_save` is served here, and vLLM refuses each of them.
        ({"modules_to_save": ["lm_head"], "has_head": True}, None),
        ({"modules_to_save": ["lm_head"]}, "no tensor of lm_head, which modules_to_save names"),
    ],
    ids=["test_rank", "test_dora", "test_modules_to_save", "a head that the file lacks"],
)
async def test_dynamic_lora_badrequests(
    client: openai.AsyncOpenAI, tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    """vLLM answers 500, as to invalid files."""
    changed = write_adapter(tmp_path / "changed", 0, **change)
    if message is None:
        assert "success" in await load(client, "changed", changed)
        return
    with pytest.raises(openai.BadRequestError, match=message):
        await load(client, "changed", changed)


async def test_multiple_lora_adapters(client: openai.AsyncOpenAI, places: dict[str, Path]) -> None:
    """vLLM has two slots and swaps ten adapters in and out. Each has its own slot here."""

    async def load_and_run(name: str) -> list[list[str]]:
        await load(client, name, places["one"])
        return [await complete(client, name) for _ in range(3)]

    meant = await complete(client, "tiny-lora")
    found = await asyncio.gather(*(load_and_run(f"adapter_{number}") for number in range(10)))
    assert found == [[meant] * 3] * 10


async def test_loading_invalid_adapters_does_not_break_others(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    meant, done = await complete(client, "tiny-lora"), asyncio.Event()
    results: list[list[str]] = []

    async def run_good_requests() -> None:
        while not (done.is_set() and results):
            results.append(await complete(client, "tiny-lora"))

    async with asyncio.TaskGroup() as group:
        group.create_task(run_good_requests())
        for _ in range(25):
            with pytest.raises(openai.NotFoundError):
                await load(client, "notfound", "/not/an/adapter")
            with pytest.raises(openai.BadRequestError):
                await load(client, "invalid", places["invalid"])
        done.set()
    assert all(result == meant for result in results)
    await load(client, "valid", places["one"])
    assert await complete(client, "valid") == meant


async def test_beam_search_with_lora_adapters(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    """Beam search is not served, with an adapter or without. vLLM's case passes with any answer."""
    await load(client, "adapter_0", places["one"])
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        await complete(client, "adapter_0", extra_body={"use_beam_search": True})


async def test_unloading_with_streams_running_loses_none(
    client: openai.AsyncOpenAI, places: dict[str, Path]
) -> None:
    """Not vLLM's. A slot that a stream still needs gets no other adapter."""
    names = {"first": places["one"], "second": places["two"]}
    for name, place in names.items():
        await load(client, name, place)
    options: dict[str, Any] = {
        "max_tokens": 800,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    meant = {
        name: (await client.completions.create(model=name, prompt=PROMPTS[0], **options))
        .choices[0]
        .text
        for name in (*names, MODEL)
    }
    assert len(set(meant.values())) == 3
    running, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def stream(name: str) -> str:
        made = await client.completions.create(
            model=name, prompt=PROMPTS[0], stream=True, **options
        )
        text, reason = "", None
        async for chunk in made:
            text, reason = text + chunk.choices[0].text, chunk.choices[0].finish_reason
            running.release()
            await go_on.wait()
        assert reason == "length"
        return text

    asked = [*names, MODEL] * 3
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream(name)) for name in asked]
        for _ in asked:
            await running.acquire()
        for name in names:
            await client.post("unload_lora_adapter", cast_to=str, body={"lora_name": name})
            with pytest.raises(openai.NotFoundError):
                await complete(client, name)
        assert "success" in await load(client, "first", places["two"])  # another one of that name
        assert await complete(client, "first") != meant["first"]
        go_on.set()
    assert [each.result() for each in streams] == [meant[name] for name in asked]


async def test_no_prefix_is_shared_by_adapters(client: openai.AsyncOpenAI) -> None:
    """Not vLLM's. Each order has a salt of its own, within which nothing was computed before it."""
    prompt = "What does a prompt of several blocks say about the cache? " * 4

    async def ask(name: str, salt: str) -> tuple[bool, str]:
        made = await client.completions.create(
            model=name, prompt=prompt, max_tokens=8, temperature=0,
            extra_body={"cache_salt": salt, "ignore_eos": True},
        )  # fmt: skip
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        return bool(made.usage.prompt_tokens_details.cached_tokens), made.choices[0].text

    first, other = (MODEL, "tiny-lora", MODEL), ("tiny-lora", MODEL, "tiny-lora")
    answers = [[await ask(name, "".join(names)) for name in names] for names in (first, other)]
    assert [[is_hit for is_hit, _ in each] for each in answers] == [[False, False, True]] * 2
    (base, adapter, again), (one, two, three) = ([text for _, text in each] for each in answers)
    assert base == again == two != adapter == one == three
