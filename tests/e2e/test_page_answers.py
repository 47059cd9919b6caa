"""Answers and errors on the chat page: how they look, and what can be done with them."""

import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.browser import Page
from tests.e2e.chat_page import (
    ANSWER,
    ATTACHED,
    ERROR,
    IDLE,
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
from tests.fakes import once
from tests.gateway_stack import GatewayStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = "One line of an answer.\n\n" * 60


def is_in_view(page: Page, element: str) -> bool:
    """Whether all of it lies in the part of the page that shows the conversation."""
    return page.evaluate(
        f"""(() => {{
          const box = {element}.getBoundingClientRect();
          const shown = document.getElementById("scroll").getBoundingClientRect();
          return box.height > 0 && box.top >= shown.top && box.bottom <= shown.bottom;
        }})()"""
    )


def error_of(page: Page) -> str:
    finish(page)
    page.wait_for(f"{ERROR}.innerText")
    return page.evaluate(f"{ERROR}.innerText")


BUTTONS = f"[...{ERROR}.querySelectorAll('button')].map(button => button.innerText)"


# Errors


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_an_error_is_in_view_and_says_what_to_do(
    page: Page, stack: GatewayStack, size: tuple[int, int], tmp_path: Path
) -> None:
    page.resize(*size, is_phone=size == PHONE)
    answers(stack, LONG)
    stack.decoder.tokens_per_event = 64
    ask(page, "First?")
    finish(page)
    stack.decoder.fail_after = (0, "internal_error")
    page.choose_files("#file", [png(tmp_path / "a.png")])
    page.wait_for(f"{ATTACHED} === 1")
    ask(page, "Second?")
    text = error_of(page)
    assert text.startswith("The server failed. Try again.")
    assert page.evaluate(f"{ERROR}.getAttribute('role')") == "alert"
    page.wait_for("document.fonts.ready.then(() => true)")
    assert is_in_view(page, ERROR)
    assert "internal_error" in page.evaluate(f"{ERROR}.querySelector('details').textContent")

    stack.decoder.fail_after = None
    answers(stack, "Here it is.")
    page.evaluate(f"[...{ERROR}.querySelectorAll('button')][0].click()")
    page.wait_for(f"{ANSWER} === 'Here it is.'")
    finish(page)
    assert page.evaluate(f"{ERROR}.hidden")
    assert questions(page) == ["First?", "Second?"]


def test_an_image_that_the_server_refuses_is_named(
    page: Page, stack: GatewayStack, tmp_path: Path
) -> None:
    small, large = png(tmp_path / "small.png"), png(tmp_path / "large.png", 700)
    assert large.stat().st_size > 1 << 20  # what this gateway takes
    ask(page, "Hello?")
    finish(page)
    page.choose_files("#file", [small, large])
    page.wait_for(f"{ATTACHED} === 2")
    ask(page, "What is this?")
    text = error_of(page)
    assert "“large.png” was refused" in text
    assert "remove the image" in text
    assert "messages[" not in text
    assert "small.png" not in text
    assert [*page.evaluate(BUTTONS)] == ["Edit question"]  # asking again cannot help
    strip = tmp_path / "strip.png"
    Image.new("RGB", (3000, 6)).save(strip)
    page.click("#clear")
    page.choose_files("#file", [strip])
    page.wait_for(f"{ATTACHED} === 1")
    ask(page, "What is this?")
    assert "3000 \u00d7 6 pixels" in error_of(page)


def test_a_stream_that_breaks_keeps_what_came(page: Page, stack: GatewayStack) -> None:
    answers(stack, "Half of an answer.")
    stack.decoder.fail_after = (4, "deadline_exceeded")
    ask(page, "What?")
    assert "longer than the server allows" in error_of(page)
    got = page.evaluate(ANSWER)
    assert got
    assert "Half of an answer.".startswith(got)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Promise.reject(new TypeError('Failed to fetch'))", "The server cannot be reached."),
        ("new Response('data: {\"choices\": []}\\n\\n')", "The connection ended before"),
        (
            'new Response(\'{"error": {"code": "overloaded", "message": "full"}}\', '
            "{status: 503, headers: {'retry-after': '7'}})",
            "Try again in 7 s.",
        ),
        ("new Response('<html>', {status: 502})", "A part of the server is missing"),
        (
            'new Response(\'{"error": {"code": "context_length_exceeded"}}\', {status: 400})',
            "Start a new chat",
        ),
    ],
)
def test_errors_are_in_a_persons_words(page: Page, answer: str, words: str) -> None:
    page.evaluate(f"window.fetch = async () => {answer}, 0")
    ask(page, "What?")
    text = error_of(page)
    assert words in text
    assert "Failed to fetch" not in text
    assert page.evaluate(f"{ERROR}.querySelectorAll('button').length") >= 2


