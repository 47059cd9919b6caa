"""The page of the API: a curl for each endpoint, to copy or to run."""

import json
import shlex
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.gateway.endpoints.openapi import OPERATIONS
from tests.e2e.browser import Page
from tests.e2e.chat_page import PHONE, WIDE
from tests.gateway_stack import MODEL, GatewayStack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SECTIONS = "document.querySelectorAll('#main section')"


@pytest.fixture
def docs(page: Page, stack: GatewayStack) -> Page:
    page.requests.clear()
    page.open(stack.url + "/docs")
    page.wait_for(f"{SECTIONS}.length > 0")
    return page


def status_of(title: str) -> int:
    """That an example's answer has: the response, the file or the batch that it names is nobody's,
    and the model of the stack generates text, so that the endpoints of models for search refuse it.
    """
    of_search = "embeddings", "pooling", "rerank", "score"
    if title.rpartition("/")[2] in of_search or title == "POST /v1/batches":
        return 400
    names = "responses", "media", "files", "batches"
    return 404 if any(f"/v1/{name}/{{name}}" in title for name in names) else 200


def test_each_endpoint_has_a_curl_that_works(docs: Page, stack: GatewayStack) -> None:
    found = docs.evaluate(
        f"""[...{SECTIONS}].map(section => [section.querySelector("h3").textContent,
          [...section.querySelectorAll(".code code")].map(code => code.textContent)])"""
    )
    assert [title for title, _ in found] == [" ".join(operation) for operation in OPERATIONS]
    with stack.client() as client:
        for title, curls in found:
            assert curls, title
            for curl in curls:
                words = shlex.split(curl.replace("\\\n", " "))
                url = next(word for word in words if word.startswith("http"))
                assert url.startswith(stack.url)
                body = words[words.index("-d") + 1] if "-d" in words else None
                headers = dict(
                    words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H"
                )
                method = title.split()[0]
                fields = [words[i + 1] for i, word in enumerate(words) if word == "-F"]
                form = dict(each.split("=", 1) for each in fields)
                given: dict[str, Any] = {"content": body} if not form else {
                    "data": {"purpose": form["purpose"]},
                    "files": {"file": (form["file"].removeprefix("@"), b"{}")},
                }  # fmt: skip
                answer = client.request(method, urlsplit(url).path, headers=headers, **given)
                assert answer.status_code == status_of(title), (curl, answer.text)
                if body is not None and "model" in json.loads(body):
                    assert json.loads(body)["model"] == MODEL
    assert all(url.startswith((stack.url, "data:")) for url in docs.requests)


def test_a_curl_can_be_copied_and_run(docs: Page, stack: GatewayStack) -> None:
    first = "document.querySelector('#main section .code')"
    docs.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    docs.call("Page.bringToFront")
    docs.click("#main section .code .copy")
    docs.wait_for(f"{first}.querySelector('.copied') !== null")
    copied = docs.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl {stack.url}/v1/chat/completions \\\n")
    docs.click("#main section .code .run")
    docs.wait_for(f"{first}.querySelector('.answer')?.textContent.includes('A red circle.')")
    assert docs.evaluate(f"{first}.querySelector('.answer').textContent").startswith("200 ")
    for number, operation in enumerate(OPERATIONS, 1):
        run = f"#main section:nth-of-type({number}) .code .run"
        docs.evaluate(f"document.querySelector({run!r}).click()")
        box = f"document.querySelector('#main section:nth-of-type({number}) .answer')"
        docs.wait_for(f"{box}?.textContent.startsWith('{status_of(' '.join(operation))} ')")


def test_fields_are_folded_into_their_endpoint(docs: Page) -> None:
    first = "document.querySelector('#createChatCompletion')"
    assert docs.evaluate(f"{first}.querySelectorAll('.field').length") == 0
    titles = docs.evaluate(
        f"[...{first}.querySelectorAll('details > summary > b')].map(each => each.textContent)"
    )
    assert titles == ["Request", "Answer", "Answer (each event of a stream)", "Error"]

    def field(name: str, inside: str) -> str:
        """Returns an expression for the box of a field."""
        return (
            f"[...{inside}.querySelectorAll(':scope > .field')]"
            f".find(each => each.querySelector('code').textContent === '{name}')"
        )

    request = f"{first}.querySelector('details')"
    docs.evaluate(f"{request}.open = true")
    messages = field("messages", request)
    docs.wait_for(f"{messages} !== undefined")
    assert "[Message] (at least 1" in docs.evaluate(f"{messages}.textContent")
    assert "The conversation: texts, images" in docs.evaluate(f"{messages}.textContent")
    message = f"{messages}.querySelector('details')"
    docs.evaluate(f"{message}.open = true")
    docs.wait_for(f"{field('role', message)} !== undefined")
    # What only the fields of other endpoints mention is not there.
    assert "ResponseNamespace" not in docs.evaluate(f"{first}.textContent")
    described = docs.evaluate(
        f"[...{request}.querySelectorAll('.field > p')].map(p => p.innerText)"
    )
    assert len(described) > 50 and all(described)
    assert not any("`" in text for text in described)


def test_the_list_of_endpoints_leads_to_each(docs: Page) -> None:
    names = docs.evaluate("[...document.querySelectorAll('#endpoints a')].map(a => a.textContent)")
    assert names == [" ".join(operation) for operation in OPERATIONS]
    docs.evaluate("document.querySelector('#endpoints a[href=\"#listModels\"]').click()")
    docs.wait_for("document.getElementById('listModels').getBoundingClientRect().top < 100")


def test_it_fits_a_phone(docs: Page) -> None:
    docs.resize(*PHONE, is_phone=True)
    assert docs.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    docs.resize(*WIDE)
