"""What an endpoint keeps of a request after its end; see test_gateway_frees_requests, too."""

import pytest
from starlette.requests import Request

from services.gateway.endpoints.endpoint import received
from services.gateway.tenancy.admission import Admission


async def test_a_body_is_freed_whatever_ends_its_request():
    async def receive():
        return {"type": "http.request", "body": b" " * (1 << 20)}

    scope = {"type": "http", "headers": [], "state": {}}
    with pytest.raises(KeyError) as kept:
        async with received(Admission(1), Request(scope, receive)) as (_, body):
            assert len(body) == 1 << 20
            raise KeyError("its traceback has the body")
    assert kept.value
    assert not body
