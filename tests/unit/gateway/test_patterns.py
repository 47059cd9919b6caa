"""Patterns of schemas as expressions of whole texts: the same texts as by a search."""

import random
import re

import pytest

pytest.importorskip("llguidance")  # the decoder's
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.gateway.answers.patterns import escaped, full_match
from services.gateway.answers.text_formats import TEXT_FORMATS
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size

# Of ASCII, where ECMA-262 and Python agree.
PATTERNS = [
    "a", "^a", "a$", "^a$", "", "^$", "^", "ab|c", "^ab|c$", "^(ab|c)$", "(^a|b$)", "(a|^b)c",
    "^(a|b)+$", "a.c", "^a{2}$", "^a{1,}b{0,2}$", "^a??b+?$", "[abc]", "^[^abc]+$", "^[a-c]*$",
    "^\\d{2}$", "\\D", "^\\w+$", "\\W", "^\\s$", "^\\S$", "[\\d-]", "^[\\]\\\\^]$", "^[]a]",
    "a\\.b", "\\/", "/", "^\\x61$", "^\\u0061$", "^[\\u0061-c]$", "\\^a", "a\\$", "^[$^]$",
    "^(?:a(?:b|c))?$", "^(?<n>a)b$", "^(?P<n>a)b$", "a{", "^a{,2}$", "}", "]", "^[&&a]$",
    "^[a-]$", "^[--/]$", "^[~~]$", "^\\t$", "^\\-$", '"', "((a))", "^((a)|(b))$", "(^a$)|(b)",
    "a\\|b", "[|]", "[.]", "[(]",
]  # fmt: skip
ALPHABET = 'aabbcc01 _-.^$/\\|[](){}&~,\t\n"x'
NOT_SUPPORTED = {
    "(?=a)": "look-around", "(?<!a)b": "look-around", "\\bx": "word boundary", "(a)\\1": "back ref",
    "(?i)a": "flags", "a^b": "inside", "a$b": "inside", "(": "unbalanced", "a)": "unbalanced",
    "[a": "unbalanced", "[]": "empty class", "*a": "after nothing", "a**": "after a quantifier",
    "\\": "at the end", "\\ud800": "half", "[b-a]": "order", "\\q": "escape",
    "(^a)+": "inside", "(?:^a)?b": "inside",
    "(" * 60 + ")" * 60: "deeply",
}  # fmt: skip


@pytest.fixture(scope="module")
def matches(tmp_path_factory):
    """Whether the whole text is of an expression."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    end = added_ids()["<|im_end|>"]
    vocabulary = LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[end])

    def create(expression):
        grammar = f"start: T\nT: /(?:{expression})/"
        matcher = LLMatcher(vocabulary, grammar, limits=LLParserLimits())
        assert not matcher.is_error(), matcher.get_error()

        def check(text):
            ids = vocabulary.tokenize_str(text)
            copy = matcher.deep_copy()
            return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()

        return check

    return create


@pytest.mark.parametrize("pattern", PATTERNS)
def test_finds_what_a_search_finds(pattern, matches):
    python = pattern.replace("(?<n>", "(?P<n>").replace("^[]a]", "^[]a]")
    if pattern == "^[]a]":  # in ECMA-262 an empty class
        with pytest.raises(ValueError, match="empty class"):
            full_match(pattern)
        return
    if pattern == "^a{,2}$":  # in ECMA-262 no quantifier
        python = "^a\\{,2\\}$"
    search = re.compile(python.removesuffix("$") + "\\Z" if python.endswith("^$") else python, re.A)
    check, rng = matches(full_match(pattern)), random.Random(pattern)
    texts = ["", "a", "b", "ab", "c", "abc", "a{,2}", "xay", "aab", "\t", "12", "a.b", "a|b", "ac"]
    texts += ["".join(rng.choices(ALPHABET, k=rng.randint(1, 4))) for _ in range(150)]
    for text in texts:
        if text.endswith("\n") and "$" in pattern:
            continue  # Python's $ is before it, too
        assert check(text) == bool(search.search(text)), text


@pytest.mark.parametrize("pattern", NOT_SUPPORTED)
def test_what_no_automaton_does_is_refused(pattern):
    with pytest.raises(ValueError, match=NOT_SUPPORTED[pattern]):
        full_match(pattern)


def test_texts_are_themselves(matches):
    for text in ("", "a", 'a/b"\\', "中 🙂\n\x7f\0", "[^a-z&&]{2}", "`"):
        assert matches(escaped(text))(text)
        assert not matches(escaped(text))(text + "a")


GOOD = {
    "date": ["2024-02-28"], "time": ["23:59:59Z", "00:00:00.5+01:00"], "ipv4": ["127.0.0.1"],
    "date-time": ["2024-12-31T12:00:00-05:30"], "duration": ["P1Y2M3DT4H5M6S", "PT5S", "P3W"],
    "email": ["a.b+c@example.org"], "hostname": ["a-1.example.org"],
    "ipv6": ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "::"],
    "uri": ["https://example.org:80/a%20b?c=d#e", "mailto:a@b"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_formats_take_common_values(name, matches):
    check = matches(TEXT_FORMATS[name])
    assert all(map(check, GOOD[name]))
    assert not any(map(check, ["", "a b", " " + GOOD[name][0], GOOD[name][0] + " "]))
