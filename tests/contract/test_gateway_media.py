"""Files that clients upload and embeddings that they bring, through the HTTP API."""

import base64
import io
import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.errors import InternalError, TriptychError, Unavailable
from services.common.geometry import Unit
from services.common.images.image_key import embedding_key
from services.encoder.front.client_embeddings import checked, write_tensor
from tests.fakes import clip_file, forever
from tests.gateway_fixtures import image_url
from tests.gateway_stack import GatewayStack, LoopThread
from tests.noise import PATIENCE_S

GRID = [1, 4, 8]
TOKENS, WIDTH = 8, 32 * 3  # merged by 2 x 2; the tiny model's hidden size and features
TENSOR = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def media(loop_thread: LoopThread, tmp_path) -> Iterator[GatewayStack]:
    stack = GatewayStack(loop_thread, tmp_path, api_keys="one,two", embeddings=True)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def _bringing(
    loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("bringing"), api_keys="one,two", embeddings=True
    )
    yield stack
    stack.close()


@pytest.fixture
def bringing(_bringing: GatewayStack) -> Iterator[GatewayStack]:
    """The stack that the tests of embeddings share, reset."""
    yield from _bringing.lend()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def picture() -> bytes:
    return base64.b64decode(image_url().partition(",")[2])


def call(stack: GatewayStack, path: str, key: str = "one", method: str = "POST", **options):
    with stack.client(headers={"authorization": f"Bearer {key}"}) as client:
        return client.request(method, path, **options)


def upload(stack: GatewayStack, data: bytes, kind: str = "image/png", key: str = "one"):
    return call(stack, "/v1/media", key, content=data, headers={"content-type": kind})


def ask(stack: GatewayStack, *parts: dict, key: str = "one"):
    content = [*parts, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    return call(stack, "/v1/chat/completions", key, json=body)


def embeds(data: object = None, grid: object = GRID) -> dict:
    given = text(save({"e": TENSOR})) if data is None else data
    if isinstance(given, bytes):
        given = text(given)
    return {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": given, "image_grid_thw": grid},
    }


def error_of(answer) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


# Uploads.


def test_an_upload_is_named_in_place_of_its_bytes(media):
    answer = upload(media, picture())
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["object"] == "media" and found["bytes"] == len(picture())
    assert found["kept_seconds"] == 3600
    for _ in range(2):
        asked = ask(media, {"type": "image_url", "image_url": {"url": found["id"]}})
        assert asked.status_code == 200, asked.text
    direct = ask(media, {"type": "image_url", "image_url": {"url": image_url()}})
    assert direct.status_code == 200
    keys = {request.image_key for request in media.encoder.requests}
    assert len(keys) == 1  # one name, however the bytes came
    assert all(request.image == picture() for request in media.encoder.requests)


def test_a_clip_is_uploaded_once(media):
    handle = upload(media, clip_file(50, 25.0), "video/mp4").json()["id"]
    asked = ask(media, {"type": "video_url", "video_url": {"url": handle}})
    assert asked.status_code == 200, asked.text
    assert asked.json()["usage"]["prompt_tokens_details"]["videos"][0]["frames"] == 4


def test_another_tenants_handle_is_a_404(media):
    handle = upload(media, picture()).json()["id"]
    part = {"type": "image_url", "image_url": {"url": handle}}
    status, param, _ = error_of(ask(media, part, key="two"))
    assert (status, param) == (404, "messages[0].content[0]")
    assert call(media, f"/v1/media/{handle}", "two", "DELETE").status_code == 404
    assert ask(media, part).status_code == 200
    deleted = call(media, f"/v1/media/{handle}", "one", "DELETE")
    assert deleted.json() == {"id": handle, "object": "media", "deleted": True}
    assert ask(media, part).status_code == 404
    assert call(media, f"/v1/media/{handle}", "one", "DELETE").status_code == 404


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [InternalError("the disk is full"), Unavailable("Redis is not")])
def test_a_file_is_gone_only_where_all_encoders_say_so(
    loop_thread: LoopThread, tmp_path, failing: int, error: TriptychError
):
    stack = GatewayStack(loop_thread, tmp_path, api_keys="one", num_encoders=2)
    try:
        handle = upload(stack, picture()).json()["id"]
        (kept,) = [encoder.uploads for encoder in stack.encoders if encoder.uploads]
        for encoder in stack.encoders:
            encoder.uploads = dict(kept)
        stack.encoders[failing].download_error = error
        answer = call(stack, f"/v1/media/{handle}", method="DELETE")
        assert answer.status_code == error.http_status, answer.text
        assert not stack.encoders[1 - failing].uploads
        stack.encoders[failing].download_error = None
        assert call(stack, f"/v1/media/{handle}", method="DELETE").status_code == 200
        assert not stack.encoders[failing].uploads
        stack.wait(stack.all_healthy)
        assert call(stack, f"/v1/media/{handle}", method="DELETE").status_code == 404
        stack.thread.run(stack.encoders[failing].stop())
        started = time.monotonic()
        assert call(stack, f"/v1/media/{handle}", method="DELETE").status_code == 503
        stack.wait(lambda: not stack.all_healthy())
        assert call(stack, f"/v1/media/{handle}", method="DELETE").status_code == 503
        assert time.monotonic() - started < PATIENCE_S / 2
    finally:
        stack.close()