def test_a_question_before_the_server_is_there_is_kept(page: Page, stack: GatewayStack) -> None:
    page.call("Page.addScriptToEvaluateOnNewDocument", source=(
        "if (sessionStorage.getItem('cut')) window.fetch = () => Promise.reject(new TypeError());"
    ))  # fmt: skip
    page.evaluate("sessionStorage.setItem('cut', 'yes')")
    page.open(stack.url + "/")
    page.wait_for("document.getElementById('model').textContent.includes('cannot be reached')")
    ask(page, "Anyone?")
    assert "no connection to the server" in page.evaluate(
        "document.getElementById('notice').innerText"
    )
    assert page.evaluate("document.getElementById('text').value") == "Anyone?"
    page.evaluate("sessionStorage.clear()")


# What can be done with an answer


CODE = """Take this:

```python
# says it
def say(word: str = "hi", times: int = 3) -> None:
    print(word * times)
```

```
1 if 2
```
"""


def listen(page: Page) -> None:
    """From now on what the page says to those who hear it, which it takes back soon, is kept."""
    page.evaluate(
        """(() => {
          window.said = [];
          const status = document.getElementById("status");
          new MutationObserver(() => window.said.push(status.textContent))
            .observe(status, {childList: true});
        })()"""
    )


def said(page: Page) -> list[str]:
    return [text for text in page.evaluate("window.said") if text]


def test_an_answer_and_its_code_can_be_copied(page: Page, stack: GatewayStack) -> None:
    answers(stack, CODE)
    ask(page, "How?")
    finish(page)
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    page.call("Page.bringToFront")
    listen(page)
    page.click(".code .copy")
    page.wait_for("document.querySelector('.code .copy.copied') !== null")
    code = page.evaluate("navigator.clipboard.readText()")
    assert code == CODE.split("```")[1].removeprefix("python\n").rstrip("\n")
    page.click(".turn:last-child .below .copy")
    page.wait_for("document.querySelector('.turn:last-child .below .copied') !== null")
    assert page.evaluate("navigator.clipboard.readText()") == CODE
    assert set(said(page)) == {"Copied"}


def test_copying_works_without_tls(page: Page, stack: GatewayStack) -> None:
    """There is no `navigator.clipboard` then."""
    answers(stack, "To be copied.")
    ask(page, "What?")
    finish(page)
    page.evaluate(
        """(() => {
          Object.defineProperty(navigator, "clipboard", {value: undefined});
          document.addEventListener("copy", () => { window.copied = getSelection().toString(); });
        })()"""
    )
    page.click(".turn:last-child .below .copy")
    page.wait_for("window.copied")
    assert page.evaluate("window.copied") == "To be copied."
    assert page.evaluate("document.querySelectorAll('body > textarea').length") == 0


def test_an_answer_can_be_generated_again(page: Page, stack: GatewayStack) -> None:
    answers(stack, "Red.")
    ask(page, "Which colour?")
    assert finish(page) == "Red."
    answers(stack, "Blue.")
    page.click(".turn:last-child .again")
    page.wait_for(f"{ANSWER} === 'Blue.' && {IDLE}")
    assert prompt(stack, 0) == prompt(stack, 1)
    assert questions(page) == ["Which colour?"]
    stack.decoder.fail_after = (0, "internal_error")
    page.click(".turn:last-child .again")
    assert "The server failed." in error_of(page)
    assert page.evaluate(ANSWER) == "Blue."  # nothing better came


