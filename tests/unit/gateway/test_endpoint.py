"""What an endpoint keeps of a request after its end; see test_gateway_frees_requests, too."""

import pytest

from services.gateway.endpoints.endpoint import releasing


def test_a_body_is_freed_whatever_ends_its_request():
    body = bytearray(1000)
    with pytest.raises(KeyError) as kept, releasing(body):
        raise KeyError("its traceback has the body")
    assert kept.value
    assert not body