@pytest.mark.parametrize(
    "handle", ["media:", "media:../x", "media:" + "0" * 63, "MEDIA:" + "g" * 64]
)
def test_a_malformed_handle_is_a_400(media, handle: str):
    part = {"type": "image_url", "image_url": {"url": handle}}
    assert error_of(ask(media, part))[:2] == (400, "messages[0].content[0]")


def test_uploads_are_bounded_and_of_no_forms_type(media):
    assert upload(media, b"").status_code == 400
    for kind in ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded"):
        assert upload(media, picture(), kind).status_code == 415
    assert not media.encoder.uploads


# Embeddings.


@pytest.mark.parametrize(
    "grid",
    [GRID, [GRID], text(npy(np.array(GRID))), text(npy(np.array([GRID], np.int32))),
     text(save({"g": torch.tensor([GRID])}))],
    ids=["numbers", "a row", "npy", "npy of int32", "safetensors"],
)  # fmt: skip
def test_an_embedding_takes_an_images_place(bringing, grid):
    file = save({"e": TENSOR})
    asked = ask(bringing, embeds(file, grid))
    assert asked.status_code == 200, asked.text
    (request,) = bringing.encoder.requests
    assert request.is_embedding and request.image == file
    salt, prefix = request.cache_salt, bringing.encoder.description.key_prefix
    assert request.image_key == embedding_key(prefix, file, unit=Unit((1, 4, 8)), salt=salt)
    (submit,) = bringing.decoder.submits
    assert [image.num_tokens for image in submit.images] == [TOKENS]
    details = asked.json()["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == TOKENS


GRIDS = [GRID, [1, 2, 8], GRID]  # of 8, 4 and 8 tokens
ROWS = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "grids",
    [GRIDS, text(npy(np.array(GRIDS))), text(save({"g": torch.tensor(GRIDS, dtype=torch.int32)}))],
    ids=["rows", "npy", "safetensors of int32"],
)
@pytest.mark.parametrize(
    ("file", "dtype"),
    [
        (save({"e": ROWS}), torch.float32),
        (save({"e": ROWS.bfloat16()}), torch.bfloat16),
        (npy(ROWS.half().numpy()), torch.float16),
    ],
    ids=["float32", "bfloat16", "npy of float16"],
)
def test_several_grids_are_as_many_images(bringing, grids, file, dtype):
    asked = ask(bringing, embeds(file, grids))
    assert asked.status_code == 200, asked.text
    (submit,) = bringing.decoder.submits
    assert [image.num_tokens for image in submit.images] == [8, 4, 8]
    found = {r.image_key: load(r.image)["embedding"] for r in bringing.encoder.requests}
    tensors = [found[image.image_key] for image in submit.images]
    assert torch.equal(torch.cat(tensors), ROWS.to(dtype))
    assert asked.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 20


def test_several_grids_are_the_prompt_of_as_many_parts(bringing):
    pairs = zip(ROWS.split([8, 4, 8]), GRIDS, strict=True)
    parts = [embeds(save({"e": rows.clone()}), grid) for rows, grid in pairs]
    for given in (parts, [embeds(save({"e": ROWS}), GRIDS)]):
        assert ask(bringing, *given).status_code == 200
    apart, together = bringing.decoder.submits
    assert apart.prompt_token_ids == together.prompt_token_ids


def test_each_grid_counts_as_an_image(bringing):
    grids = [[1, 2, 2]] * 1000
    status, param, message = error_of(ask(bringing, embeds(save({"e": TENSOR}), grids)))
    assert (status, param) == (400, "messages") and "1000 images" in message


def test_tenants_have_embeddings_of_their_own(bringing):
    for key in ("one", "two"):
        assert ask(bringing, embeds(), key=key).status_code == 200
    assert len({request.image_key for request in bringing.encoder.requests}) == 2


