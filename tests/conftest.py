"""For all tests."""

import functools
import gc
import sys
from collections.abc import Iterator

import httpcore2
import pytest
from hypothesis import settings

from tests.cases import THOROUGH
from tests.noise import PATIENCE_S

# An example may have to wait for a core. The examples of `make test` are always the same, so that
# it needs no luck. Those of `make nightly` are new ones each time.
settings.register_profile("patient", deadline=None, derandomize=not THOROUGH)
settings.load_profile("patient")

gc.disable()  # until all is imported and collected: millions of objects, none of them garbage

# Reading the list of authorities takes a client 30 ms. Those of tests share what was read once.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# Timeouts of the clients of Redis in tests, by module and name.
_REDIS_TIMEOUTS_S = {
    ("services.common.embeddings.embedding_cache", "_CONNECT_TIMEOUT_S"): PATIENCE_S,
    ("services.common.embeddings.embedding_cache", "_WRITE_TIMEOUT_S"): PATIENCE_S,
    ("services.gateway.batches.redis_state", "_CONNECT_TIMEOUT_S"): PATIENCE_S,
    ("services.gateway.redis_entry_store", "_TIMEOUT_S"): 5.0,  # a test waits for its end
    ("services.gateway.tenancy.lease_store", "_CONNECT_TIMEOUT_S"): PATIENCE_S,
    ("services.gateway.tenancy.leases", "_REPLY_TIMEOUT_S"): PATIENCE_S,
}


@pytest.fixture(scope="session", autouse=True)
def patient_with_redis() -> Iterator[None]:
    """Lets clients of Redis wait. A machine that stands still for a second is not a Redis that is
    away; a test of a Redis that does not answer sets a timeout of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), seconds in _REDIS_TIMEOUTS_S.items():
            if module in sys.modules:
                patch.setattr(sys.modules[module], name, seconds)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds torch before the fixtures, so that the random tensors of a test do not depend on the
    tests that its process ran before.
    """
    if (torch := sys.modules.get("torch")) is not None and "gpu" not in item.path.parts:
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker begins one last. Those of whole stacks
    have an order of their own.
    """

    def is_late(item: pytest.Item) -> bool:
        return item.get_closest_marker("slow") is None or "e2e" in item.keywords

    items.sort(key=is_late)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no search for garbage looks at it again."""
    gc.freeze()
    gc.enable()
