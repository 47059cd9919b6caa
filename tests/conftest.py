"""For all tests."""

import functools
import gc
import ssl

import httpcore2
import pytest

gc.disable()  # until all is imported and collected: millions of objects, none of them garbage

# Reading the list of authorities takes a client 30 ms. Those of tests share what was read once.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
_create_context = ssl.create_default_context
_default_context = functools.cache(_create_context)


def _shared_context(*arguments: object, **options: object) -> ssl.SSLContext:
    if arguments or options:  # of its own
        return _create_context(*arguments, **options)
    return _default_context()


ssl.create_default_context = _shared_context


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
