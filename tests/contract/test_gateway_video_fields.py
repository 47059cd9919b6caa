"""The fields that choose a video's frames, their times and their pixels, through the HTTP API.

The values are those of vLLM's loader and of transformers' processor. How frames, times and sizes
follow from them is held to transformers in tests/parity/test_video_geometry.py.
"""

import base64

import pytest

from tests.contract.test_gateway_video import PLACE, ask, asking, clip, data_url, still, video
from tests.gateway_stack import GatewayStack

# A file of 40 frames, 10 a second, of 64 x 96 pixels: int(40 / 10 * 2) = 8 frames by default.
FILE = {"num_frames": 40, "rate": 10.0}
DEFAULT, ALL = 8, 40
PROCESSOR, MEDIA = "mm_processor_kwargs", "media_io_kwargs"


def stills(count: int, *, as_list: bool = False, **options: object) -> dict:
    data = [still(i) for i in range(count)]
    if as_list:
        return video([data_url(each, "image/png") for each in data], **options)
    encoded = ",".join(base64.b64encode(each).decode() for each in data)
    return video(f"data:video/jpeg;base64,{encoded}", **options)


def of_processor(**fields: object) -> dict:
    return {PROCESSOR: fields}


def of_media(**fields: object) -> dict:
    return {MEDIA: {"video": fields}}


def looked_at(stack: GatewayStack, part: dict, **fields: object) -> dict:
    """The usage of the request's first video."""
    return ask(stack, part, **fields)["usage"]["prompt_tokens_details"]["videos"][0]


def refusal(stack: GatewayStack, *parts: dict, **fields: object) -> tuple[int, str, str]:
    answer = stack.chat(messages=asking(*parts), **fields)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


