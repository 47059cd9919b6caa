"""The decoder's table of adapters: names, slots, and sequences that outlive an unloading."""

import asyncio
import gc
import json
from pathlib import Path

import pytest

from services.common.errors import EngineLost, InvalidRequest, ModelNotFound, Unavailable
from services.decoder.engine.messages import AdapterLoaded, LoadAdapter
from services.decoder.front.adapter_table import AdapterTable, named_digest, salted


class Engine:
    """A channel to an engine that answers when it is asked to."""

    def __init__(self) -> None:
        self.messages: list[LoadAdapter] = []

    def send(self, message: LoadAdapter) -> None:
        self.messages.append(message)


def write(directory: Path, content: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "bias": "none"})
    )
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


async def loaded(
    table: AdapterTable, engine: Engine, name: str, path: Path, error: str = "", **options: bool
):
    """Loads an adapter while the engine answers."""
    count = len(engine.messages)
    task = asyncio.create_task(table.load(name, str(path), **options))
    while len(engine.messages) == count and not task.done():
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
    while not task.done():
        for message in engine.messages[count:]:  # a slot may be emptied before
            table.answered(AdapterLoaded(error if message.directory else ""))
        count = len(engine.messages)
        await asyncio.sleep(0)
    await task


async def test_an_unloaded_adapter_keeps_its_slot_until_its_last_sequence_ends(tmp_path):
    engine = Engine()
    first, second = write(tmp_path / "a"), write(tmp_path / "b", b"others")
    table = AdapterTable({"one": first}, 1, engine)  # type: ignore[arg-type]
    (described,) = table.described()
    assert (described.name, described.root) == ("one", str(first))
    assert described.digest == named_digest("one", first) != named_digest("two", first)
    used = table.take(described.digest)
    assert used is not None and used.slot == 0 and table.take(b"") is None
    assert table.described()[0].num_waiting == 1
    table.started(used)
    assert table.described()[0].num_waiting == 0
    table.release(table.take(described.digest))  # a sequence that ends before its first token
    assert table.described()[0].num_waiting == 0
    await table.unload("one")
    assert not table.described() and not engine.messages
    with pytest.raises(Unavailable):
        table.take(described.digest)
    with pytest.raises(InvalidRequest, match="all slots"):
        await table.load("two", str(second))
    table.release(used, had_started=True)
    assert engine.messages == [LoadAdapter(0, "")]
    table.answered(AdapterLoaded())
    await loaded(table, engine, "two", second)
    assert engine.messages[-1] == LoadAdapter(0, str(second))
    assert [each.name for each in table.described()] == ["two"]
    with pytest.raises(ModelNotFound):
        await table.unload("one")


async def test_what_the_engine_refuses_leaves_the_slot_free(tmp_path):
    engine, path = Engine(), write(tmp_path / "a")
    table = AdapterTable({}, 1, engine)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="rank 64"):
        await loaded(table, engine, "one", path, "has rank 64")
    assert not table.described()
    await loaded(table, engine, "one", path)
    await table.load("one", str(path))  # a repeated call of another gateway
    with pytest.raises(InvalidRequest, match="already been loaded"):
        await table.load("one", str(write(tmp_path / "b", b"others")))
    malformed = write(tmp_path / "malformed")
    (malformed / "adapter_config.json").write_text("this is not json")
    for name, directory, message in (
        ("a b", str(path), "the name"),
        ("x", "relative", "absolute"),
        ("x", str(tmp_path), "no adapter at"),
        ("x", str(tmp_path / "none"), "there is no directory"),
        ("x", str(malformed), "JSON"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            await table.load(name, directory)


async def test_an_adapter_takes_the_place_of_one_of_its_name(tmp_path):
    engine, path = Engine(), write(tmp_path / "a")
    table = AdapterTable({"one": path}, 2, engine)  # type: ignore[arg-type]
    used = table.take(named_digest("one", path))
    assert used is not None
    second, third = write(tmp_path / "b", b"second"), write(tmp_path / "c", b"third")
    with pytest.raises(InvalidRequest, match="rank 64"):  # the former one stays
        await loaded(table, engine, "one", second, "has rank 64", load_inplace=True)
    assert [each.digest for each in table.described()] == [used.digest]
    await loaded(table, engine, "one", second, load_inplace=True)
    assert [each.root for each in table.described()] == [str(second)]
    # A sequence has the first one still. The second one has none, and yields its slot.
    await loaded(table, engine, "one", third, load_inplace=True)
    assert [each.root for each in table.described()] == [str(third)]
    assert engine.messages[-2:] == [LoadAdapter(1, ""), LoadAdapter(1, str(third))]
    table.take(named_digest("one", third))
    with pytest.raises(InvalidRequest, match="all slots"):
        await table.load("one", str(path.parent / "b"), load_inplace=True)
    table.release(used)
    assert engine.messages[-1] == LoadAdapter(0, "")


async def test_an_adapter_that_is_loaded_again_while_it_leaves_stays(tmp_path):
    engine, path = Engine(), write(tmp_path / "a")
    table = AdapterTable({"one": path}, 1, engine)  # type: ignore[arg-type]
    used = table.take(named_digest("one", path))
    await table.unload("one")
    await table.load("one", str(path))
    table.release(used)
    assert table.described() and not engine.messages


def test_salts_differ_by_adapter_and_by_tenant(tmp_path):
    table = AdapterTable(
        {"one": write(tmp_path / "a"), "two": write(tmp_path / "b")},
        2,
        Engine(),  # type: ignore[arg-type]
    )
    adapters = [table.take(each.digest) for each in table.described()]
    salts = {salted(tenant, each) for tenant in (b"", b"t") for each in (None, *adapters)}
    assert len(salts) == 6


async def test_a_call_that_is_given_up_leaves_the_slot_free(tmp_path):
    engine, path = Engine(), write(tmp_path / "a")
    table = AdapterTable({}, 1, engine)  # type: ignore[arg-type]
    task = asyncio.create_task(table.load("one", str(path)))
    while not engine.messages:  # noqa: ASYNC110 - a list of a fake
        await asyncio.sleep(0.001)
    task.cancel()  # as gRPC does when the caller's time is over
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.messages == [LoadAdapter(0, str(path)), LoadAdapter(0, "")]
    for _ in engine.messages:
        table.answered(AdapterLoaded())
    assert not table.described()
    await loaded(table, engine, "two", path)
    assert [each.name for each in table.described()] == ["two"]


async def test_an_engine_that_ends_before_it_has_emptied_a_slot_is_no_error_of_its_own(tmp_path):
    problems: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    table = AdapterTable({"one": write(tmp_path / "a")}, 1, Engine())  # type: ignore[arg-type]
    await table.unload("one")
    table.close(EngineLost("the engine has ended"))
    await asyncio.sleep(0)
    del table
    gc.collect()
    assert not problems
