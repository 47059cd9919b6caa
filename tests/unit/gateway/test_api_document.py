"""docs/api.md names everything that the gateway accepts, refuses and answers."""

import re
from pathlib import Path

import pytest

from services.common.errors import BY_CODE
from services.gateway.bounds import Bounds
from services.gateway.endpoints.openapi import openapi_document
from services.gateway.forms import generation, openai
from services.gateway.settings import GatewaySettings
from tests.gateway_fixtures import all_routes
from tests.tiny_tokenizer import write_model_directory

SCHEMAS = openapi_document("1")["components"]["schemas"]
REQUESTS = [s for s in SCHEMAS.values() if s.get("additionalProperties") is False]
DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = "".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("api.md", "search.md", "fields.md")
)
CODE = " ".join(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)))
# Never sent: the client has disconnected; the gateway retries elsewhere.
INTERNAL = {
    "cancelled", "embedding_unavailable", "engine_lost", "process_lost", "video_not_held",
    "wrong_image_key",
}  # fmt: skip


FIELDS = {name for schema in REQUESTS for name in schema["properties"]}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_field_is_described(name):
    assert re.search(rf"\b{name}\b", CODE)


@pytest.mark.parametrize("code", sorted(BY_CODE.keys() - INTERNAL))
def test_error_is_described(code):
    assert f"`{code}`" in TEXT
    assert f"| {BY_CODE[code].http_status} |" in TEXT


def test_routes_are_described(tmp_path):
    directory = write_model_directory(tmp_path / "model")
    for route in all_routes(directory):
        (method,) = route.methods - {"HEAD"}
        assert f"`{method} {route.path.replace(':path', '')}`" in TEXT


def test_bounds_equal_those_in_the_code():
    for number in (openai.MAX_MESSAGES, openai.MAX_PARTS, generation.MAX_LOGIT_BIAS):
        assert str(number) in TEXT
    bounds = Bounds()
    timeout_s = GatewaySettings.model_fields["request_timeout_s"].default
    for row in (
        f"| images per request | {bounds.max_images_per_request} |",
        f"| bytes of one image | {bounds.max_image_bytes >> 20} MiB |",
        f"| pixels of one image, as sent | {bounds.max_source_pixels:,} |",
        f"| videos per request | {bounds.max_videos_per_request} |",
        f"| bytes of one video, or of its frames | {bounds.max_video_bytes >> 20} MiB |",
        f"| frames that are sampled, of all videos of a request | {bounds.max_video_frames} |",
        f"| seconds of one video | {bounds.max_video_seconds:,.0f} |",
        f"| requests at a time | {bounds.max_concurrent_requests:,}, then 503 |",
        f"| a request, to its last token | {timeout_s:g} s | `GATEWAY_REQUEST_TIMEOUT_S` |",
    ):
        assert row in TEXT