# By name: fields of the part, fields of the request, and the frames that are sampled.
FRAMES = {
    "nothing": ({}, {}, DEFAULT),
    "a default": ({}, of_processor(do_sample_frames=True), DEFAULT),
    "the guide's": ({}, of_processor(fps=2, do_sample_frames=True), DEFAULT),
    "the guide's with its server option": (
        {}, of_processor(fps=2, do_sample_frames=True) | of_media(num_frames=-1), DEFAULT,
    ),
    "sampled of all": ({}, of_processor(do_sample_frames=True) | of_media(num_frames=-1), DEFAULT),
    "another rate of all": ({}, of_processor(fps=5) | of_media(num_frames=-1), 20),
    "a number of all": ({}, of_processor(num_frames=6) | of_media(num_frames=-1), 6),
    "a list": ({}, of_processor(fps=[5.0], do_sample_frames=True), 20),
    "all": ({}, of_media(num_frames=-1), ALL),
    "all of the processor": ({}, of_processor(num_frames=-1), ALL),
    "all of each": ({}, of_processor(num_frames=[-1]), ALL),
    "all of the part": ({"num_frames": -1}, {}, ALL),
    "all of the part beside a rate": ({"num_frames": -1}, of_processor(fps=1), ALL),
    "a rate beside all": ({"fps": 1}, of_media(num_frames=-1), 4),
    "all with their rate": ({}, of_media(num_frames=-1, fps=5), 20),
    "all up to a number": ({"num_frames": -1, "max_frames": 10}, {}, 10),
    "not sampled": ({}, of_processor(do_sample_frames=False), ALL),
    "not sampled by the loader": ({}, of_media(do_sample_frames=False), ALL),
    "not sampled, all": ({}, of_processor(do_sample_frames=False) | of_media(num_frames=-1), ALL),
    "sampled by the loader": ({}, of_processor(do_sample_frames=False) | of_media(fps=1), 4),
    "a number of the loader": (
        {}, of_processor(do_sample_frames=False) | of_media(num_frames=5), 5,
    ),
    "sampled in the part": ({"do_sample_frames": True}, of_processor(do_sample_frames=False),
                            DEFAULT),
    "null": ({"num_frames": None, "do_sample_frames": None}, of_media(fps=None), DEFAULT),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_a_file(stack, name):
    options, fields, count = FRAMES[name]
    found = looked_at(stack, video(clip(**FILE), **options), **fields)
    assert found["frames"] == count and len(found["times"]) == (count + 1) // 2
    if count == ALL:
        assert found["times"][:2] == [0.1, 0.2] and found["times"][-1] == 3.8
        assert found["fps"] == 10.0


EVEN, UNEVEN = [0, 1, 2, 3], [0, 10, 55, 95]
WHOLE = {"fps": 10, "frames_indices": UNEVEN, "total_num_frames": 100, "duration": 10.0}

# By name: fields of the part, fields of the request, times of the pairs, frames per second.
TIMES = {
    "nothing": ({}, {}, [0.2, 1.2], 2.0),  # 0.25, 1.25
    "a rate": ({"fps": 4}, {}, [0.1, 0.6], 4.0),
    "a rate of the loader": ({}, of_media(fps=10), [0.1, 0.2], 10.0),
    "a rate of the processor": ({}, of_processor(fps=[10.0], do_sample_frames=False), [0.1, 0.2],
                                10.0),
    "both rates": ({}, of_processor(fps=20) | of_media(fps=10), [0.1, 0.2], 10.0),
    "all": ({}, of_media(fps=10, num_frames=-1), [0.1, 0.2], 10.0),
    "as many": ({}, of_media(fps=10, num_frames=4), None, None),
    "a default": ({}, of_media(fps=10, do_sample_frames=False), [0.1, 0.2], 10.0),
    "the guide's": ({}, of_processor(fps=2, do_sample_frames=True), [0.2, 1.2], 2.0),
    "a sampling that leaves none out": (
        {}, of_processor(fps=10, do_sample_frames=True) | of_media(fps=5), [0.1, 0.5], 5.0),
    "uneven": ({}, of_media(**WHOLE), [0.5, 7.5], 0.4),
    "uneven in the part": (WHOLE, {}, [0.5, 7.5], 0.4),
    "uneven without a total": ({"fps": 10, "frames_indices": UNEVEN}, {}, [0.5, 7.5], 0.417),
    "uneven without a rate": ({"frames_indices": UNEVEN}, {}, [5.0, 75.0], 0.042),
    "uneven with a duration": (
        {"frames_indices": UNEVEN, "total_num_frames": 100, "duration": 20}, {}, [1.0, 15.0], 0.2),
    "uneven, all": ({}, of_media(**WHOLE, num_frames=-1), [0.5, 7.5], 0.4),
    "uneven, not sampled": ({}, of_media(**WHOLE, do_sample_frames=False), [0.5, 7.5], 0.4),
    "backwards": ({"fps": 10, "frames_indices": [30, 20, 10, 0]}, {}, [2.5, 0.5], 1.29),
    "twice": ({"fps": 10, "frames_indices": [7, 7, 7, 7]}, {}, [0.7, 0.7], 5.0),
    "even": ({"fps": 10, "frames_indices": EVEN, "total_num_frames": 4}, {}, [0.1, 0.2], 10.0),
    "a total": ({"fps": 10, "total_num_frames": 40}, {}, [0.1, 0.2], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("name", TIMES)
def test_times_of_frames_that_the_client_has_chosen(stack, name, as_list):
    options, fields, times, rate = TIMES[name]
    if times is None:
        status, param, message = refusal(stack, stills(4, as_list=as_list, **options), **fields)
        assert (status, param) == (400, f"{MEDIA}.video.fps") and "exclude" in message
        return
    found = looked_at(stack, stills(4, as_list=as_list, **options), **fields)
    assert (found["frames"], found["times"], found["fps"]) == (4, times, rate)
    assert not stack.encoder.probes and len(stack.encoder.requests) == 2


def test_sample_fps_of_qwens_guide_is_the_rate_of_listed_frames(stack):
    for rate, times in (("1", [0.5, 2.5]), (4, [0.1, 0.6]), ("0.5", [1.0, 5.0])):
        found = looked_at(stack, stills(4, as_list=True, sample_fps=rate), **of_media(fps=9))
        assert found["times"] == times


def test_each_video_has_its_own_places(stack):
    parts = [stills(2, fps=1, frames_indices=[0, 9]), stills(3, fps=1, frames_indices=[3, 5, 8])]
    usage = ask(stack, *parts, video(clip(**FILE)))["usage"]["prompt_tokens_details"]
    assert [each["times"] for each in usage["videos"][:2]] == [[4.5], [4.0, 8.0]]


# A file of 8 frames of 1080p, and the size that they are resized to. 1 token is 32 x 32 pixels.
SIZES = {
    "nothing": ({}, {}, [512, 960]),
    "the most": ({"max_pixels": 360 * 420}, {}, [288, 512]),
    "the most of all": ({"total_pixels": 300 * 1024}, {}, [192, 352]),
    "the guide's": (
        {"min_pixels": 4 * 1024, "max_pixels": 256 * 1024, "total_pixels": 20480 * 1024}, {},
        [384, 672],
    ),
    "in the URL": ({"video_url": {"max_pixels": 360 * 420}, "max_pixels": 9}, {}, [288, 512]),
    "of the loader": ({}, of_media(max_pixels=360 * 420), [288, 512]),
    "of all videos": ({}, of_processor(total_pixels=300 * 1024), [192, 352]),
    "the processor's size": ({}, of_processor(max_pixels=8 * 360 * 420), [288, 512]),
    "the part's before": ({"max_pixels": 360 * 420}, of_processor(max_pixels=9999), [288, 512]),
    "images' alone": ({}, {"max_pixels": 9999}, [512, 960]),
    "capped and less": ({"cap_pixels_per_frame": True, "max_pixels": 360 * 420}, {}, [288, 512]),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_pixels_of_a_clips_frames(stack, name):
    options, fields, size = SIZES[name]
    part = video(clip(8, 2.0, height=1080, width=1920))
    part |= options | {"video_url": part["video_url"] | options.get("video_url", {})}
    found = looked_at(stack, part, **fields)
    assert found["size"] == size
    assert found["tokens"] == 4 * size[0] * size[1] // 1024


def test_small_frames_are_enlarged_on_request(stack):
    small = video(clip(4, 2.0, height=64, width=64))
    assert looked_at(stack, small)["size"] == [64, 64]
    assert looked_at(stack, {**small, "min_pixels": 128 * 1024})["size"] == [384, 384]
    fields = of_processor(min_pixels=4 * 128 * 1024)
    assert looked_at(stack, small, **fields)["size"] == [384, 384]


FOUR = [0, 1, 2, 3]
# By name: the part, fields of the request, the field that the error names, words of its message.
REFUSED = {
    "one frame": (video(clip(), num_frames=1), {}, f"{PLACE}.num_frames", "at least 2"),
    "no frame": (video(clip()), of_media(num_frames=0), f"{MEDIA}.video.num_frames", "-1 for all"),
    "below all": (video(clip(), num_frames=-2), {}, f"{PLACE}.num_frames", ">= -1"),
    "one of a list": (video(clip()), of_processor(num_frames=[1]), f"{PROCESSOR}.num_frames", "2"),
    "a rate and a number": (
        {"type": "video_url", "video_url": {"url": clip(), "fps": 1, "num_frames": 4}}, {},
        f"{PLACE}.video_url.fps", "exclude"),
    "all of a long file": (video(clip(num_frames=900)), of_media(num_frames=-1), PLACE, "900"),
    "no boolean": (video(clip(), do_sample_frames="yes"), {}, f"{PLACE}.do_sample_frames", "bool"),
    "no pixels": (video(clip(), total_pixels=0), {}, f"{PLACE}.total_pixels", ">= 1"),
    "a least above the most": (
        video(clip(), min_pixels=9), of_media(max_pixels=8), f"{PLACE}.min_pixels", "max_pixels 8"),
    "places of a file": (video(clip(), frames_indices=FOUR), {}, f"{PLACE}.frames_indices", "file"),
    "a total of a file": (video(clip()), of_media(total_num_frames=9),
                          f"{MEDIA}.video.total_num_frames", "file"),
    "a duration of a file": (video(clip(), duration=9), {}, f"{PLACE}.duration", "file"),
    "a sample_fps of a file": (
        {"type": "video", "video": clip(), "sample_fps": 1}, {}, f"{PLACE}.sample_fps", "file"),
    "too few places": (stills(4, frames_indices=[0, 1, 2]), {}, f"{PLACE}.frames_indices", "3"),
    "too many places": (stills(3), of_media(frames_indices=FOUR),
                        f"{MEDIA}.video.frames_indices", "4 places for 3"),
    "no places": (stills(4, frames_indices=[]), {}, f"{PLACE}.frames_indices", ">= 1"),
    "a place before": (stills(2, frames_indices=[-1, 4]), {},
                       f"{PLACE}.frames_indices[0]", ">= 0"),
    "a place between": (stills(2, frames_indices=[0, 1.5]), {},
                        f"{PLACE}.frames_indices[1]", "int"),
    "a place behind": (stills(2, frames_indices=[0, 9], total_num_frames=9), {},
                       f"{PLACE}.total_num_frames", "below 10"),
    "a total that is too small": (stills(4, total_num_frames=3), {},
                                  f"{PLACE}.total_num_frames", "below 4"),
    "a total of none": (stills(4, total_num_frames=0), {}, f"{PLACE}.total_num_frames", ">= 1"),
    "a negative duration": (stills(4, duration=-1), {}, f"{PLACE}.duration", ">= 0"),
    "a short duration": (stills(4, total_num_frames=90000, duration=0.1), {},
                         f"{PLACE}.duration", "over 1000"),
    "places that are sampled": (
        stills(4, frames_indices=FOUR), of_processor(do_sample_frames=True),
        f"{PROCESSOR}.do_sample_frames", "frames_indices"),
    "frames that are sampled": (
        stills(40, fps=10), of_processor(fps=2, do_sample_frames=True), PLACE, ""),
    "fewer frames": (stills(20), of_media(fps=10, do_sample_frames=True), PLACE, "left out"),
    "no rate": (stills(4, as_list=True, sample_fps="0.0"), {}, f"{PLACE}.sample_fps", ""),
    "no number": (stills(4, as_list=True, sample_fps="fast"), {}, f"{PLACE}.sample_fps", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_obeyed_is_a_400_by_its_name(stack, name):
    part, fields, param, text = REFUSED[name]
    status, found, message = refusal(stack, part, **fields)
    assert (status, found) == (400, param), message
    assert text in message
    assert not stack.decoder.submits
