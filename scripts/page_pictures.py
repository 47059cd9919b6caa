"""Takes the pictures of the chat page in docs/chat-page: `make pictures`.

A browser uses the page of a real gateway as a person would, at the width of a desk and of a phone.
The services behind the gateway are those of the tests and say what stands here: no model is needed,
and the times in the pictures are not those of one.
"""

import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from services.common.frame_pairs import Clip  # noqa: E402
from tests.e2e.browser import Page, open_browser  # noqa: E402
from tests.gateway_stack import GatewayStack, LoopThread  # noqa: E402
from triptych.demo import SAMPLES  # noqa: E402

OUT = _ROOT / "docs" / "chat-page"
# Inside of the window, and whether it is a phone's.
WINDOWS = {"wide": (1280, 800, False), "phone": (390, 844, True)}
SEEN = (
    "A red circle, a red triangle, a blue heart, a blue ring, an orange star and a pink triangle."
)
COUNTED = r"""There are **six** shapes, so $\binom{6}{2} = 15$ pairs of them:

```python
from collections import Counter

colours = ["red", "red", "blue", "blue", "orange", "pink"]
print(Counter(colours)["red"])  # 2
```
"""
_LAST = "[...document.querySelectorAll('.turn.assistant')].at(-1)"
_IDLE = f"document.getElementById('send').textContent === 'Send' && {_LAST}?.ariaBusy === 'false'"
_SETTLE_S = 0.5  # a window that was just scrolled or opened


class Photographer:
    """Uses the page in one window.

    Args:
        page: the tab.
        stack: the gateway and what is behind it.
        window: its name in `WINDOWS`.
    """

    def __init__(self, page: Page, stack: GatewayStack, window: str) -> None:
        self._page = page
        self._stack = stack
        self._window = window

    def take(self, folder: Path) -> None:
        """All scenes; `folder` is for files that are sent."""
        page = self._page
        width, height, is_phone = WINDOWS[self._window]
        page.resize(width, height, is_phone=is_phone)
        page.open(self._stack.url + "/")
        page.wait_for("document.getElementById('model')?.textContent.startsWith('example')")
        self._shot("first")
        self._ask("What does the text say?", "The word TOMATO.", SAMPLES / "word.png")
        self._click("clear")
        self._ask("How many stars are there?", "Three stars.", SAMPLES / "count.png")
        self._click("clear")
        self._ask("What do you see?", SEEN, SAMPLES / "shapes.png")
        self._ask("How many pairs are there, and how many are red?", COUNTED)
        page.wait_for("document.querySelector('math') !== null")
        self._shot("answer")
        self._click("open-history")
        page.wait_for("document.querySelectorAll('#kept li').length === 3")
        self._shot("history")
        page.press("Escape")
        self._click("open-settings")
        page.type("#set-system", "Answer in one sentence.")
        page.type("#set-temperature", "0.7")
        self._shot("settings")
        self._click("reset-settings")
        page.press("Escape")
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        self._shot("dark")
        page.evaluate("document.documentElement.dataset.theme = ''")
        self._click("clear")
        self._ask("What happens?", "The green ring moves to the left.", SAMPLES / "move.mp4")
        page.wait_for("document.querySelectorAll('.user .clip canvas').length >= 3")
        self._shot("clip")
        self._click("clear")
        strip = folder / "strip.png"
        Image.new("RGB", (3000, 6), "teal").save(strip)  # of a form that no model of ours takes
        self._ask("What is on this strip?", None, strip)
        self._shot("error")

    def _ask(self, question: str, answer: str | None, image: Path | None = None) -> None:
        """Without `answer` there is to be an error."""
        page = self._page
        if answer is not None:
            self._stack.decoder.reply = self._stack.tokenizer.encode_text(answer)
        if image is not None:
            page.choose_files("#file", [image])
            page.wait_for("document.querySelectorAll('#attached > figure').length === 1")
        page.type("#text", question)
        page.press_enter()
        page.wait_for(_IDLE)
        error = page.evaluate(f"{_LAST}.querySelector('.error').innerText")
        if bool(error) != (answer is None):
            raise SystemExit(f"{question} {error or 'was answered'}")

    def _click(self, name: str) -> None:
        self._page.evaluate(f"document.getElementById('{name}').click()")

    def _shot(self, scene: str) -> None:
        self._page.evaluate("document.activeElement.blur()")  # no blinking cursor
        time.sleep(_SETTLE_S)
        self._page.screenshot(OUT / f"{self._window}-{scene}.webp")


def main() -> None:
    """Takes all."""
    OUT.mkdir(exist_ok=True)
    thread = LoopThread()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        stack = GatewayStack(thread, folder, served_model_name="example", log_level="ERROR")
        stack.decoder.delay_s = 0.005
        stack.encoder.any_clip = Clip(30, 10.0, (64, 64))
        try:
            for window in WINDOWS:
                profile = folder / window
                profile.mkdir()
                with open_browser(profile) as page:
                    Photographer(page, stack, window).take(folder)
        finally:
            stack.close()
            thread.close()
    for path in sorted(OUT.glob("*.webp")):
        print(f"{path.relative_to(_ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
