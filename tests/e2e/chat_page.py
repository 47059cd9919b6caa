"""The chat page as its tests use it: a tab of a browser, on a gateway in front of fake services."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.e2e.browser import Page, open_browser
from tests.gateway_fixtures import _stack, loop_thread, stack
from tests.gateway_stack import GatewayStack

__all__ = ["_stack", "browser", "loop_thread", "page", "stack", "tab"]

WIDE, PHONE = (1280, 800), (390, 844)
IDLE = "document.getElementById('send').textContent === 'Send'"
LAST = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
ANSWER = f"{LAST}?.querySelector('.bubble').textContent"
ERROR = f"{LAST}?.querySelector('.error')"
_RANDOM = np.random.default_rng(0)
ATTACHED = "document.querySelectorAll('#attached img').length"


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def tab(browser: Page) -> Iterator[Page]:
    """A module's own: what one adds to each document of its tab is in no other's."""
    with browser.new_tab() as page:
        yield page


@pytest.fixture
def page(stack: GatewayStack, tab: Page) -> Iterator[Page]:
    """The page, as in a new tab of a browser that never saw it; ends without a word in the console,
    where a violation of the Content-Security-Policy would stand, too.
    """
    tab.resize(*WIDE)
    tab.open(stack.url + "/docs")
    tab.evaluate(
        """(async () => {
          localStorage.clear();
          sessionStorage.clear();
          const history = await import("/static/history.js");
          await history.forgetAll();
        })()"""
    )
    tab.console.clear()
    tab.requests.clear()
    open_page(tab, stack)
    yield tab
    lines = [line for line in tab.console if not line.startswith("Failed to load resource")]
    assert lines == [], lines  # those are of statuses that tests ask for


def open_page(page: Page, stack: GatewayStack) -> None:
    page.open(stack.url + "/")
    page.wait_for("document.getElementById('model')?.textContent.startsWith('tiny')")


def answers(stack: GatewayStack, text: str) -> None:
    """What the model says from now on."""
    stack.decoder.reply = stack.tokenizer.encode_text(text)


def ask(page: Page, question: str) -> None:
    page.type("#text", question)
    page.press_enter()


def finish(page: Page) -> str:
    """Waits for the end of the answer, or for an error, and returns the answer."""
    page.wait_for(f"{LAST}?.ariaBusy === 'false' && {IDLE}")
    return page.evaluate(ANSWER)


def questions(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.user .bubble')].map(b => b.innerText)")


def prompt(stack: GatewayStack, number: int = -1) -> str:
    """What the model was asked, as text."""
    ids = np.frombuffer(stack.decoder.submits[number].prompt_token_ids, "<i4")
    return b"".join(stack.tokenizer.token_bytes(int(i)) for i in ids).decode()


def click(page: Page, selector: str) -> None:
    page.click(selector)


def png(path: Path, side: int = 64) -> Path:
    """An image that no other test sends; of noise, so that its size is about that of its pixels."""
    pixels = _RANDOM.integers(0, 256, (side, side, 3), np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    path.write_bytes(data.getvalue())
    return path
