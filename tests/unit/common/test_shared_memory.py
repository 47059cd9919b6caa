import contextlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.shared_memory import (
    ForeignMemory,
    MemoryAddress,
    NotReadable,
    create_memory,
    host_identity,
)

SPEC = EmbeddingSpec("bfloat16", 1, 100, 8)


@pytest.fixture
def arena():
    arena = Arena(1 << 20)
    yield arena
    with contextlib.suppress(OSError):
        arena.close()


def test_what_the_owner_writes_is_read(arena):
    entry = arena.try_reserve(b"k" * 32, SPEC)
    foreign = ForeignMemory(arena.address)
    with arena.view(entry) as view:
        view[:] = bytes(range(200)) * 8
    assert bytes(foreign.view(entry.offset, SPEC.size_bytes)) == bytes(range(200)) * 8


def test_a_reader_cannot_write(arena):
    with pytest.raises(TypeError, match="read-only"):
        ForeignMemory(arena.address).view(0, 4)[0] = 1


def test_an_opened_memory_outlives_its_owner(arena):
    arena.memory[:4] = b"left"
    foreign = ForeignMemory(arena.address)
    arena.close()
    assert bytes(foreign.view(0, 4)) == b"left"


def test_a_view_outlives_its_memory(arena):
    arena.memory[:4] = b"left"
    view = ForeignMemory(arena.address).view(0, 4)
    assert bytes(view) == b"left"


def test_what_is_mapped_cannot_be_cut_off(arena):
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


@pytest.mark.parametrize(
    "lie", [{"fd": 999_999}, {"pid": 2**22 + 1}, {"name": "triptych-x"}, {"size_bytes": 4096}]
)
def test_an_address_that_is_wrong_is_refused(arena, lie):
    with pytest.raises(NotReadable):
        ForeignMemory(replace(arena.address, **lie))


def test_a_descriptor_given_to_another_memory_is_refused(arena):
    address = arena.address
    arena.memory.close()
    other, _ = create_memory(arena.size_bytes)
    os.dup2(other, arena.fd)
    os.close(other)
    with pytest.raises(NotReadable, match="a different file"):
        ForeignMemory(address)
    os.close(arena.fd)


def test_memory_that_could_be_cut_off_is_refused():
    name = "triptych-unsealed"
    fd = os.memfd_create(name)
    os.ftruncate(fd, 4096)
    with pytest.raises(NotReadable, match="not a memfd"):
        ForeignMemory(MemoryAddress(os.getpid(), fd, name, 4096))
    os.close(fd)


def test_mapping_what_is_resident_makes_nothing_new(arena):
    arena.memory[8192:8196] = b"here"

    def allocated() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    before = allocated()
    assert before < arena.size_bytes // 2
    arena.prefault()
    ForeignMemory(arena.address).prefault()
    assert allocated() == before


def test_processes_of_one_host_agree_on_it():
    code = (
        "from services.common.embeddings.shared_memory import host_identity as h; print(h().hex())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == host_identity().hex()
    assert len(host_identity()) == 16
