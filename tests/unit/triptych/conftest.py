"""Fixtures of the command line's tests."""

from collections.abc import Iterator

import pytest

from tests.unit.triptych.stub_server import StubServer, running_stub


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with running_stub() as server:
        yield server
