"""A family that divides an image into several units: each has a key, a run and an encode call."""

from collections.abc import Iterator

import pytest

from services.common.families import FAMILIES
from services.common.geometry import Unit
from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import GatewayStack
from tests.two_views import BETWEEN, OVERVIEW


@pytest.fixture(scope="module")
def stack(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "Qwen3VLForConditionalGeneration", "tests.two_views")
        stack = GatewayStack(loop_thread, tmp_path_factory.mktemp("views"), log_level="ERROR")
    yield stack
    stack.close()


def test_each_unit_is_encoded_and_placed(stack):
    stack.reset()
    answer = stack.chat(messages=asking(image_url(300, 200), image_url(64, 64)), n=2)
    submit, other = stack.decoder.submits
    assert submit.prompt_token_ids == other.prompt_token_ids
    assert [image.num_tokens for image in submit.images] == [4, 70, 4, 64]
    assert len({image.image_key for image in submit.images}) == 4
    first, second, *_ = submit.images
    assert second.offset == first.offset + 5
    ids = list(memoryview(submit.prompt_token_ids).cast("i"))
    assert ids[first.offset + 4] == BETWEEN and submit.positions == b""
    assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 4 + 70 + 4 + 64
    sent = {request.image_key: request.grid for request in stack.encoder.requests}
    units = [Unit((sent[key].t, sent[key].h, sent[key].w))
             for key in (image.image_key for image in submit.images)]  # fmt: skip
    assert units == [OVERVIEW, Unit((1, 14, 20)), OVERVIEW, Unit((1, 16, 16))]


def test_the_units_of_equal_images_are_encoded_once(stack):
    stack.reset()
    url = image_url(300, 200)
    stack.chat(messages=asking(url, url))
    (submit,) = stack.decoder.submits
    keys = [image.image_key for image in submit.images]
    assert keys[:2] == keys[2:]
    assert sorted(request.image_key for request in stack.encoder.requests) == sorted(keys[:2])
