"""What an endpoint keeps of a request after its end, see test_gateway_frees_requests, too; and what
it calls the fields of one.
"""

import time

import pytest

from services.gateway.endpoints.endpoint import Admitted
from services.gateway.endpoints.request_context import renamed
from services.gateway.tenancy.admission import Admission
from tests.noise import least

PATHS = {"messages": "input", "messages[1]": "input[2]", "messages[1].content": "input[2].output"}


async def test_a_body_is_freed_whatever_ends_its_request():
    async def receive():
        return {"type": "http.request", "body": b" " * (1 << 20)}

    scope = {"type": "http", "headers": [], "state": {}}
    body = b"not read"
    with pytest.raises(KeyError) as kept:
        async with Admitted(Admission(1), scope, receive) as (_, body):
            assert len(body) == 1 << 20
            raise KeyError("its traceback has the body")
    assert kept.value
    assert not body


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages", "input"), ("messages[1]", "input[2]"), ("messages[12]", "input[12]"),
        ("messages[1].content[0].text", "input[2].output[0].text"),
        ("messages[1].contents", "input[2].contents"), ("messages_", "messages_"), ("n", "n"),
        ("messages[1].content" + "." * 9, "input[2].output" + "." * 9), ("", ""),
        ("messages_of_a_longer_name.x", "messages_of_a_longer_name.x"),
    ],
)  # fmt: skip
def test_the_longest_path_is_renamed(param, expected):
    assert renamed(param, PATHS) == expected
    assert renamed(param, {}) == param


def test_a_field_of_any_length_is_renamed_at_once():
    """Its name is a client's: a key of a schema with nothing but dots took half a minute."""
    param = "tools[0]" + "." * 250_000

    def rename() -> float:
        start = time.process_time()
        assert renamed(param, PATHS) == param
        return time.process_time() - start

    assert least(rename, 0.1) <= 0.1
