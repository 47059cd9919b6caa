"""The chat page, in a real browser, over the real stack with the demonstration model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.browser import Page
from tests.e2e.serve_command import ServeCommand
from triptych.demo import SAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_LAST_ANSWER = "[...document.querySelectorAll('.turn.assistant .bubble')].at(-1)?.textContent"
_LAST_TURN = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
_LAST_TIMES = f"{_LAST_TURN}?.querySelector('.times:not([hidden])')"
_IDLE = "document.getElementById('send').textContent === 'Send'"


@pytest.fixture
def page(demo: ServeCommand, tab: Page) -> Iterator[Page]:
    """The page, as in a new tab."""
    tab.open(demo.url + "/docs")
    tab.evaluate("sessionStorage.clear()")
    tab.console.clear()
    tab.requests.clear()
    tab.open(demo.url + "/")
    tab.wait_for("document.getElementById('model')?.textContent.startsWith('triptych-demo')")
    yield tab
    assert tab.console == []


def send(page: Page, question: str) -> None:
    page.type("#text", question)
    page.press_enter()


def finish(page: Page) -> tuple[str, str]:
    """Waits for the end of the answer; returns it and the stage times under it."""
    page.wait_for(f"{_LAST_TIMES} && {_IDLE}")
    return page.evaluate(_LAST_ANSWER), page.evaluate(f"{_LAST_TIMES}.innerText")


def num_attached(page: Page, number: int) -> None:
    page.wait_for(f"document.querySelectorAll('#attached img').length === {number}")


def test_the_page_needs_nothing_from_outside(page: Page, demo: ServeCommand) -> None:
    assert page.evaluate("document.title") == "Triptych"
    assert page.requests
    assert all(request.startswith((demo.url, "data:", "blob:")) for request in page.requests)


def test_a_dropped_image_is_answered_in_a_stream_with_times(page: Page, tmp_path: Path) -> None:
    dropped = tmp_path / "shapes.png"
    with Image.open(SAMPLES / "shapes.png") as image:
        own = image.convert("RGB")  # no other test of this stack has sent it
    own.putpixel((0, 0), (1, 2, 3))
    own.save(dropped)
    page.evaluate(
        f"""(() => {{
          window.seen = [];
          new MutationObserver(() => window.seen.push({_LAST_ANSWER} ?? ""))
            .observe(document.getElementById("turns"), {{childList: true, subtree: true}});
        }})()"""
    )
    page.draw_each_event()
    page.drop_file("main", dropped)
    num_attached(page, 1)
    send(page, "What do you see?")
    answer, times = finish(page)
    assert "red circle" in answer
    grown = [text for text in page.evaluate("window.seen") if text]
    assert len(set(grown)) >= 3
    assert all(answer.startswith(text) for text in grown)
    for stage in ("encode", "transfer", "prefill", "first token", "total", "tokens"):
        assert stage in times
    assert "image 1 encoded" in times
    num_attached(page, 0)
    send(page, "What colour is the circle?")
    answer, times = finish(page)
    assert "red" in answer
    assert "image 1 cached" in times


def test_a_sample_of_the_demonstration_is_offered_and_answered(page: Page) -> None:
    offered = page.evaluate(
        "[...document.querySelectorAll('#examples button')].map(b => b.innerText)"
    )
    assert len(offered) == 4
    page.click("#examples button:nth-child(3)")
    num_attached(page, 1)
    page.wait_for("document.getElementById('text').value === 'What word is printed on it?'")
    page.evaluate("document.getElementById('form').requestSubmit()")
    answer, _ = finish(page)
    assert "TOMATO" in answer
    page.click("#clear")
    page.click("#examples button:nth-child(4)")
    page.wait_for("document.querySelectorAll('#attached .clip').length === 1")


def test_the_samples_are_those_of_the_demonstration() -> None:
    shipped = sorted(Path("services/gateway/static").glob("sample-*"))
    assert [path.name for path in shipped] == [
        "sample-count.png", "sample-move.mp4", "sample-shapes.png", "sample-word.png"
    ]  # fmt: skip
    for path in shipped:
        assert path.read_bytes() == (SAMPLES / path.name.removeprefix("sample-")).read_bytes()


def test_several_images_can_be_attached_and_removed(page: Page) -> None:
    names = ("first.png", "second.png", "word.png")
    assert page.evaluate("document.getElementById('attach').offsetParent !== null")
    page.choose_files("#file", [SAMPLES / name for name in names])
    num_attached(page, 3)
    page.evaluate("document.querySelector('#attached figure:nth-child(3) .remove').click()")
    num_attached(page, 2)
    send(page, "Which picture has a red cross?")
    answer, times = finish(page)
    assert "picture" in answer
    assert "image 2" in times
    assert "image 3" not in times


def test_a_question_without_an_image_shows_no_encode(page: Page) -> None:
    send(page, "Who are you?")
    answer, times = finish(page)
    assert answer
    assert "encode" not in times
    page.evaluate("document.getElementById('clear').click()")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
