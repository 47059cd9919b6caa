"""Limits of requests that are settings: at each limit a request is served, and beyond it refused in
words that name the setting.
"""

import io
import json
from collections.abc import Callable, Iterator

import httpx2
import pytest
from PIL import Image

from tests.contract.test_gateway_video import asking, clip, data_url, video
from tests.gateway_stack import MODEL, GatewayStack, LoopThread

SETTINGS = {
    "max_images": 2, "max_videos": 1, "max_image_pixels": 6400, "max_image_bytes": 4096,
    "max_body_bytes": 1 << 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def limited(
    loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    stack = GatewayStack(loop_thread, tmp_path_factory.mktemp("limited"), **SETTINGS)
    yield stack
    stack.close()


@pytest.fixture(scope="module")
def closed(
    loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    """A gateway that takes neither images nor videos, as vLLM with `{"image": 0, "video": 0}`."""
    directory = tmp_path_factory.mktemp("closed")
    stack = GatewayStack(loop_thread, directory, max_images=0, max_videos=0)
    yield stack
    stack.close()


def picture(width: int = 40, height: int = 30, padding: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue() + bytes(padding)


def part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}}


def frames(*data: bytes) -> dict:
    return video([data_url(each, "image/png") for each in data])


def whole(num_bytes: int) -> bytes:
    """A body of that many bytes."""
    body = json.dumps({"model": MODEL, "messages": asking(part(picture()))})
    return body.encode() + b" " * (num_bytes - len(body))


SMALL, SQUARE = picture(), len(picture())
# By name: parts within the limit, parts beyond it, the field that the error names, and its text.
PARTS: dict[str, tuple[list[dict], list[dict], str, str]] = {
    "images": (
        [part(SMALL)] * 2, [part(SMALL)] * 3, "messages",
        "the request has 3 images; at most 2 are allowed (GATEWAY_MAX_IMAGES)",
    ),
    "videos": (
        [video(clip(8, 2.0))], [video(clip(8, 2.0))] * 2, "messages",
        "the request has 2 videos; at most 1 are allowed (GATEWAY_MAX_VIDEOS)",
    ),
    "images beside a video": (
        [part(SMALL), part(SMALL), video(clip(8, 2.0))],
        [part(SMALL), part(SMALL), video(clip(8, 2.0)), part(SMALL)], "messages",
        "GATEWAY_MAX_IMAGES",
    ),
    "frames are no images": ([frames(*[SMALL] * 8)], [], "", ""),
    "pixels": (
        [part(picture(80, 80))], [part(picture(80, 81))], "messages[0].content[0]",
        "the image has 80x81 pixels; at most 6400 are allowed (GATEWAY_MAX_IMAGE_PIXELS)",
    ),
    "pixels of a frame": (
        [frames(*[picture(80, 80)] * 2)], [frames(*[picture(6401, 1)] * 2)],
        "messages[0].content[0]", "GATEWAY_MAX_IMAGE_PIXELS",
    ),
    "bytes": (
        [part(picture(padding=4096 - SQUARE))], [part(picture(padding=4097 - SQUARE))],
        "messages[0].content[0]", "the image has more than 4096 bytes (GATEWAY_MAX_IMAGE_BYTES)",
    ),
    "bytes of a frame": (
        [frames(*[picture(padding=4096 - SQUARE)] * 2)],
        [frames(SMALL, picture(padding=4097 - SQUARE))], "messages[0].content[0].video[1]",
        "GATEWAY_MAX_IMAGE_BYTES",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_limit_of_parts(limited: GatewayStack, name: str) -> None:
    within, beyond, param, text = PARTS[name]
    assert limited.chat(messages=asking(*within)).status_code == 200
    if beyond:
        answer = limited.chat(messages=asking(*beyond))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert text in error["message"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "media"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_a_limit_of_bodies(limited: GatewayStack, path: str, is_declared: bool) -> None:
    def post(num_bytes: int) -> httpx2.Response:
        data = whole(num_bytes)
        content = data if is_declared else iter([data[:9], data[9:]])
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        with limited.client() as client:
            return client.post(f"/v1/{path}", content=content, headers=headers)

    # A form of another endpoint is read whole, too, before it is refused.
    assert post(1 << 20).status_code == (200 if path == "chat/completions" else 400)
    answer = post((1 << 20) + 1)
    assert answer.status_code == 413
    text = "the body is larger than 1048576 bytes (GATEWAY_MAX_BODY_BYTES)"
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("make", "setting"),
    [(lambda: part(SMALL), "GATEWAY_MAX_IMAGES"), (lambda: video(clip()), "GATEWAY_MAX_VIDEOS")],
)
def test_a_limit_of_zero_closes_a_modality(
    closed: GatewayStack, make: Callable[[], dict], setting: str
) -> None:
    assert closed.chat().status_code == 200
    answer = closed.chat(messages=asking(make()))
    assert answer.status_code == 400
    assert f"at most 0 are allowed ({setting})" in answer.json()["error"]["message"]


# Photos as phones and cameras make them, by their makers' names of the size.
PHOTOS = {
    "12 MP": (4032, 3024), "24 MP": (5712, 4284), "45 MP": (8192, 5464), "48 MP": (8064, 6048),
    "48 MP upright": (6048, 8064), "50 MP": (8160, 6120), "50 MP of 4 to 3": (8192, 6144),
    "50 MP of 16 to 9": (9408, 5292), "51 MP": (8272, 6200),
    "64 MP": (9280, 6944), "108 MP": (12000, 9000), "200 MP": (16320, 12240),
}  # fmt: skip


@pytest.mark.parametrize("name", PHOTOS)
def test_photos_of_up_to_fifty_million_pixels_are_taken(pair: GatewayStack, name: str) -> None:
    width, height = PHOTOS[name]
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    data = bytearray(file.getvalue())
    at = data.index(b"\xff\xc0") + 5  # the height of the frame
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    answer = pair.chat(messages=asking(part(bytes(data))))
    if width * height <= 52_000_000:
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    else:
        assert answer.status_code == 400
        assert "GATEWAY_MAX_IMAGE_PIXELS" in answer.json()["error"]["message"]
