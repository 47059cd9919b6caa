"""Markdown, code and formulas on the chat page: elements and text, never HTML of an answer."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.browser import Page
from tests.e2e.chat_page import ANSWER, LAST, PHONE, WIDE, answers, ask, finish
from tests.gateway_stack import GatewayStack
from tests.noise import least

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CODE = """```python
# says it
def say(word: str = "hi", times: int = 3) -> None:
    print(word * times)
```

```
1 if 2
```
"""
MARKDOWN = r"""# Title
A *red* **circle** and `a < b`,
1 < 2 & 3 * 4 * 5, snake_case_name, \*plain\*.

- one
- two [site](https://example.org/?a=1&b)
  1. nested

```python
print("<b>")
```
> said **so**

| a | b |
|---|---|
| 1 | `x` |
"""
HOSTILE = """<img src=x onerror="boom()"><script>boom()</script>
[x](javascript:boom()) ![i](https://example.org/i.png) [y](data:text/html,boom)
"""


# Of each, the page draws 100,000 characters in a fraction of a second; an expression that takes the
# square of a text's length takes at least ten seconds.
LONG = {
    "blanks in a heading": "'# a' + ' '.repeat(n) + 'b'",
    "blanks in a heading that ends with CR": "'#' + ' '.repeat(n) + '\\r'",
    "number signs in a heading": "'# ' + ' #'.repeat(n / 2) + 'x'",
    "blanks in an item that ends with CR": "'-' + ' '.repeat(n) + '\\r'",
    "blanks after a fence": "'```' + ' '.repeat(n) + '!'",
    "blanks in a table's second line": "'a|b\\n' + ' '.repeat(n) + '-x'",
    "dashes in a table's second line": "'a|b\\n' + ' -|'.repeat(n / 3) + 'x'",
    "growing runs of backticks":
        "Array.from({length: Math.sqrt(2 * n)}, (_, k) => '`'.repeat(k + 1)).join(' ')",
    "two runs of backticks": "'` `` ``` '.repeat(n / 9)",
    "brackets": "'['.repeat(n)",
    "brackets before a long address": "'['.repeat(n / 2) + '](' + 'x'.repeat(n / 2)",
    "openings of links": "'[a]('.repeat(n / 4)",
    "openings of displayed formulas": r"'\\['.repeat(n / 2)",
    "openings of formulas before an end": r"'\\('.repeat(n / 2) + '\\)'",
    "dollars": "'$a '.repeat(n / 3)",
    "escaped dollars": r"'$' + '\\$'.repeat(n / 2)",
    "asterisks": "'**a* '.repeat(n / 5)",
    "underscores": "' _a'.repeat(n / 3)",
    "tildes": "'~~a~'.repeat(n / 4)",
    "quotes within quotes": "'>'.repeat(n)",
    "items within items": "'- '.repeat(n / 2)",
    "lines of an item": "'- a\\n' + '  b\\n'.repeat(n / 4)",
    "escaped quotes in Python": r"""'```py\n' + '\\"'.repeat(n / 2)""",
    "escaped quotes in a string without an end": r"""'```c\n"' + '\\"'.repeat(n / 2)""",
    "escaped backticks in a string without an end":
        r"""'```js\n`a' + '\\`'.repeat(n / 2) + '\\'""",
    "openings of comments": "'```c\\n' + '/*'.repeat(n / 2)",
    "addresses": "'https://a.b '.repeat(n / 12)",
    "beginnings of addresses": "'http://'.repeat(n / 7)",
    "an address before punctuation": "'https://a' + ')'.repeat(n)",
    "addresses in angles without an end": "'<https://a '.repeat(n / 11)",
    "three asterisks": "'***a '.repeat(n / 5)",
    "runs of asterisks": "'a***'.repeat(n / 4)",
    "tasks": "'- [x] a\\n'.repeat(n / 8)",
    "openings of tags": "'```html\\n' + '<!--'.repeat(n / 4)",
}  # fmt: skip


def test_the_time_of_drawing_is_linear_in_the_text(page: Page) -> None:
    page.evaluate("window.n = 100000, 0")
    cases = ", ".join(f"[{name!r}, {text}]" for name, text in LONG.items())
    longest: dict[str, float] = {}

    def seconds() -> float:
        """Of the text that takes longest."""
        nonlocal longest
        times = page.evaluate(
            f"""import("/static/markdown.js").then(({{markdown}}) =>
            [{cases}].map(([name, text]) => {{
              const start = performance.now();
              markdown(document.createElement("div"), text);
              return [name, text.length, performance.now() - start];
            }}))"""
        )
        assert len(times) == len(LONG) and all(size > 90_000 for _, size, _ in times), times
        longest = {name: ms for name, _, ms in times if ms > 3000}
        return max(ms for _, _, ms in times) / 1000

    assert least(seconds, 3) <= 3, longest


@pytest.mark.parametrize(
    ("text", "html"),
    [  # CommonMark: a run of backticks ends at the next run of its length, or is text.
        ("`a`", "<code>a</code>"),
        ("``a ` b``", "<code>a ` b</code>"),
        ("`a``b`", "<code>a``b</code>"),
        ("``a`", "``a`"),
        ("`a``", "`a``"),
        (r"\``a`", "`<code>a</code>"),
        ("`a` ``b``", "<code>a</code> <code>b</code>"),
        ("[[a](http://x)", '<a href="http://x" target="_blank"'),
        ("[a\n](http://x)", '[a\n](<a href="http://x"'),
        ("![a](b)", "![a](b)"),
        (r"\[x", "[x"),
        ("**a*b**", "<strong>a*b</strong>"),
        ("# a ##", "<h2>a</h2>"),
        ("# a##", "<h2>a##</h2>"),
        ("# a\r", "<h2>a\r</h2>"),
        ("## a", "<h3>a</h3>"),
        ("### a", "<h4>a</h4>"),
        ("###### a", "<h6>a</h6>"),
        ("***a***", "<strong><em>a</em></strong>"),
        ("**a *b***", "<strong>a <em>b</em></strong>"),
        ("see https://a.org/b_c_(d). So", 'see <a href="https://a.org/b_c_(d)" target="_blank"'),
        ("(https://a.org/b), x", ">https://a.org/b</a>), x"),
        ("<https://a.org>", '<p><a href="https://a.org"'),
        ("https://, http://. ahttp://b", "<p>https://, http://. ahttp://b</p>"),
        ("`https://a.org`", "<code>https://a.org</code>"),
        ("[x](https://a.org) y", ">x</a> y"),
        ("- [ ] a", '<li class="task"><p><input type="checkbox" disabled="" aria-label="To do">'),
        ("- [x] a", 'aria-label="Done">a</p>'),
        ("- [y] a", "<li><p>[y] a</p></li>"),
        (
            "|a|b|c|\n|:-|-:|:-:|\n|1|2|3|",
            '<td>1</td><td style="text-align: right;">2</td><td style="text-align: center;">3</td>',
        ),
        ("``` py\t\nx\n``` ", "<span>py</span>"),
    ],
)
def test_inline_markdown_is_drawn(page: Page, text: str, html: str) -> None:
    drawn = page.evaluate(
        "import('/static/markdown.js').then(({markdown}) => "
        f"markdown(document.createElement('div'), {json.dumps(text)}).innerHTML)"
    )
    assert html in drawn, drawn


def test_markdown_is_elements_and_text(page: Page) -> None:
    def drawn(text: str, script: str) -> Any:
        page.evaluate(
            "import('/static/markdown.js').then(module => {"
            f"window.made = module.markdown(document.createElement('div'), {text!r}); }})"
        )
        return page.evaluate(script)

    html = drawn(MARKDOWN, "made.innerHTML")
    for part in (
        "<h2>Title</h2>", "<em>red</em>", "<strong>circle</strong>", "<code>a &lt; b</code>",
        "1 &lt; 2 &amp; 3 * 4 * 5, snake_case_name, *plain*.", "<li><p>one</p></li>",
        "<ol start=\"1\"><li><p>nested</p></li></ol>", '<span class="string">"&lt;b&gt;"</span>',
        "<blockquote><p>said <strong>so</strong></p></blockquote>",
        "<tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>x</code></td></tr>",
        'href="https://example.org/?a=1&amp;b"', 'rel="noopener noreferrer nofollow"',
    ):  # fmt: skip
        assert part in html, (part, html)
    assert drawn(HOSTILE, "made.querySelectorAll('img, script').length") == 0
    links = page.evaluate("[...made.querySelectorAll('a')].map(a => a.href)")
    assert links == ["https://example.org/i.png"]
    assert "<img src=x onerror=" in page.evaluate("made.textContent")
    deep = ">" * 5000 + "x\n" + "- " * 5000
    assert "x" in drawn(deep, "made.textContent")


def test_every_beginning_of_an_answer_can_be_drawn(page: Page) -> None:
    page.evaluate(f"window.text = {MARKDOWN!r}, 0")
    drawn = page.evaluate(
        """import("/static/markdown.js").then(({markdown}) => [...text].map((_, end) =>
          markdown(document.createElement("div"), text.slice(0, end + 1)).textContent.length))"""
    )
    assert len(drawn) == len(MARKDOWN) and drawn[-1] > 100


def test_code_is_coloured_and_stays_what_it_is(page: Page, stack: GatewayStack) -> None:
    answers(stack, CODE)
    ask(page, "How?")
    finish(page)
    spans = page.evaluate(
        "[...document.querySelectorAll('.code:first-of-type span[class]')]"
        ".map(s => [s.className, s.textContent])"
    )
    assert ["comment", "# says it"] in spans
    assert ["keyword", "def"] in spans
    assert ["string", '"hi"'] in spans
    assert ["number", "3"] in spans
    plain = page.evaluate("[...document.querySelectorAll('.code pre')].at(-1).innerHTML")
    assert plain == "<code>1 if 2</code>"  # of no language
    colours = page.evaluate(
        "['comment', 'string', 'number', 'keyword'].map("
        "kind => getComputedStyle(document.querySelector('.' + kind)).color)"
    )
    assert len(set(colours)) == 4


@pytest.mark.parametrize(
    ("language", "code", "kind", "part"),
    [
        ("js", "const a = `x ${1}`; // 'no'", "comment", "// 'no'"),
        ("sh", "echo a#b # c", "comment", "# c"),
        ("sql", "SELECT 'it''s' -- so", "comment", "-- so"),
        ("rust", "fn f<'a>(x: &'a str) {}", "keyword", "fn"),
        ("c++", 'int x = 0x1F; /* "s" */', "number", "0x1F"),
        ("html", '<p class="a">if</p>', "string", '"a"'),
        ("json", '{"a": true}', "keyword", "true"),
    ],
)
def test_languages(page: Page, language: str, code: str, kind: str, part: str) -> None:
    made = page.evaluate(
        f"""import("/static/code.js").then(({{codeBlock}}) => {{
          const pre = codeBlock({json.dumps(language)}, {json.dumps(code)}).querySelector("pre");
          return [pre.textContent, [...pre.querySelectorAll("span")].map(
            s => [s.className, s.textContent])];
        }})"""
    )
    assert made[0] == code
    assert [kind, part] in made[1]


def test_formulas_are_mathml_and_prices_are_not(page: Page, stack: GatewayStack) -> None:
    def loaded() -> list[str]:
        return [url for url in page.requests if url.endswith("/static/temml.min.js")]

    answers(stack, "It costs $5 and $10, `$x$` is code, 3 $ 4 $ 5.")
    ask(page, "How much?")
    assert finish(page) == "It costs $5 and $10, $x$ is code, 3 $ 4 $ 5."
    # The code's end may come later than the rest of it.
    page.evaluate(
        """import("/static/markdown.js").then(({markdown}) => {
          markdown(document.createElement("div"), "It costs $5 and `$x$");
        })"""
    )
    assert loaded() == []
    answers(
        stack,
        "Inline $E = mc^2$ and \\(a_1\\).\n\n$$\n\\frac{1}{2}\n$$\n\n\\[ \\sqrt{x} \\]\n\n"
        "Bad: $\\frac{$ and $\\nosuch{x}$.",
    )
    ask(page, "And?")
    finish(page)
    page.wait_for(f"{LAST}.querySelectorAll('math').length >= 4")
    assert page.evaluate(f"{LAST}.querySelectorAll('msup, mfrac, msqrt, msub').length") >= 4
    assert page.evaluate(f"{LAST}.querySelectorAll('.displayed math').length") == 2
    assert "Bad:" in page.evaluate(ANSWER)
    assert len(loaded()) == 1
    assert all(url.startswith((stack.url, "data:", "blob:")) for url in page.requests)


def ink(page: Page, tex: str) -> np.ndarray:
    """Which pixels a formula blackens, cut to those, as booleans of shape (height, width)."""
    page.evaluate(
        f"""import("/static/formulas.js").then(async ({{formula}}) => {{
          document.getElementById("drawn")?.remove();
          const box = formula({json.dumps(tex)}, true);
          box.id = "drawn";
          Object.assign(box.style, {{position: "fixed", inset: 0, zIndex: 9, padding: "40px",
            background: "white", color: "black", fontSize: "60px"}});
          document.body.append(box);
        }})"""
    )
    page.wait_for("document.querySelector('#drawn math')?.getBoundingClientRect().width")
    page.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame))")
    shot = base64.b64decode(page.call("Page.captureScreenshot")["data"])
    page.evaluate("document.getElementById('drawn').remove()")
    black = np.asarray(Image.open(io.BytesIO(shot)).convert("L")) < 128
    rows, columns = (np.flatnonzero(black.any(axis=axis)) for axis in (1, 0))
    return black[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def first_glyph(black: np.ndarray) -> np.ndarray:
    """The columns before the first gap between the glyphs of a line."""
    gaps = np.flatnonzero(~black.any(axis=0))
    glyph = black[:, : gaps[0]]
    rows = np.flatnonzero(glyph.any(axis=1))
    return glyph[rows[0] : rows[-1] + 1]


def test_roots_and_brackets_are_drawn_whatever_fonts_the_machine_has(
    page: Page, stack: GatewayStack
) -> None:
    """A root without its sign reads as a right formula of another value."""
    letter, root = ink(page, "x"), ink(page, r"\sqrt{x}")
    assert root.shape[0] > letter.shape[0]
    assert root.shape[1] > 1.5 * letter.shape[1]
    bar = root[: root.shape[0] // 6].any(axis=0)
    assert bar.sum() > letter.shape[1]  # a line over the whole of what is below the sign
    sign = root[:, : root.shape[1] - bar.sum()]
    assert sign.sum() > 0.3 * letter.sum()

    fraction = ink(page, r"\frac{a}{\frac{b}{c}}")
    assert ink(page, r"\sqrt{\frac{a}{\frac{b}{c}}}").shape[0] > fraction.shape[0]
    small = first_glyph(ink(page, "(x)")).shape[0]
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("|", "|")):
        grown = ink(page, rf"\left{opening}\frac{{a}}{{\frac{{b}}{{c}}}}\right{closing}")
        assert first_glyph(grown).shape[0] > max(0.9 * fraction.shape[0], 1.3 * small)
    assert [url for url in page.requests if ".woff" in url] == [f"{stack.url}/static/math.woff2"]


@pytest.mark.parametrize("tex", [r"\overline{x}", r"\underline{x}", r"\boxed{x}", r"\cancel{x}"])
def test_lines_beside_a_term_are_drawn(page: Page, tex: str) -> None:
    assert ink(page, tex).sum() > 1.1 * ink(page, "x").sum()


SCROLLING = f"""| method | memory consumption | vanilla baseline | another column |
|---|---|---|---|
| 1 | 2 | 3 | 4 |

```py
{"x = 1; " * 60}
```
"""


def test_a_phone_breaks_no_words_of_a_table_and_shows_what_scrolls(
    page: Page, stack: GatewayStack
) -> None:
    page.resize(*PHONE, is_phone=True)
    answers(stack, SCROLLING)
    ask(page, "What?")
    finish(page)
    heights = page.evaluate(
        f"[...{LAST}.querySelectorAll('th')].map(cell => cell.firstChild).map(text => {{"
        "const range = document.createRange(); range.selectNode(text);"
        "return [text.data.split(' ').length, range.getClientRects().length]; })"
    )
    assert all(lines <= words for words, lines in heights), heights
    for box in (".table", ".code pre"):
        found = page.evaluate(
            f"""(() => {{
              const box = {LAST}.querySelector("{box}");
              return [box.scrollWidth > box.clientWidth, box.tabIndex,
                getComputedStyle(box).backgroundAttachment];
            }})()"""
        )
        assert found == [True, 0, "local, local, scroll, scroll"]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    page.resize(*WIDE)


def test_lists_begin_with_a_dot_and_headings_have_sizes(page: Page, stack: GatewayStack) -> None:
    answers(stack, "# a\n\n## b\n\n### c\n\n- d\n  - e\n    - f\n")
    ask(page, "What?")
    finish(page)
    styles = page.evaluate(
        f"[...{LAST}.querySelectorAll('.markdown ul')].map(l => getComputedStyle(l).listStyleType)"
    )
    assert styles == ["disc", "circle", "square"]
    sizes = page.evaluate(
        f"""[...{LAST}.querySelectorAll("h2, h3, h4")].map(
          made => parseFloat(getComputedStyle(made).fontSize))"""
    )
    assert len(sizes) == 3 and sizes[0] > sizes[1] > sizes[2]


def test_finished_blocks_are_not_drawn_again(page: Page) -> None:
    kept = page.evaluate(
        """import("/static/markdown.js").then(({markdown}) => {
          const box = document.createElement("div");
          markdown(box, "one\\n\\n```js\\nlet a;\\n```\\n\\ntwo");
          const before = [...box.children];
          markdown(box, "one\\n\\n```js\\nlet a;\\n```\\n\\ntwo, three");
          return [...box.children].map((made, i) => made === before[i]);
        })"""
    )
    assert kept == [True, True, False]
