"""The chat page takes a clip, shows its frames as they are sampled and what they cost, and asks."""

from pathlib import Path

import av
import numpy as np
import pytest

from services.common.frame_pairs import Clip
from tests.e2e.browser import Page
from tests.e2e.chat_page import LAST, PHONE, WIDE, answers, ask, finish, open_page, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COLOURS = [(220, 30, 30), (30, 200, 30), (30, 30, 220)]
CAPTIONS = "[...document.querySelectorAll('{} .clip figcaption')].map(c => c.textContent)"
COST = "document.querySelector('{} .clip .cost')?.textContent"
NOTICE = "document.querySelector('#notice').innerText"


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A WebM of 3 s, red, green and blue."""
    path = tmp_path_factory.mktemp("clips") / "colours.webm"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for index in range(30):
            pixels = np.full((64, 96, 3), COLOURS[index // 10], np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def colours(page: Page, place: str) -> list[int]:
    """The strongest channel of each drawn frame."""
    return page.evaluate(
        f"""[...document.querySelectorAll('{place} .clip canvas')].map(canvas => {{
          const {{data}} = canvas.getContext("2d").getImageData(40, 50, 1, 1);
          return [0, 1, 2].reduce((a, b) => data[a] > data[b] ? a : b);
        }})"""
    )


@pytest.mark.parametrize("way", ["chosen", "dropped"])
def test_a_clip_is_shown_as_it_is_sampled_and_asked_about(page, stack, clip, way):
    stack.encoder.any_clip = Clip(30, 10.0, (64, 96))
    answers(stack, "Three colours.")
    assert page.evaluate("document.getElementById('file').accept") == "image/*,video/*"
    if way == "chosen":
        page.choose_files("#file", [clip])
    else:
        page.drop_file("main", clip, "video/webm")
    page.wait_for("document.querySelectorAll('#attached .clip canvas').length === 3")
    assert page.evaluate(COST.format("#attached")) == "6 frames, 2.0 a second · 18 tokens"
    assert page.evaluate(CAPTIONS.format("#attached")) == ["0.3 s", "1.4 s", "2.6 s"]
    assert colours(page, "#attached") == [0, 1, 2]
    assert len(stack.encoder.probes) == 1 and not stack.encoder.requests
    ask(page, "Which colours?")
    assert finish(page) == "Three colours."
    assert "<1.4 seconds>" in prompt(stack)
    page.wait_for("document.querySelectorAll('.user .clip canvas').length === 3")
    assert colours(page, ".user") == [0, 1, 2]
    times = page.evaluate(f"{LAST}.querySelector('.times').textContent")
    assert "video 6 frames, 18 tokens" in times
    assert "3 of 3 pieces new" in times
    assert "unit" not in times
    page.evaluate("document.querySelector('#open-history').focus()")
    open_page(page, stack)  # again: the conversation of the tab comes back, with its clip
    page.wait_for("document.querySelectorAll('.user .clip canvas').length === 3")
    assert page.evaluate(COST.format(".user")) == "6 frames, 2.0 a second · 18 tokens"


def test_a_clip_can_be_played(page, stack, clip):
    stack.encoder.any_clip = Clip(30, 10.0, (64, 96))
    page.choose_files("#file", [clip])
    page.wait_for("document.querySelectorAll('#attached .clip canvas').length === 3")
    page.click("#attached .play")
    page.wait_for("document.getElementById('viewer').open")
    page.wait_for("document.getElementById('film').currentTime > 0.2")
    assert page.evaluate("document.getElementById('large').hidden")
    page.click("#film")
    assert page.evaluate("document.getElementById('viewer').open")  # its controls are there
    page.press("Escape")
    page.wait_for("!document.getElementById('film').src && document.getElementById('film').paused")


def test_a_strip_shows_that_it_scrolls(page, stack, clip):
    stack.encoder.any_clip = Clip(30, 1.0, (64, 96))
    page.resize(*PHONE, is_phone=True)
    page.choose_files("#file", [clip])
    page.wait_for("document.querySelectorAll('#attached .clip canvas').length === 8")
    frames = "document.querySelector('#attached .frames')"
    hidden = f"['left', 'right'].filter(side => {frames}.classList.contains('more-' + side)).join()"
    page.wait_for(f"{hidden} === 'right'")
    faded = f"getComputedStyle({frames}).maskImage"
    assert "calc(100% - 3rem)" in page.evaluate(faded) or "48px" in page.evaluate(faded)
    assert page.evaluate(f"{frames}.tabIndex") == 0
    page.evaluate(f"{frames}.scrollLeft = 20")
    page.wait_for(f"{hidden} === 'left,right'")
    page.evaluate(f"{frames}.scrollLeft = 9999")
    page.wait_for(f"{hidden} === 'left'")
    page.resize(*WIDE)


def test_a_clip_that_the_browser_cannot_play_is_asked_about(page, stack, tmp_path):
    stack.encoder.any_clip = Clip(8, 2.0, (64, 96))
    other = tmp_path / "other.webm"
    other.write_bytes(b"not for a browser")
    page.choose_files("#file", [other])
    page.wait_for("document.querySelector('#attached .clip .frames')?.textContent === 'other.webm'")
    assert page.evaluate(COST.format("#attached")).startswith("8 frames")
    assert page.evaluate("document.querySelector('#attached .play').hidden")


def test_a_file_that_is_no_video_is_refused_with_the_reason(page, stack, tmp_path):
    broken = tmp_path / "broken.webm"
    broken.write_bytes(b"nothing")
    page.choose_files("#file", [broken])
    page.wait_for(f"{NOTICE}.includes('broken.webm')")
    assert "not a video" in page.evaluate(NOTICE)
    assert page.evaluate("document.querySelectorAll('#attached .clip').length") == 0
    assert not stack.decoder.submits
