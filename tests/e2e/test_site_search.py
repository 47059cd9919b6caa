"""The search of the documentation, asked in a browser: the page that a user wants is first."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.browser import Page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / "build/site-tool/bin/mkdocs"
FIELD = "document.querySelector('[data-md-component=search-query]')"
RESULTS = "[...document.querySelectorAll('.md-search-result__item > a:first-of-type')]"
# Words that users look for -> the page that answers them.
PAGE_OF = {
    "install": "install.html",
    "quick start": "index.html",
    "multi gpu": "serve.html",
    "out of memory": "troubleshooting.html",
    "rate limit": "api.html",
    "api key": "api.html",
    "max-model-len": "tuning.html",
    "LoRA": "from-vllm.html",
    "video": "images.html",
    "structured output": "structured-output.html",
    "grafana": "compose.html",
    "quantization": "formats.html",
    "helm": "helm.html",
    "upgrade": "versions.html",
}


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the site, built from the checkout."""
    if not MKDOCS.exists():
        pytest.skip("`make site` installs what builds the site")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    handler = partial(_Silent, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def found(tab: Page, site: str, query: str) -> list[str]:
    """Returns the pages that the search lists, the best first."""
    if not tab.evaluate("location.href").startswith(site):
        tab.open(f"{site}/glossary.html")
        tab.wait_for(f"{FIELD} !== null")
        tab.evaluate(f"{FIELD}.focus()")
    for text, condition in (("", "=== 0"), (query, "> 0")):
        tab.evaluate(
            f"""{FIELD}.value = {json.dumps(text)},
            {FIELD}.dispatchEvent(new KeyboardEvent("keyup"))"""
        )
        tab.wait_for(f"{RESULTS}.length {condition}")
    links = tab.evaluate(f"{RESULTS}.map(a => a.getAttribute('href'))")
    return [Path(link.partition("?")[0].partition("#")[0]).name for link in links]


@pytest.mark.parametrize("query", PAGE_OF)
def test_the_page_that_a_user_wants_is_first(tab: Page, site: str, query: str) -> None:
    pages = found(tab, site, query)
    assert pages[0] == PAGE_OF[query]


def test_records_for_developers_are_not_found(tab: Page, site: str) -> None:
    pages = found(tab, site, "preemption")
    assert pages and not any(page.startswith(("0", "log", "history", "before")) for page in pages)