def test_an_uploaded_embedding_is_named(bringing):
    handle = upload(bringing, save({"e": TENSOR}), "application/octet-stream").json()["id"]
    assert ask(bringing, embeds(handle)).status_code == 200
    assert bringing.encoder.requests[0].image == save({"e": TENSOR})
    assert error_of(ask(bringing, embeds(handle), key="two"))[0] == 404


BAD = {
    "another shape": (save({"e": TENSOR[1:]}), GRID),
    "without DeepStack": (save({"e": TENSOR[:, :32].contiguous()}), GRID),
    "another grid": (save({"e": TENSOR}), [1, 8, 8]),
    "a pickle": (b"\x80\x04" + bytes(100), GRID),
    "objects": (npy(np.array([{}], object), allow_pickle=True), GRID),
    "what torch.save writes": (b"PK\x03\x04" + bytes(200), GRID),
    "sparse": (save({"indices": torch.ones(2, 2), "values": torch.ones(2)}), GRID),
    "float64": (npy(TENSOR.double().numpy()), GRID),
    "4 TiB": (
        len(head := json.dumps({"e": {"dtype": "F32", "shape": [1 << 20, 1 << 20],
                                      "data_offsets": [0, 4]}}).encode()).to_bytes(8, "little")
        + head + bytes(4), GRID,
    ),
    "more bytes than any such tensor": (bytes(1 << 20), GRID),
    "no base64": ("***", GRID),
    "a web address": ("https://example.com/e.npy", GRID),
    "a grid that the merge does not divide": (save({"e": TENSOR}), [1, 3, 8]),
    "a grid of zeros": (save({"e": TENSOR}), [0, 0, 0]),
    "a grid of two numbers": (save({"e": TENSOR}), [4, 8]),
    "no grid": (save({"e": TENSOR}), []),
    "a row of two numbers": (save({"e": TENSOR}), [GRID, [4, 8]]),
    "a row beside numbers": (save({"e": TENSOR}), [GRID, 1, 4, 8]),
    "fewer rows than two grids": (save({"e": TENSOR}), [GRID, GRID]),
    "grids in three dimensions": (save({"e": TENSOR}), text(npy(np.array([[GRID]])))),
    "a grid of floats": (save({"e": TENSOR}), text(npy(np.ones(3, np.float32)))),
    "a grid that is text": (save({"e": TENSOR}), "1,4,8"),
    "a grid of 2^40 patches": (save({"e": TENSOR}), [1, 1 << 16, 1 << 16]),
}  # fmt: skip


@pytest.mark.parametrize(("data", "grid"), BAD.values(), ids=BAD.keys())
def test_other_embeddings_are_a_400_that_names_the_part(bringing, data, grid):
    status, param, message = error_of(ask(bringing, embeds(data, grid)))
    assert status == 400 and param.startswith("messages[0].content[0]") and message
    assert not bringing.encoder.requests and not bringing.decoder.submits


@pytest.mark.parametrize("value", [3e38, -3e38, float("inf"), float("nan")])
def test_values_that_a_model_cannot_add_are_a_400_that_names_the_part(bringing, value: float):
    """The encoder reads the values, while the decoder waits for the embedding."""

    async def read(request) -> None:
        spec = EmbeddingSpec("float32", 3, TOKENS, 32)
        place = checked(request.image, spec)
        write_tensor(request.image, place, spec, memoryview(bytearray(spec.size_bytes)))

    bringing.encoder.before, bringing.decoder.before = read, forever
    file = save({"e": torch.full_like(TENSOR, value)})
    text_part = {"type": "text", "text": "look:"}
    status, param, message = error_of(ask(bringing, text_part, embeds(file)))
    assert (status, param) == (400, "messages[0].content[1]")
    assert "would overflow" in message


def test_a_bare_tensor_needs_its_grid(bringing):
    part = {"type": "image_embeds", "image_embeds": text(save({"e": TENSOR}))}
    status, param, message = error_of(ask(bringing, part))
    assert (status, param) == (400, "messages[0].content[0].image_embeds")
    assert "image_grid_thw" in message


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_embeddings_stand_where_images_may(bringing, role):
    messages = [{"role": role, "content": [embeds()]}, {"role": "user", "content": "what?"}]
    answer = call(bringing, "/v1/chat/completions", "one", json={"messages": messages})
    status, param, message = error_of(answer)
    assert (status, param) == (400, "messages[0].content[0]")
    assert f"images are not allowed in a {role} message" in message


def test_embeddings_are_off_unless_they_are_allowed(stack):
    answer = stack.chat(messages=[{"role": "user", "content": [embeds()]}])
    status, param, message = error_of(answer)
    assert (status, param) == (400, "messages[0].content[0]") and "GATEWAY_EMBEDDINGS" in message