def test_an_earlier_question_can_be_edited(page: Page, stack: GatewayStack, tmp_path: Path) -> None:
    answers(stack, "Fine.")
    page.choose_files("#file", [png(tmp_path / "a.png")])
    page.wait_for(f"{ATTACHED} === 1")
    for question in ("One?", "Two?", "Three?"):
        ask(page, question)
        finish(page)
    page.type("#text", "A draft")
    page.click(".turn:nth-child(1) .edit")
    assert page.evaluate("document.getElementById('text').value") == "One?"
    assert page.evaluate(ATTACHED) == 1
    assert page.evaluate("document.querySelectorAll('.replaced').length") == 6
    page.press("Escape")
    assert page.evaluate("document.getElementById('text').value") == "A draft"
    assert page.evaluate("document.querySelectorAll('.replaced').length") == 0
    assert page.evaluate(ATTACHED) == 0

    page.click(".turn:nth-child(3) .edit")
    page.evaluate("document.getElementById('text').value = ''")
    ask(page, "Second?")
    finish(page)
    assert questions(page) == ["One?", "Second?"]
    assert "Two?" not in prompt(stack)
    assert "Three?" not in prompt(stack)
    assert "One?" in prompt(stack)
    assert page.evaluate("document.getElementById('text').value") == "A draft"


# While and after


def test_tokens_per_second_are_shown(page: Page) -> None:
    chunks = [
        {"choices": [{"delta": {"content": "Hi"}}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 101,
                                  "total_tokens": 106},
         "stage_times_ms": {"prefill": 10, "first_token": 500, "total": 2500}},
    ]  # fmt: skip
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.evaluate(f"window.fetch = async () => new Response({events!r}), 0")
    ask(page, "What?")
    finish(page)
    line = page.evaluate(f"{LAST}.querySelector('.times summary').innerText")
    assert line.split() == ["50", "tokens/s", "first", "token", "500", "ms", "total", "2.50", "s"]


def test_the_cursor_stands_behind_the_last_word(page: Page, stack: GatewayStack) -> None:
    answers(stack, "Some words.\n\n" + "More of them. " * 50)
    stack.decoder.delay_s = 0.1  # 15 s in all
    ask(page, "What?")
    page.wait_for(f"{LAST}?.querySelectorAll('.bubble p').length > 1")
    cursor = f"getComputedStyle({LAST}.querySelector('.bubble.running > p:last-child'), '::after')"
    assert page.evaluate(f"{cursor}.content") == '""'
    assert page.evaluate(f"{cursor}.display") == "inline-block"
    page.press("Escape")
    finish(page)
    assert "You stopped this answer." in page.evaluate(f"{LAST}.innerText")


def test_an_empty_answer_is_called_so(page: Page, stack: GatewayStack) -> None:
    answers(stack, "")
    ask(page, "What?")
    finish(page)
    assert (
        page.evaluate(f"{LAST}.querySelector('.note').innerText") == "The model's answer is empty."
    )


def test_those_who_hear_the_page_are_told(page: Page, stack: GatewayStack) -> None:
    answers(stack, "A red circle.")
    may_answer = threading.Event()
    stack.decoder.before = once(may_answer.is_set)
    listen(page)
    ask(page, "What?")
    page.wait_for(f"{LAST}?.ariaBusy === 'true'")
    may_answer.set()
    finish(page)
    assert said(page) == ["Answering", "A red circle."]


def test_a_key_is_asked_for_and_used(page: Page, stack: GatewayStack) -> None:
    page.call("Page.addScriptToEvaluateOnNewDocument", source="""
      if (sessionStorage.getItem("locked")) {
        const real = window.fetch;
        window.fetch = (path, options) => options?.headers?.authorization === "Bearer right"
          ? real(path, options)
          : Promise.resolve(new Response('{"error": {"code": "invalid_api_key"}}', {status: 401}));
      }""")  # fmt: skip
    page.evaluate("sessionStorage.setItem('locked', 'yes')")
    page.open(stack.url + "/")
    page.wait_for("document.getElementById('settings').open")
    assert page.evaluate("document.activeElement.id") == "set-key"
    assert "needs an API key" in page.evaluate("document.getElementById('settings').innerText")
    page.call("Input.insertText", text="wrong")
    page.press_enter()
    page.wait_for("document.getElementById('key-state').innerText === 'This key was not accepted.'")
    assert page.evaluate("document.getElementById('set-key').ariaInvalid") == "true"
    page.evaluate("document.getElementById('set-key').value = ''")
    page.call("Input.insertText", text="right")
    page.click("#key-form button")
    page.wait_for("document.getElementById('model').textContent.startsWith('tiny')")
    page.wait_for("!document.getElementById('settings').open")
    answers(stack, "Open.")
    ask(page, "Hello?")
    assert finish(page) == "Open."
    page.evaluate("sessionStorage.setItem('key', 'wrong')")
    ask(page, "Still?")
    assert "does not accept your API key" in error_of(page)
    page.evaluate(f"[...{ERROR}.querySelectorAll('button')][0].click()")
    assert "not accepted" in page.evaluate("document.getElementById('key-state').innerText")
    page.evaluate("sessionStorage.clear()")
    open_page(page, stack)


