"""Videos through the HTTP API: what encoders are asked, what decoders get, and what is refused."""

import asyncio
import base64
import hashlib
import http.server
import io
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from services.common.errors import EngineLost, InvalidVideo, Overloaded, ProcessLost
from services.gateway.app import create_gateway
from tests.contract.test_gateway_openai import send_raw
from tests.fakes import clip_file
from tests.gateway_fixtures import image_url
from tests.gateway_stack import GatewayStack
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import added_ids

VIDEO, START, END = (
    added_ids()[f"<|{name}|>"] for name in ("video_pad", "vision_start", "vision_end")
)


def data_url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def clip(num_frames: int = 100, rate: float = 25.0, **fields: object) -> str:
    return data_url(clip_file(num_frames, rate, **fields))  # type: ignore[arg-type]


def video(url: str | list[str], **options: object) -> dict:
    if isinstance(url, list):
        return {"type": "video", "video": url, **options}
    return {"type": "video_url", "video_url": {"url": url}, **options}


def asking(*parts: dict, text: str = "what?") -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def still(shade: int, size: tuple[int, int] = (96, 64)) -> bytes:
    buffer = io.BytesIO()
    noise = np.random.default_rng(shade).integers(0, 255, (*size[::-1], 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def prompt_of(stack: GatewayStack, submit) -> str:
    """The prompt with a run of placeholders as [n]."""
    text, count = "", 0
    for token in [*memoryview(submit.prompt_token_ids).cast("i"), -1]:
        if token == VIDEO:
            count += 1
            continue
        text += f"[{count}]" if count else ""
        count = 0
        text += stack.tokenizer.token_bytes(token).decode() if token >= 0 else ""
    return text


def ask(stack: GatewayStack, *parts: dict, **fields: object):
    answer = stack.chat(messages=asking(*parts), **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_file_is_probed_and_its_pairs_encoded(stack):
    usage = ask(stack, video(clip(num_frames=75)))["usage"]
    (submit,) = stack.decoder.submits
    assert len(stack.encoder.probes) == 1
    assert prompt_of(stack, submit).startswith(
        "<|im_start|>user\n<|vision_start|><0.3 seconds><|vision_start|>[6]<|vision_end|>"
        "<1.5 seconds><|vision_start|>[6]<|vision_end|><2.7 seconds>"
    )
    # int(75 / 25 * 2) = 6 frames: 0, 15, 30, 44, 59, 74
    assert [(r.frames.first, r.frames.second) for r in stack.encoder.requests] == [
        (0, 15), (30, 44), (59, 74),
    ]  # fmt: skip
    assert all(r.video_digest and not r.image for r in stack.encoder.requests)
    assert [image.num_tokens for image in submit.images] == [6, 6, 6]
    assert {r.image_key for r in stack.encoder.requests} == {i.image_key for i in submit.images}
    details = usage["prompt_tokens_details"]
    assert details["video_tokens"] == 18 and details["image_tokens"] == 0
    assert details["videos"] == [
        {
            "frames": 6, "fps": 2.0, "tokens": 18, "size": [64, 96], "times": [0.3, 1.5, 2.7],
            "cap_pixels_per_frame": False,
        }
    ]  # fmt: skip
    assert len(memoryview(submit.positions).cast("i")) == 3 * usage["prompt_tokens"]


def test_a_client_that_leaves_while_its_file_is_looked_at_ends_the_call(stack):
    ended: list[BaseException] = []

    async def before_probe(_: bytes) -> None:
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError as error:
            ended.append(error)
            raise

    stack.encoder.before_probe = before_probe
    with send_raw(stack, {"messages": asking(video(clip()))}):
        stack.wait(lambda: stack.encoder.probes)
    stack.wait(lambda: ended)


def test_another_question_and_a_longer_cut_share_what_is_equal(stack):
    ask(stack, video(clip(num_frames=8, rate=2.0, tag="a")))
    first = {r.image_key for r in stack.encoder.requests}
    ask(stack, video(clip(num_frames=8, rate=2.0, tag="a")), {"type": "text", "text": "again"})
    assert {r.image_key for r in stack.encoder.requests} == first
    ask(stack, video(clip(num_frames=12, rate=2.0, tag="a")))
    assert len({r.image_key for r in stack.encoder.requests} - first) == 2
    ask(stack, video(clip(num_frames=12, rate=2.0, tag="b")))
    assert len({r.image_key for r in stack.encoder.requests} - first) == 8
    ask(stack, video(clip(num_frames=8, rate=2.0, tag="a")), cache_salt="other")
    assert len({r.image_key for r in stack.encoder.requests}) == 4 + 2 + 6 + 4


@pytest.mark.parametrize(
    ("options", "request_fields", "frames"),
    [
        ({}, {}, 8), ({"fps": 1}, {}, 4), ({"fps": 5.5}, {}, 22), ({"num_frames": 5}, {}, 5),
        ({"max_frames": 6}, {}, 6), ({"fps": 10, "max_frames": 12}, {}, 12),
        ({}, {"mm_processor_kwargs": {"num_frames": 7}}, 7),
        ({}, {"media_io_kwargs": {"video": {"fps": 3}}}, 12),
        ({"fps": 1.5}, {"mm_processor_kwargs": {"num_frames": 7}}, 6),
        ({"video_url": {"url": "", "fps": 3}, "fps": 9}, {}, 12),
    ],
)  # fmt: skip
def test_what_is_looked_at_is_chosen(stack, options, request_fields, frames):
    part = video(clip(num_frames=100), **options)
    part["video_url"]["url"] = clip(num_frames=100)
    (found,) = ask(stack, part, **request_fields)["usage"]["prompt_tokens_details"]["videos"]
    assert found["frames"] == frames


def test_a_list_has_a_value_for_each_video(stack):
    parts = [video(clip(num_frames=100, tag=tag)) for tag in "ab"]
    usage = ask(stack, *parts, mm_processor_kwargs={"fps": [1, 3]})["usage"]
    assert [v["frames"] for v in usage["prompt_tokens_details"]["videos"]] == [4, 12]
    lists = {"num_frames": [3, 9]}
    usage = ask(stack, parts[0], {**parts[1], "fps": 1}, mm_processor_kwargs=lists)["usage"]
    assert [v["frames"] for v in usage["prompt_tokens_details"]["videos"]] == [3, 4]
    stack.reset()
    for count in (1, 3):
        status, code, param, message = refused(
            stack, *parts, mm_processor_kwargs={"fps": [1.0] * count}
        )
        assert (status, code, param) == (400, "invalid_request", "mm_processor_kwargs.fps")
        assert "for each video" in message
    both = {"fps": [1, 1], "num_frames": [4, 4]}
    assert refused(stack, *parts, mm_processor_kwargs=both)[2] == "mm_processor_kwargs.fps"


def test_pixels_of_frames_are_capped(stack):
    found = []
    part = video(clip(num_frames=4, rate=5.0, height=2000, width=2000), num_frames=2)
    for options, fields in (
        ({}, {}),
        ({"cap_pixels_per_frame": True}, {}),
        ({}, {"mm_processor_kwargs": {"cap_pixels_per_frame": True}}),
        ({"cap_pixels_per_frame": False}, {"mm_processor_kwargs": {"cap_pixels_per_frame": True}}),
    ):
        details = ask(stack, {**part, **options}, **fields)["usage"]["prompt_tokens_details"]
        found.append((details["videos"][0]["size"], details["videos"][0]["cap_pixels_per_frame"]))
    capped, whole = ([864, 864], True), ([1440, 1440], False)
    assert found == [whole, capped, capped, whole]


def test_videos_and_images_stand_where_the_messages_have_them(stack):
    picture = {"type": "image_url", "image_url": {"url": image_url(300, 200)}}
    usage = ask(
        stack, {**video(clip(num_frames=8, rate=2.0, tag="a")), "fps": 1}, picture,
        video(clip(num_frames=4, rate=2.0, tag="b", height=32, width=32)),
    )["usage"]  # fmt: skip
    (submit,) = stack.decoder.submits
    tokens = [image.num_tokens for image in submit.images]
    assert tokens == [6, 6, 70, 1, 1] and len({i.image_key for i in submit.images}) == 5
    offsets = [image.offset for image in submit.images]
    assert offsets == sorted(offsets)
    ids = np.frombuffer(submit.prompt_token_ids, np.int32)
    for image in submit.images:
        run = ids[image.offset : image.offset + image.num_tokens]
        assert len(set(run.tolist())) == 1 and ids[image.offset - 1] == START
    details = usage["prompt_tokens_details"]
    assert (details["image_tokens"], details["video_tokens"]) == (70, 14)
    assert [each["fps"] for each in details["videos"]] == [1.0, 2.0]


def test_videos_of_a_conversation(stack):
    messages = [
        *asking(video(clip(num_frames=4, rate=2.0, tag="a"))),
        {"role": "assistant", "content": "a dog"},
        *asking(video(clip(num_frames=4, rate=2.0, tag="b")), text="and here?"),
    ]
    assert stack.chat(messages=messages).status_code == 200
    (submit,) = stack.decoder.submits
    assert len(submit.images) == 4 and len(stack.encoder.probes) == 2


@pytest.mark.parametrize("form", ["list", "sequence"])
def test_frames_that_the_client_has_chosen(stack, form):
    stills = [still(i) for i in range(3)]
    if form == "list":
        part = video([data_url(each, "image/png") for each in stills])
    else:
        encoded = ",".join(base64.b64encode(each).decode() for each in stills)
        part = video(f"data:video/jpeg;base64,{encoded}")
    (found,) = ask(stack, {**part, "fps": 4})["usage"]["prompt_tokens_details"]["videos"]
    assert found["frames"] == 3 and found["fps"] == 4.0 and found["times"] == [0.1, 0.5]
    assert not stack.encoder.probes
    sent = {r.frames.second: r for r in stack.encoder.requests}
    assert (sent[1].image, sent[1].second_image) == (stills[0], stills[1])
    assert (sent[0].image, sent[0].second_image) == (stills[2], b"")


def test_large_frames_and_files_pass_the_parser_by(stack):
    stills = [still(i, (128, 128)) for i in range(40)]
    assert sum(map(len, stills)) * 4 // 3 > 2 << 20
    urls = [data_url(each, "image/png") for each in stills]
    for part in (
        video(urls), video("data:video/jpeg;base64," + ",".join(u.split(",")[1] for u in urls)),
        video(data_url(clip_file(8, 2.0) + b" " * (1 << 20))),
        {"type": "video", "video": data_url(clip_file(8, 2.0) + b" " * (1 << 20))},
    ):  # fmt: skip
        ask(stack, part)


def refused(stack: GatewayStack, *parts: dict, **fields: object) -> tuple[int, str, str, str]:
    answer = stack.chat(messages=asking(*parts), **fields)
    error = answer.json()["error"]
    assert not stack.decoder.submits
    return answer.status_code, error["code"], error["param"], error["message"]


PLACE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "fields", "code", "param", "text"),
    [
        (video(clip(), fps=1, num_frames=4), {}, "invalid_request", f"{PLACE}.fps", "exclude"),
        (video(clip()), {"mm_processor_kwargs": {"fps": 1, "num_frames": 4}}, "invalid_request",
         "mm_processor_kwargs.fps", "exclude"),
        (video(clip(), num_frames=9, max_frames=4), {}, "invalid_request", PLACE, "above"),
        (video(clip(), num_frames=769), {}, "invalid_request", PLACE, "at most 768"),
        (video(clip(), num_frames=1), {}, "invalid_request", f"{PLACE}.num_frames", "at least 2"),
        (video(clip(), fps=0), {}, "invalid_request", f"{PLACE}.fps", "> 0"),
        (video(clip(), nframes=4), {}, "invalid_request", f"{PLACE}.nframes", "unknown"),
        (video(clip()), {"mm_processor_kwargs": {"min_frames": 2}}, "invalid_request",
         "mm_processor_kwargs.min_frames", "unknown"),
        (video(clip()), {"media_io_kwargs": {"image": {"mode": "L"}}}, "invalid_request",
         "media_io_kwargs.image", "unknown"),
        (video(""), {}, "invalid_request", PLACE, "needs a URL"),
        (video([]), {}, "invalid_request", PLACE, "needs a URL"),
        (video("ftp://a/b"), {}, "invalid_request", PLACE, "video URLs must be"),
        (video("file:///etc/passwd"), {}, "invalid_request", PLACE, "not allowed here"),
        (video("data:video/mp4;base64,"), {}, "invalid_video", PLACE, "empty"),
        (video("data:video/jpeg;base64,YWJj,"), {}, "invalid_image", PLACE, "empty"),
        (video(data_url(b"nothing")), {}, "invalid_video", PLACE, "not a video"),
        (video(clip(num_frames=1)), {}, "invalid_video", PLACE, "two frames"),
        (video(clip(width=64 * 300)), {}, "invalid_video", PLACE, "200 times as long"),
        (video(clip(num_frames=4000, rate=1.0)), {}, "invalid_video", PLACE, "lasts 4000 s"),
        (video(["data:image/png;base64,YWJj"] * 2), {}, "invalid_image", PLACE, "image"),
        (video([image_url(), "data:image/png;base64,?"]), {}, "invalid_request",
         f"{PLACE}.video[1]", "base64"),
        (video([image_url(), image_url(41, 30)]), {}, "invalid_video", PLACE, "same size"),
        (video([image_url()]), {}, "invalid_video", PLACE, "two frames"),
        (video([image_url()] * 3, num_frames=2), {}, "invalid_request", PLACE, "left out"),
        (video([image_url()] * 3, max_frames=2), {}, "invalid_request", PLACE, "left out"),
        (video([image_url()] * 769), {}, "invalid_request", PLACE, "at most 768"),
        (video("data:video/jpeg;base64," + "YWJj," * 800), {}, "invalid_request", PLACE, "768"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_a_400(stack, part, fields, code, param, text):
    status, *found, message = refused(stack, part, **fields)
    assert (status, *found) == (400, code, param) and text.lower() in message.lower(), message


def test_limits_of_a_request(stack):
    assert refused(stack, *[video(clip())] * 9)[3].endswith("are allowed (GATEWAY_MAX_VIDEOS)")
    many = video(clip(num_frames=500, rate=1.0), num_frames=400)
    status, _, param, message = refused(stack, many, many)
    assert (status, param) == (400, "messages[0].content[1]")
    assert "all videos of a request" in message
    stack.encoder.description.max_image_patches = 16
    stack.wait(lambda: stack.gateway.service.encoders.description().max_image_patches == 16)
    try:
        assert "after resizing" in refused(stack, video(clip()))[3]
    finally:
        stack.encoder.description.max_image_patches = 16384
        stack.wait(lambda: stack.gateway.service.encoders.description().max_image_patches > 16)


def test_tokenize_says_what_a_video_costs(stack):
    part = video(clip(num_frames=75))
    with stack.client() as client:
        answer = client.post("/tokenize", json={"messages": asking(part)}).json()
        more = client.post(
            "/tokenize",
            json={"messages": asking(part), "mm_processor_kwargs": {"num_frames": 12}},
        ).json()
    assert answer["videos"][0]["frames"] == 6 and answer["videos"][0]["tokens"] == 18
    assert answer["tokens"].count(VIDEO) == 18
    assert more["videos"][0]["frames"] == 12 and more["count"] > answer["count"]
    assert not stack.encoder.requests and len(stack.encoder.probes) == 2
    usage = ask(stack, part)["usage"]
    assert usage["prompt_tokens"] == answer["count"]


def test_responses_take_videos_and_messages_refuse_them(stack):
    part = {"type": "input_video", "video_url": clip(num_frames=75), "num_frames": 4}
    body = {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "a"}]}]}
    with stack.client() as client:
        answer = client.post("/v1/responses", json=body).json()
        details = answer["usage"]["input_tokens_details"]
        assert details["videos"][0]["frames"] == 4 and details["video_tokens"] == 12
        assert answer["store"] is False  # its bytes are not kept
        block = {"type": "video", "source": {"type": "url", "url": "https://a/b"}}
        refusal = client.post(
            "/v1/messages",
            json={"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]},
        )
    assert refusal.status_code == 400 and "video" in refusal.text


def test_the_model_list_says_what_messages_may_hold(stack):
    assert stack.gateway.service.input_modalities == ["text", "image", "video"]


class _Origin(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        data = clip_file(8, 2.0)
        self.server.accepts.append(self.headers["Accept"])  # type: ignore[attr-defined]
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def private(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    """A gateway that fetches from this machine and reads a directory."""
    media = tmp_path_factory.mktemp("media")
    (media / "a.mp4").write_bytes(clip_file(8, 2.0))
    (media / "large.mp4").write_bytes(clip_file(8, 2.0) + b" " * 2048)
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("private"), allowed_media=f"private,{media}",
        max_video_bytes=2048, log_level="ERROR",
    )  # fmt: skip
    stack.media = media  # type: ignore[attr-defined]
    yield stack
    stack.close()


def test_urls_of_the_web_and_files(private):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Origin)
    server.accepts = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        for url in (f"{base}/a.mp4", f"file://{private.media}/a.mp4"):
            private.reset()
            usage = ask(private, video(url))["usage"]
            assert usage["prompt_tokens_details"]["videos"][0]["frames"] == 8
        assert server.accepts == [b"video/*".decode()]  # type: ignore[attr-defined]
        private.reset()
        assert refused(private, video(f"{base}/none"))[0] == 422
        stills = [data_url(still(i, (20, 20)), "image/png") for i in range(4)]
        sequence = "data:video/jpeg;base64," + ",".join(url.split(",")[1] for url in stills)
        for given in (stills, sequence):
            _, code, param, message = refused(private, video(given))
            assert (code, param) == ("invalid_video", PLACE)
            assert message.endswith("the frames of the video have more than 2048 bytes")
        for url in (f"file://{private.media}/large.mp4", data_url(b" " * 4096)):
            _, code, param, message = refused(private, video(url))
            assert (code, param) == ("invalid_video", PLACE)
            assert message.endswith("the video has more than 2048 bytes")
    finally:
        server.shutdown()
        server.server_close()


def test_frames_count_as_pixels_of_the_tenant(loop_thread, tmp_path):
    keys = tmp_path / "keys.json"
    entry = {"id": "k", "tenant": "t", "sha256": hashlib.sha256(b"secret").hexdigest()}
    tenants = {"t": {"pixels_per_minute": 64 * 96 * 8}}
    keys.write_text(json.dumps({"keys": [entry], "tenants": tenants}))
    stack = GatewayStack(loop_thread, tmp_path, api_keys=f"file:{keys}", log_level="ERROR")
    body = {"messages": asking(video(clip(num_frames=75)))}
    try:
        with stack.client(headers={"authorization": "Bearer secret"}) as client:
            answers = [client.post("/v1/chat/completions", json=body) for _ in range(2)]
    finally:
        stack.close()
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "pixels per minute" in answers[1].json()["error"]["message"]


def test_a_file_that_is_refused_counts_its_bytes(loop_thread, tmp_path):
    keys = tmp_path / "keys.json"
    entry = {"id": "k", "tenant": "t", "sha256": hashlib.sha256(b"secret").hexdigest()}
    tenants = {"t": {"pixels_per_minute": 5000}}
    keys.write_text(json.dumps({"keys": [entry], "tenants": tenants}))
    stack = GatewayStack(loop_thread, tmp_path, api_keys=f"file:{keys}", log_level="ERROR")
    body = {"messages": asking(video(data_url(b"x" * 2000)))}
    try:
        with stack.client(headers={"authorization": "Bearer secret"}) as client:
            answers = [client.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [400, 400, 429]
        assert "pixels per minute" in answers[2].json()["error"]["message"]
        assert answers[2].json()["error"]["param"] == PLACE
        assert len(stack.encoder.probes) == 2
    finally:
        stack.close()


def test_an_encoder_is_told_whose_file_it_is(loop_thread, tmp_path):
    keys = tmp_path / "keys.json"
    entry = {"id": "k", "tenant": "t", "sha256": hashlib.sha256(b"secret").hexdigest()}
    keys.write_text(json.dumps({"keys": [entry], "tenants": {"t": {"weight": 2.5}}}))
    stack = GatewayStack(loop_thread, tmp_path, api_keys=f"file:{keys}", log_level="ERROR")
    body = {"messages": asking(video(clip(num_frames=75)))}
    try:
        with stack.client(headers={"authorization": "Bearer secret"}) as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert stack.encoder.probe_shares == [("t", 2.5)]
    finally:
        stack.close()


def test_a_checkpoint_without_a_video_processor(loop_thread, tmp_path):
    stack = GatewayStack(loop_thread, tmp_path, log_level="ERROR")
    (stack.model_directory / "video_preprocessor_config.json").unlink()
    stack.close()
    service = create_gateway(stack.settings, stack.bounds).service
    assert service.videos is None and service.input_modalities == ["text", "image"]


def test_a_file_that_an_encoder_has_forgotten_is_sent_again(stack):
    forgotten = False

    async def forget(request):
        nonlocal forgotten
        if not forgotten:
            forgotten = True
            stack.encoder.files.clear()

    stack.encoder.before = forget
    ask(stack, video(clip(num_frames=75)))
    assert 2 <= len(stack.encoder.probes) <= 4
    assert len({r.image_key for r in stack.encoder.requests}) == 3


@pytest.mark.parametrize(("num_late", "status"), [(1, 200), (2, 503)])
def test_a_file_goes_to_another_encoder_if_one_is_late(pair, num_late, status):
    """As an image does whose encoder does not answer in time."""
    late = []

    async def hang(_: bytes) -> None:
        if len(late) < num_late:
            late.append(1)
            await asyncio.sleep(60)

    pair.gateway.service.encode_timeout_s = 0.5
    for encoder in pair.encoders:
        encoder.before_probe = hang
    answer = pair.chat(messages=asking(video(clip(num_frames=75))))
    assert answer.status_code == status, answer.text
    assert sum(len(encoder.probes) for encoder in pair.encoders) == 2


def test_an_encoder_that_dies_of_a_probe_is_not_the_last(pair):
    died = []

    async def die(video):
        if not died:
            died.append(1)
            raise ProcessLost("the engine ended")

    for encoder in pair.encoders:
        encoder.before_probe = die
    ask(pair, video(clip(num_frames=75)))
    assert sum(len(encoder.probes) for encoder in pair.encoders) == 2


def test_an_encoder_that_dies_of_a_video_is_replaced_once(pair):
    async def die(request):
        raise EngineLost("the engine ended")

    def probed():
        return [encoder for encoder in pair.encoders if encoder.probes]

    async def die_once(request):
        if len(probed()) == 1:
            raise EngineLost("the engine ended")

    for encoder in pair.encoders:
        encoder.before = die_once
    ask(pair, video(clip(num_frames=75, tag="dies")))
    assert len(probed()) == 2
    pair.reset()
    for encoder, decoder in zip(pair.encoders, pair.decoders, strict=True):
        encoder.before = die
        decoder.before = lambda _: asyncio.sleep(60)
    status, code, param, _ = refused_after(pair, video(clip(num_frames=75, tag="dies twice")))
    assert (status, code, param) == (400, "invalid_video", PLACE)


def test_all_units_of_a_file_go_to_the_encoder_that_was_asked(pair):
    for tag in "abcdefgh":
        pair.reset()
        ask(pair, video(clip(num_frames=200, tag=tag)))
        (asked,) = [encoder for encoder in pair.encoders if encoder.probes]
        assert len(asked.requests) == 8
        order = [r.frames.first for r in asked.requests]
        assert order == sorted(order)


def test_a_full_encoder_is_a_503(stack):
    async def full(video):
        raise Overloaded("full", retry_after_s=2)

    stack.encoder.before_probe = full
    assert refused(stack, video(clip()))[:2] == (503, "overloaded")


def test_a_file_that_cannot_be_decoded_is_a_400(stack):
    async def broken(request):
        raise InvalidVideo("frame 30 cannot be decoded")

    stack.encoder.before = broken
    answer = stack.chat(messages=asking(video(clip(num_frames=75))))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_video", PLACE)


def refused_after(stack: GatewayStack, *parts: dict) -> tuple[int, str, str, str]:
    """Of a request that a decoder has."""
    answer = stack.chat(messages=asking(*parts))
    error = json.loads(answer.text)["error"]
    return answer.status_code, error["code"], error["param"], error["message"]
