"""Beside the conversation: its history, the settings, images, the header on a phone, the theme."""

import base64
from pathlib import Path

import httpx2
import pytest

from tests.e2e.browser import Page
from tests.e2e.chat_page import (
    ANSWER,
    ATTACHED,
    LAST,
    PHONE,
    WIDE,
    answers,
    ask,
    finish,
    open_page,
    png,
    prompt,
    questions,
)
from tests.gateway_stack import GatewayStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NOTICE = "document.getElementById('notice').innerText"
KEPT = "[...document.querySelectorAll('#kept .name')].map(name => name.textContent)"


def kept(page: Page) -> list[str]:
    """The titles in the history, newest first."""
    page.click("#open-history")
    page.wait_for("document.getElementById('history').open")
    return page.evaluate(KEPT)


def reload(page: Page, stack: GatewayStack) -> None:
    page.open("about:blank#reload")
    open_page(page, stack)


def test_a_conversation_is_kept_over_a_reload(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    answers(stack, "A **red** circle.")
    page.choose_files("#file", [png(tmp_path / "a.png")])
    page.wait_for(f"{ATTACHED} === 1")
    ask(page, "What is it?")
    finish(page)
    source = page.evaluate("document.querySelector('.turn img').src")
    reload(page, stack)
    page.wait_for(f"{ANSWER} === 'A red circle.'")
    assert questions(page) == ["What is it?"]
    assert page.evaluate("document.querySelector('.turn img').src") == source
    assert "total" in page.evaluate(f"{LAST}.querySelector('.times').textContent")
    ask(page, "Really?")
    finish(page)
    assert len(stack.decoder.submits[-1].images) == 1
    assert "What is it?" in prompt(stack)
    page.evaluate("sessionStorage.clear()")  # as in a new tab
    reload(page, stack)
    assert questions(page) == []
    assert kept(page) == ["What is it?"]


def test_kept_conversations_are_opened_and_deleted(page: Page, stack: GatewayStack) -> None:
    for question in ("First?", "Second?", "Third?"):
        ask(page, question)
        finish(page)
        page.evaluate("document.getElementById('clear').click()")
    assert kept(page) == ["Third?", "Second?", "First?"]
    page.click("#kept li:nth-child(3) .row")
    page.wait_for("document.querySelectorAll('.turn').length === 2")
    assert questions(page) == ["First?"]
    assert kept(page) == ["Third?", "Second?", "First?"]
    page.click("#kept li:nth-child(3) .delete")
    page.wait_for("document.querySelectorAll('#kept li').length === 2")
    assert questions(page) == []
    page.click("#delete-all")
    assert page.evaluate("document.getElementById('delete-all').innerText") == "Really delete all?"
    assert page.evaluate(KEPT) == ["Third?", "Second?"]
    page.click("#delete-all")
    page.wait_for("document.querySelectorAll('#kept li').length === 0")
    reload(page, stack)
    assert kept(page) == []
    assert "will be listed here" in page.evaluate("document.getElementById('history').innerText")


def test_conversations_are_found_renamed_and_saved(page: Page, stack: GatewayStack) -> None:
    for question, answer in (("Cats?", "They purr."), ("Dogs?", "They **bark**."), ("Owls?", "")):
        answers(stack, answer)
        ask(page, question)
        finish(page)
        page.evaluate("document.getElementById('clear').click()")
    assert kept(page) == ["Owls?", "Dogs?", "Cats?"]
    page.type("#search", "they BARK")  # no word of a title
    page.wait_for(f"{KEPT}.length === 1")
    assert page.evaluate(KEPT) == ["Dogs?"]

    page.evaluate(
        """(() => {
          window.saved = [];
          URL.createObjectURL = blob => { window.blob = blob; return "#saved"; };
          HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); };
        })()"""
    )
    page.click("#kept .save")
    assert page.evaluate("window.saved") == ["Dogs.md"]
    assert page.evaluate("window.blob.text()") == "# Dogs?\n\n## Dogs?\n\nThey **bark**.\n"

    page.click("#kept .rename")
    assert page.evaluate("document.activeElement.value") == "Dogs?"
    page.call("Input.insertText", text="Of wolves")
    page.press("Escape")
    assert page.evaluate("document.getElementById('history').open")
    assert page.evaluate(KEPT) == ["Dogs?"]
    page.click("#kept .rename")
    page.call("Input.insertText", text="Of wolves")
    page.press_enter()
    page.wait_for(f"{KEPT}[0] === 'Of wolves'")
    page.click("#kept .row")
    page.wait_for("document.querySelectorAll('.turn').length === 2")
    ask(page, "And foxes?")  # which writes the conversation again
    finish(page)
    reload(page, stack)
    assert kept(page) == ["Of wolves", "Owls?", "Cats?"]
    page.type("#search", "no such")
    page.wait_for(f"{KEPT}.length === 0")
    assert "No conversation has" in page.evaluate("document.getElementById('history').innerText")


def test_what_is_deleted_while_it_is_answered_stays_deleted(
    page: Page, stack: GatewayStack
) -> None:
    answers(stack, "Slow. " * 100)
    stack.decoder.delay_s = 0.05
    ask(page, "Slowly?")
    page.wait_for(f"{ANSWER}")
    assert kept(page) == ["Slowly?"]
    page.click("#delete-all")
    page.click("#delete-all")
    page.wait_for("document.querySelectorAll('#kept li').length === 0")
    stack.wait(lambda: not stack.decoder.running)
    page.wait_for("document.getElementById('send').textContent === 'Send'")
    page.press("Escape")
    assert kept(page) == []


def test_a_question_is_kept_though_its_answer_was_not(page: Page, stack: GatewayStack) -> None:
    answers(stack, "Slow. " * 100)
    stack.decoder.delay_s = 0.05
    ask(page, "Slowly?")
    page.wait_for(f"{ANSWER}")
    reload(page, stack)
    stack.decoder.delay_s = 0.0
    page.wait_for(f"!!{LAST}")
    assert questions(page) == ["Slowly?"]
    assert "There is no answer" in page.evaluate(f"{LAST}.innerText")
    answers(stack, "Here.")
    page.click(".turn:last-child .again")
    assert finish(page) == "Here."


def test_the_history_is_bounded_and_says_what_it_let_go(page: Page, stack: GatewayStack) -> None:
    """The newest 50 conversations; of their images, 64 MB of the newest."""
    found = page.evaluate(
        """(async () => {
          const history = await import("/static/history.js");
          const turn = (text, images = []) => ({text, images, answer: "Yes.", reasoning: ""});
          const image = (id, size) => ({id, name: id + ".png", url: "data:," + "x".repeat(size)});
          await history.keep({id: "old", turns: [turn("Old?", [image("small", 9)])]});
          await history.keep({id: "big", turns: [turn("Big?", [image("a", 40e6)])]});
          await history.keep({id: "new", turns: [turn("New?", [image("b", 30e6)])]});
          const images = [];
          for (const id of ["old", "big", "new"])
            images.push(!(await history.load(id)).turns[0].images[0].dropped);
          for (let i = 0; i < 49; i++) await history.keep({id: "n" + i, turns: [turn("?")]});
          const kept = await history.kept();
          return [images, kept.length, kept.at(-1).id];
        })()"""
    )
    assert found == [[True, False, True], 50, "new"]
    page.evaluate(
        """(async () => {
          const history = await import("/static/history.js");
          const images = [["a", 40e6], ["b", 30e6]].map(([id, size]) => (
            {id, name: id + ".png", url: "data:," + "x".repeat(size)}));
          await history.keep({id: "two", turns: [
            {text: "Two?", images, answer: "Yes.", reasoning: ""}]});
          sessionStorage.setItem("conversation", "two");
        })()"""
    )
    reload(page, stack)
    page.wait_for("document.querySelector('.turn .dropped') !== null")
    shown = page.evaluate("document.querySelector('.turn .dropped').textContent")
    assert shown.startswith("b.png: not kept")
    page.evaluate(  # what the server would say of the other
        """(() => {
          const real = window.fetch;
          window.fetch = (path, options) => {
            window.sent = JSON.parse(options.body).messages;
            return Promise.resolve(new Response("data: [DONE]\\n\\n"));
          };
        })()"""
    )
    ask(page, "And?")
    finish(page)
    parts = page.evaluate("window.sent[0].content.map(part => part.text ?? part.type)")
    assert parts == ["image_url", "(The image “b.png” is not here any more.)", "Two?"]


def test_a_browser_without_room_or_storage_says_so(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    page.evaluate(  # what a browser says, which checks its quota when it likes
        """(() => {
          const put = IDBObjectStore.prototype.put;
          IDBObjectStore.prototype.put = function (value) {
            if (this.name === "images") throw new DOMException("full", "QuotaExceededError");
            return put.call(this, value);
          };
        })()"""
    )
    page.choose_files("#file", [png(tmp_path / "a.png", 500)])
    page.wait_for(f"{ATTACHED} === 1")
    ask(page, "What is it?")
    finish(page)
    page.wait_for(f"{NOTICE}.includes('storage is full')")
    reload(page, stack)
    page.wait_for("document.querySelector('.turn .dropped') !== null")
    assert questions(page) == ["What is it?"]
    page.evaluate("IDBDatabase.prototype.transaction = () => { throw new Error('none'); }")
    ask(page, "And?")
    finish(page)
    kept(page)
    note = page.evaluate("document.getElementById('history-note').textContent")
    assert "keeps nothing" in note


def test_settings_are_sent_and_kept(page: Page, stack: GatewayStack) -> None:
    page.click("#open-settings")
    page.type("#set-system", "Be brief.")
    page.type("#set-temperature", "0.25")
    page.type("#set-length", "3")
    page.press("Escape")
    answers(stack, "One two three four five six.")
    ask(page, "What?")
    finish(page)
    assert "cut off" in page.evaluate(f"{LAST}.querySelector('.note').innerText")
    sampling = stack.decoder.submits[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 3)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt(stack)
    reload(page, stack)
    assert page.evaluate("document.getElementById('open-settings').title").endswith("defaults")
    page.click("#open-settings")
    page.evaluate("document.getElementById('set-temperature').value = ''")
    page.type("#set-temperature", "9")
    assert page.evaluate("document.getElementById('set-temperature').ariaInvalid") == "true"
    page.press("Escape")
    ask(page, "Again?")
    finish(page)
    assert stack.decoder.submits[-1].sampling.temperature == 0.25  # the last that was right
    page.click("#open-settings")
    page.click("#reset-settings")
    page.press("Escape")
    ask(page, "And now?")
    finish(page)
    assert stack.decoder.submits[-1].sampling.temperature == 1
    assert "Be brief." not in prompt(stack)


def test_thinking_is_switched_where_the_model_has_a_switch(page: Page, stack: GatewayStack) -> None:
    asked = stack.url + "/v1/models"
    assert httpx2.get(asked).json()["data"][0]["can_switch_thinking"] is False
    page.evaluate("localStorage.setItem('settings', JSON.stringify({thinking: 'off'}))")
    reload(page, stack)
    page.click("#open-settings")
    assert page.evaluate("document.getElementById('thinking').hidden")
    page.press("Escape")
    page.evaluate("import('/static/settings.js').then(settings => settings.showThinking(true))")
    page.click("#open-settings")
    assert not page.evaluate("document.getElementById('thinking').hidden")
    page.press("Escape")
    fields = "import('/static/settings.js').then(settings => settings.requestFields())"
    assert page.evaluate(fields) == {"enable_thinking": False}
    page.evaluate("import('/static/settings.js').then(settings => settings.showThinking(false))")
    assert page.evaluate(fields) == {}


def test_refused_files_are_named(page: Page, stack: GatewayStack, tmp_path: Path) -> None:
    pdf, broken = tmp_path / "notes.pdf", tmp_path / "broken.png"
    pdf.write_bytes(b"%PDF-1.7")
    broken.write_bytes(png(tmp_path / "whole.png").read_bytes()[:60])
    page.drop_file("main", pdf, "application/pdf")
    page.wait_for(f"{NOTICE}.includes('“notes.pdf” was not added: it is a PDF')")
    page.choose_files("#file", [tmp_path / "whole.png", broken])
    page.wait_for(f"{ATTACHED} === 1")
    page.wait_for(f"{NOTICE}.includes('“broken.png” was not added: it cannot be read')")
    assert page.evaluate("document.getElementById('notice').getAttribute('role')") == "alert"
    page.click("#notice button")
    assert page.evaluate("document.getElementById('notice').hidden")


def test_an_image_is_enlarged(page: Page, stack: GatewayStack, tmp_path: Path) -> None:
    page.choose_files("#file", [png(tmp_path / "a.png", 300)])
    page.wait_for(f"{ATTACHED} === 1")
    ask(page, "What is it?")
    finish(page)
    page.evaluate("document.querySelector('.turn .thumbnail').focus()")
    page.press_enter()
    page.wait_for("document.getElementById('viewer').open")
    page.wait_for("document.getElementById('large').naturalWidth === 300")
    shown = page.evaluate("document.getElementById('large').getBoundingClientRect().width")
    small = page.evaluate("document.querySelector('.turn img').getBoundingClientRect().width")
    assert shown > 2 * small
    page.press("Escape")
    page.wait_for("!document.getElementById('viewer').open")
    assert page.evaluate("document.activeElement.className") == "thumbnail"
    page.press_enter()
    page.wait_for("document.getElementById('viewer').open")
    page.click("#large")
    page.wait_for("!document.getElementById('viewer').open")


def test_a_phone_has_a_camera_and_a_header_that_fits(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    camera = "getComputedStyle(document.getElementById('camera')).display"
    assert page.evaluate(camera) == "none"
    page.resize(*PHONE, is_phone=True)
    open_page(page, stack)
    assert page.evaluate(camera) != "none"
    assert page.evaluate("document.querySelector('#photo[capture=environment]') !== null")
    page.choose_files("#photo", [png(tmp_path / "a.png")])
    page.wait_for(f"{ATTACHED} === 1")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    assert page.evaluate(
        """[...document.querySelectorAll("body > header > *, form > :not(.visually-hidden)")]
          .every(shown => {
            const box = shown.getBoundingClientRect();
            return box.left >= 0 && box.right <= innerWidth && box.height < 70;
          })"""
    )
    name = "document.getElementById('model')"
    assert page.evaluate(f"{name}.scrollWidth <= {name}.clientWidth")
    assert page.evaluate("document.querySelector('body > header').offsetHeight") < 64
    for panel in ("history", "settings"):
        page.click(f"#open-{panel}")
        page.wait_for(f"document.getElementById('{panel}').open")
        width = f"document.getElementById('{panel}').getBoundingClientRect().width"
        assert page.evaluate(width) <= PHONE[0]
        page.press("Escape")
    page.resize(*WIDE)


def test_the_theme_is_the_systems_or_the_chosen_one(page: Page, stack: GatewayStack) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def system(theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        page.call("Emulation.setEmulatedMedia", features=[feature])

    def choose(theme: str) -> None:
        field = "document.getElementById('set-theme')"
        page.evaluate(f"{field}.value = {theme!r}; {field}.dispatchEvent(new Event('input'))")

    system("light")
    light = background()
    system("dark")
    dark = background()
    assert light != dark
    page.click("#open-settings")
    choose("light")
    assert background() == light
    page.press("Escape")
    reload(page, stack)
    assert background() == light
    page.open(stack.url + "/docs")
    assert background() == light
    open_page(page, stack)
    system("light")
    page.click("#open-settings")
    choose("dark")
    assert background() == dark
    choose("")
    assert background() == light
    page.call("Emulation.setEmulatedMedia", features=[])


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(page: Page, theme: str) -> None:
    """WCAG AA: 4.5 to 1."""
    pairs = page.evaluate(
        f"""(() => {{
          document.documentElement.dataset.theme = {theme!r};
          const probe = document.body.appendChild(document.createElement("p"));
          const colour = name => {{
            probe.style.color = `var(--${{name}})`;
            return getComputedStyle(probe).color;
          }};
          const on = {{bg: ["ink", "soft", "accent", "string", "number", "keyword", "bad"],
            panel: ["ink", "soft", "accent", "bad"], mine: ["ink"],
            "bad-bg": ["ink", "soft", "bad"], accent: ["accent-ink"]}};
          const found = Object.entries(on).flatMap(([under, texts]) => texts.map(
            text => [text + " on " + under, colour(text), colour(under)]));
          probe.remove();
          return found;
        }})()"""
    )
    for name, text, under in pairs:
        high, low = sorted((luminance(text), luminance(under)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_everything_has_a_name_and_the_keyboard_reaches_it(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    page.choose_files("#file", [png(tmp_path / "a.png")])
    page.wait_for(f"{ATTACHED} === 1")
    answers(stack, "```py\nx = 1\n```")
    ask(page, "What?")
    finish(page)
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    for node in shown:
        role = node["role"]["value"]
        if role in ("button", "textbox", "link", "image", "combobox", "dialog", "checkbox"):
            assert node["name"]["value"].strip(), node
    page.evaluate("document.getElementById('open-history').focus()")
    reached = set()
    for _ in range(25):
        reached.add(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.id"))
        page.press("Tab")
    assert reached >= {
        "History", "Settings", "New chat", "Enlarge a.png", "Edit question", "Copy code",
        "Copy answer", "Regenerate answer", "Attach images or clips", "text", "send",
    }  # fmt: skip


def test_a_png_survives_its_way_through_the_page(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    path = png(tmp_path / "a.png")
    page.choose_files("#file", [path])
    page.wait_for(f"{ATTACHED} === 1")
    source = page.evaluate("document.querySelector('#attached img').src")
    assert base64.b64decode(source.partition(",")[2]) == path.read_bytes()