def stream_by_hand(page: Page) -> None:
    """From now on the answer has the events that `send(page, …)` writes."""
    page.evaluate(
        """(() => {
          const encoder = new TextEncoder();
          window.fetch = async (path, {signal}) => new Response(new ReadableStream({start(out) {
            window.put = text => out.enqueue(encoder.encode(`data: ${text}\\n\\n`));
            signal.onabort = () => out.error(new DOMException("stopped", "AbortError"));
          }}));
        })()"""
    )


def send(page: Page, **delta: str) -> None:
    page.wait_for("!!window.put")
    page.evaluate(f"put({json.dumps(json.dumps({'choices': [{'delta': delta}]}))})")


def test_a_model_that_thinks_is_seen_to_think(page: Page) -> None:
    summary = f"{LAST}.querySelector('.reasoning summary').innerText"
    thought, bubble = (f"{LAST}.querySelector('.{name}')" for name in ("thought", "bubble"))
    page.evaluate("window.now = 1e12; Date.now = () => window.now")
    stream_by_hand(page)
    ask(page, "What?")
    page.wait_for(f"{LAST} && !{bubble}.hidden")  # with the cursor, until something comes
    send(page, reasoning_content="First, look.\nThere is a red")
    page.wait_for(f"{thought}.innerText === 'There is a red'")
    assert page.evaluate(summary) == "Thinking… 0 s"
    assert page.evaluate(f"{bubble}.hidden")
    page.evaluate("window.now += 12_340")
    page.wait_for(f"{summary} === 'Thinking… 12 s'")  # though nothing comes
    send(page, reasoning_content=" circle.\n")
    page.wait_for(f"{thought}.innerText === 'There is a red circle.'")
    page.click(".turn:last-child .reasoning summary")
    page.wait_for(f"{thought}.hidden")  # the whole reasoning is open above
    send(page, content="Red.")
    page.wait_for(f"{ANSWER} === 'Red.'")
    assert page.evaluate(summary) == "Thought for 12.34 s"
    assert not page.evaluate(f"{bubble}.hidden")
    page.press("Escape")
    finish(page)


def test_the_stages_are_drawn_when_they_happened(page: Page) -> None:
    times = {"fetch": 100, "encode": 780, "transfer": 790, "queue": 800, "prefill": 100,
             "first_token": 1000, "total": 2500}  # fmt: skip
    chunks = [
        {"choices": [{"delta": {"content": "Hi"}}]},
        {"choices": [], "usage": {}, "stage_times_ms": times},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.evaluate(f"window.fetch = async () => new Response({events!r}), 0")
    ask(page, "What?")
    finish(page)
    bars = page.evaluate(
        f"""[...{LAST}.querySelectorAll(".track")].map(track => {{
          const all = track.getBoundingClientRect(), bar = track.firstChild.getBoundingClientRect();
          return [track.firstChild.className, ...[bar.left, bar.right].map(
            at => Math.round(100 * (at - all.left) / all.width))];
        }})"""
    )
    assert bars == [
        ["bar fetch", 0, 10], ["bar encode", 10, 88], ["bar transfer", 10, 89],
        ["bar queue", 10, 90], ["bar prefill", 90, 100],
    ]  # fmt: skip


def test_reasoning_is_folded_and_a_cut_answer_says_so(page: Page) -> None:
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "First, "}}]},
        {"choices": [{"delta": {"reasoning_content": "<b>look</b>."}}]},
        {"choices": [{"delta": {"content": "It is **re"}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {}, "stage_times_ms": {"total": 1}},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.evaluate(f"window.fetch = async () => new Response({events!r}), 0")
    ask(page, "What?")
    assert finish(page) == "It is **re"
    assert page.evaluate(f"{LAST}.querySelector('details').open") is False
    reasoning = f"{LAST}.querySelector('details div').textContent"
    assert page.evaluate(reasoning) == "First, <b>look</b>."
    assert "token limit" in page.evaluate(f"{LAST}.querySelector('.note').textContent")
