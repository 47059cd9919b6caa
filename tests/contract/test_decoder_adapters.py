"""A decoder's prefix cache: no hit crosses adapters or tenants, and each of them hits its own."""

import json
from pathlib import Path

import pytest

from services.common.pb import decoder_pb2 as pb
from tests.decoder_service_harness import Decoder, Gateway, prompt_of, submit_of, until
from tests.fake_runner import add_message, expected_tokens

PROMPT = prompt_of(1, 21)
CACHED = 20  # five blocks of four tokens
TENANTS = (b"", b"tenant", b"other")
NAMES = ("", "gui", "sql")  # of adapters in the slots 0 and 1; empty: the base model


def write(directory: Path) -> Path:
    directory.mkdir()
    config = {"peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def alone(name: str) -> list[int]:
    """The answer of a decoder that has computed nothing else."""
    adapter = NAMES.index(name) - 1
    return expected_tokens(add_message(1, PROMPT, adapter=adapter, max_tokens=8, seed=1), 256)[0]


class Asking:
    """A decoder with two adapters, and a gateway that asks it for one answer after another."""

    def __init__(self, decoder: Decoder, gateway: Gateway) -> None:
        self._decoder, self._gateway, self._count = decoder, gateway, 0
        described = decoder.front.adapters.described()
        self._digests = {"": b""} | {each.name: each.digest for each in described}

    async def ask(self, name: str, tenant: bytes = b"") -> tuple[int, list[int]]:
        """Returns the number of prompt tokens that were found in the cache, and the answer."""
        self._count += 1
        submit = submit_of(self._count, PROMPT)
        submit.adapter, submit.cache_salt = self._digests[name], tenant
        await self._gateway.submit(submit)
        assert isinstance(await self._gateway.end(self._count), pb.Finished)
        await until(self._decoder.is_idle)  # so that all of its blocks can be found
        started = self._gateway.starts[self._count]
        return started.num_cached_tokens, self._gateway.tokens[self._count]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    return {name: write(tmp_path / name) for name in NAMES[1:]}


@pytest.mark.parametrize("names", [("", "gui", "", "gui"), ("gui", "", "gui", ""), ("sql", "gui")])
async def test_no_hit_crosses_adapters(places: dict[str, Path], names: tuple[str, ...]) -> None:
    """Not from the base model to an adapter, not back, and not from one adapter to another."""
    async with Decoder(adapters=places) as decoder, Gateway(decoder) as gateway:
        asking, asked = Asking(decoder, gateway), set[str]()
        for name in names:
            assert await asking.ask(name) == (CACHED if name in asked else 0, alone(name))
            asked.add(name)
    assert len({tuple(alone(name)) for name in NAMES}) == len(NAMES)


async def test_no_hit_crosses_tenants_of_one_adapter(places: dict[str, Path]) -> None:
    async with Decoder(adapters=places, num_blocks=128) as decoder, Gateway(decoder) as gateway:
        asking = Asking(decoder, gateway)
        for cached in (0, CACHED):
            for name in NAMES:
                for tenant in TENANTS:
                    assert await asking.ask(name, tenant) == (cached, alone(name))
