"""The pages have no defect of accessibility that axe-core finds, in any of their states."""

from importlib.resources import files
from pathlib import Path

import pytest

from services.common.frame_pairs import Clip
from tests.e2e.browser import Page
from tests.e2e.chat_page import answers, ask, finish, open_page, png
from tests.gateway_stack import GatewayStack
from triptych.demo import SAMPLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

AXE = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
# With a rule that is not run by default: a button's name has the words that it shows.
ALL = "{rules: {'label-content-name-mismatch': {enabled: true}}, resultTypes: ['violations']}"
COLOURS = "{runOnly: ['color-contrast'], resultTypes: ['violations']}"
ANSWER = """# One

## Two

`code`, **bold** and https://example.org

| a | b |
|---|--:|
| 1 | 2 |

- [x] done

```python
x = "a"  # a comment
```

$$\\sqrt{x}$$
"""


def violations(page: Page, rules: str = ALL) -> dict[str, list[str]]:
    """The elements that violate a rule, by the rule's name."""
    page.evaluate(f"{AXE}; 0")
    page.evaluate("document.getAnimations().forEach(each => each.finish())")
    return page.evaluate(
        f"""axe.run(document, {rules}).then(({{violations}}) => Object.fromEntries(
          violations.map(({{id, nodes}}) => [id, nodes.map(node => node.html.slice(0, 200))])))"""
    )


def test_a_defect_is_found(page: Page) -> None:
    """What the other tests look for would be seen."""
    page.evaluate(
        """(() => {
          const button = document.createElement("button"), text = document.createElement("p");
          text.append("pale");
          text.style.color = "#eee";
          document.querySelector("main").append(button, text);
        })()"""
    )
    assert violations(page).keys() == {"button-name", "color-contrast"}


@pytest.mark.parametrize(
    ("theme", "rules"), [("light", ALL), ("dark", COLOURS)], ids=["light", "dark"]
)
def test_no_state_of_the_chat_page_has_a_defect(
    page: Page, stack: GatewayStack, tmp_path: Path, theme: str, rules: str
) -> None:
    def check(state: str) -> None:
        assert violations(page, rules) == {}, state

    page.evaluate(f"localStorage.setItem('settings', JSON.stringify({{theme: {theme!r}}}))")
    open_page(page, stack)
    check("empty")
    stack.encoder.any_clip = Clip(30, 10.0, (64, 96))
    page.choose_files("#file", [png(tmp_path / "a.png"), SAMPLES / "move.mp4"])
    page.wait_for("document.querySelectorAll('#attached > figure').length === 2")
    check("attached")
    answers(stack, ANSWER)
    stack.decoder.tokens_per_event = 64
    for question in ("What?", "And?"):
        ask(page, question)
        finish(page)
    page.wait_for("document.querySelectorAll('math').length === 2")
    check("conversation")
    stack.decoder.fail_after = (0, "internal_error")
    ask(page, "Why?")
    finish(page)
    check("error")
    for panel in ("settings", "history"):
        page.click(f"#open-{panel}")
        page.wait_for(f"document.getElementById('{panel}').open")
        check(panel)
        if panel == "history":
            page.click("#kept .rename")
            check("renaming")
            page.press("Escape")
        page.press("Escape")
    page.click(".turn:nth-child(1) .edit")
    check("editing")
    page.press("Escape")
    page.click(".turn:nth-child(1) .thumbnail")
    check("enlarged image")
    page.press("Escape")


def test_the_page_of_the_api_has_no_defect(page: Page, stack: GatewayStack) -> None:
    page.open(stack.url + "/docs")
    page.wait_for("document.querySelectorAll('#main section').length > 0")
    page.evaluate(  # of what is there a hundred times, the first is enough
        "document.querySelectorAll('#main section ~ section').forEach(each => each.remove())"
    )
    assert violations(page) == {}
    for _ in range(2):  # the fields of each body, and those of the objects in them
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        page.wait_for(
            "[...document.querySelectorAll('details[open]')].every(each => each.children[1])"
        )
    assert violations(page) == {}
