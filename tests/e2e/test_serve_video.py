"""`triptych serve --model DIR` answers about videos and images as Hugging Face does, in float32:
prompts of equal length, equal greedy tokens, logprobs within 2e-4.
"""

import base64
import io
from collections.abc import Iterator

import httpx2
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.e2e.serve_command import serve_command
from tests.e2e.served_pair import Pair, asking, listed, noise, png
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Every night the same of Qwen3.5, which differs in its decoder, and of Qwen2-VL and Qwen2.5-VL,
# which differ in tower, decoder and videos.
OTHERS = ("qwen3_5", "qwen2_vl", "qwen2_5_vl")


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)],
)
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    from tests.e2e.tiny_video import MAKERS, Oracle

    directory = tmp_path_factory.mktemp(request.param)
    model = MAKERS[request.param](directory / "tiny")
    with serve_command(directory, ["--model", str(directory / "tiny")]) as command:
        yield Pair(request.param, command, Oracle(model, directory / "tiny"))


# Which takes no videos.
@pytest.mark.nightly
@pytest.mark.parametrize("pair", ["paddleocr_vl"], indirect=True)
def test_a_model_that_reads_pages(pair):
    listed = httpx2.get(f"{pair.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]
    assert listed["input_modalities"] == ["text", "image"]
    pages = [noise(2, *size, 10)[0] for size in ((256, 320), (20, 300), (500, 90))]
    parts = [{"type": "image_url", "image_url": {"url": png(page)}} for page in pages]
    images = [Image.fromarray(page) for page in pages]
    for part, image in zip(parts, images, strict=True):
        pair.check([asking(part, text="OCR:")], [], [image])
    answer = {"role": "assistant", "content": "A circle."}
    conversation = [asking(*parts[:2], text="OCR:"), answer, asking(parts[2], text="And here?")]
    for _ in range(2):
        pair.check(conversation, [], images)
    pair.check([asking(text="Without an image?")], [])
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}
    body = {"messages": [asking(video)], "max_tokens": 1}
    refused = httpx2.post(f"{pair.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert refused.status_code == 400 and "the architecture takes none" in refused.text


# What does not depend on the decoder is asked of one.
ONE = pytest.mark.parametrize("pair", ["qwen3_vl"], indirect=True)


def test_an_image_without_a_video(pair):
    listed = httpx2.get(f"{pair.url}/v1/models", timeout=PATIENCE_S).json()["data"][0]
    assert listed["input_modalities"] == ["text", "image", "video"]
    picture = noise(2, 256, 320, 10)[0]
    message = asking({"type": "image_url", "image_url": {"url": png(picture)}})
    pair.check([message], [], [Image.fromarray(picture)])
    answer = pair.check([message], [], [Image.fromarray(picture)])
    smaller = pair.ask([message], max_pixels=1)
    assert smaller["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("count", "height", "width", "rate"), [(2, 64, 96, 2.0), (5, 70, 50, 4.0), (9, 20, 200, 0.5)]
)
def test_frames_that_the_client_has_chosen(pair, count, height, width, rate):
    from tests.e2e.tiny_video import Seen

    frames = noise(count, height, width, count)
    answer = pair.check([asking(listed(frames, fps=rate))], [Seen(frames, rate, None)])
    (usage,) = answer["usage"]["prompt_tokens_details"]["videos"]
    assert (usage["frames"], usage["fps"]) == (count, rate)
    again = pair.check([asking(listed(frames, fps=rate))], [Seen(frames, rate, None)])
    assert {image["encode_source"] for image in again["images"]} <= {"memory", "redis", None}


def test_videos_of_different_rates_and_images_in_a_conversation(pair):
    from tests.e2e.tiny_video import Seen

    one, other = noise(4, 64, 64, 1), noise(7, 96, 48, 2)
    picture = noise(2, 260, 300, 3)[0]
    image = {"type": "image_url", "image_url": {"url": png(picture)}}
    messages = [
        asking(listed(one, fps=2.0), image, text="What moves?"),
        {"role": "assistant", "content": "A circle."},
        asking(listed(other, fps=7.5), text="And here?"),
    ]
    seen = [Seen(one, 2.0, None), Seen(other, 7.5, None)]
    pair.check(messages, seen, [Image.fromarray(picture)])
    pair.check(
        [asking(listed(one, fps=1.0), listed(one, fps=3.0))],
        [Seen(one, 1.0, None), Seen(one, 3.0, None)],
    )


OPTIONS = [
    {}, {"fps": 4.5}, {"num_frames": 3},
    *(
        pytest.param(options, marks=pytest.mark.nightly)
        for options in ({"fps": 1}, {"num_frames": 8}, {"num_frames": 200})
    ),
]  # fmt: skip


def encoded(frames: np.ndarray, rate: int, seed: str) -> tuple[str, np.ndarray]:
    """A file's URL, and its frames as PyAV decodes them."""
    av = pytest.importorskip("av")
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 2_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    data.seek(0)
    with av.open(data) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    url = f"data:video/mp4;base64,{base64.b64encode(data.getvalue()).decode()}"
    return url, np.stack(decoded)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_frames_of_a_file_are_sampled(pair, options):
    from tests.e2e.tiny_video import Seen

    url, frames = encoded(noise(31, 64, 96, 5), 10, "a")
    part = {"type": "video_url", "video_url": {"url": url}, **options}
    if options.get("num_frames") == 200 and pair.name.startswith("qwen2"):
        body = {"messages": [asking(part)], "max_tokens": 1}
        answer = httpx2.post(f"{pair.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 400, "their processor repeats no frame"
        return
    pair.check([asking(part)], [Seen(frames, 10.0, options)])
    request = [asking({"type": "video_url", "video_url": {"url": url}})]
    if options:
        pair.check(request, [Seen(frames, 10.0, options)], mm_processor_kwargs=options)


def test_most_frames_and_the_cap(pair):
    from tests.e2e.tiny_video import Seen

    url, frames = encoded(noise(12, 480, 640, 6), 4, "b")
    part = {"type": "video_url", "video_url": {"url": url}}
    pair.check([asking({**part, "max_frames": 5})], [Seen(frames, 4.0, {"num_frames": 5})])
    for cap in (True, False):
        options = {"cap_pixels_per_frame": cap, "num_frames": 2}
        answer = pair.check(
            [asking({**part, **options})], [Seen(frames, 4.0, {"num_frames": 2})], cap=cap
        )
        (usage,) = answer["usage"]["prompt_tokens_details"]["videos"]
        assert usage["cap_pixels_per_frame"] is cap


def test_files_of_two_rates_and_a_picture(pair):
    from tests.e2e.tiny_video import Seen

    url, frames = encoded(noise(20, 64, 96, 7), 10, "c")
    other_url, others = encoded(noise(9, 96, 64, 8), 3, "d")
    picture = noise(2, 260, 300, 9)[0]
    parts = [
        {"type": "video_url", "video_url": {"url": url, "fps": 3}},
        {"type": "image_url", "image_url": {"url": png(picture)}},
        {"type": "video_url", "video_url": {"url": other_url}, "fps": 1},
    ]
    seen = [Seen(frames, 10.0, {"fps": 3}), Seen(others, 3.0, {"fps": 1})]
    pair.check([asking(*parts)], seen, [Image.fromarray(picture)])


def odd_files() -> dict[str, bytes]:
    """Each container that our tests make, and files that are broken or are no videos."""
    from tests.videos import KINDS, make, sound

    size = (64, 96)
    found = {kind: make(kind, frames=12, rate=4, size=size) for kind in KINDS}
    whole = found["mp4"]
    return found | {
        "10 a second, 3 frames": make(frames=3, rate=10, size=size),
        "variable rate": make(frames=5, rate=10, size=size, times=[0, 1, 5, 20, 30]),
        "turned": make(frames=8, rate=4, size=size, rotation=90),
        "one frame": make(frames=1, size=size), "sound alone": sound(),
        "cut short": whole[: len(whole) // 2], "webm cut short": found["webm"][:1500],
        "empty boxes": b"\0\0\0\x08ftyp" * 40, "nothing": b"x" * 5000,
        "a lying size": whole[:4] + b"\xff\xff\xff\xff" + whole[8:],
    }  # fmt: skip


@ONE
def test_odd_files_get_an_answer_or_a_reason(pair):
    refused = set()
    for name, data in odd_files().items():
        url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
        part = {"type": "video_url", "video_url": {"url": url}}
        body = {"messages": [asking(part)], "max_tokens": 1}
        answer = httpx2.post(f"{pair.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        if answer.status_code == 200:
            (usage,) = answer.json()["usage"]["prompt_tokens_details"]["videos"]
            assert usage["frames"] >= 2, name
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_video"), (name, error)
            assert error["param"] == "messages[0].content[0]"
            refused.add(name)
    never = {"one frame", "sound alone", "empty boxes", "nothing"}
    assert never <= refused <= never | {"cut short", "webm cut short", "a lying size"}
    assert httpx2.get(f"{pair.url}/ready", timeout=PATIENCE_S).status_code == 200


@ONE
def test_of_a_longer_cut_only_what_is_new_is_encoded(pair):
    from tests.videos import make

    def sources(frames: int, text: str) -> list[str | None]:
        data = make("mov", frames=frames, rate=2, size=(64, 96), options={"g": "4"})
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        part = {"type": "video_url", "video_url": {"url": url}}
        return [image["encode_source"] for image in pair.ask([asking(part, text=text)])["images"]]

    assert sources(10, "What is it?") == ["computed"] * 5
    assert "computed" not in sources(10, "And what else?")
    assert sources(14, "What is it?").count("computed") == 2


@ONE
def test_a_killed_supervisor_leaves_no_process(pair):
    """The last of these tests."""
    process = pair.command.process
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) >= 5
    process.kill()
    process.wait(PATIENCE_S)
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
