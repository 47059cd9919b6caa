"""The reference pages are what the code has: each setting, option and endpoint, with a meaning."""

import re
from pathlib import Path

import pytest

from scripts import reference
from triptych.cli import _ELSEWHERE

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_a_page_is_what_the_code_has(page):
    assert page.read_text() == reference.PAGES[page](), "run scripts/reference.py"


@pytest.mark.parametrize("service", reference.SETTINGS)
def test_every_setting_has_a_meaning(service):
    cls = reference.SETTINGS[service]
    rows = list(reference.settings_rows(cls))
    assert len(rows) == len(cls.model_fields) > 15
    for variable, kind, _, meaning in rows:
        assert variable.startswith(f"{service.upper()}_") and kind
        assert len(meaning) > 8, variable
    unknown = reference.attributes(cls).keys() - cls.model_fields.keys()
    assert not unknown, f"described, but no settings: {unknown}"


def test_every_option_has_a_meaning():
    for name, (parser, text) in reference.commands().items():
        assert len(text) > 10, name
        for option, meaning in reference.command_rows(parser):
            assert len(meaning) > 5, (name, option)


def test_options_of_the_documents_exist():
    """Whatever a page tells people to type is understood."""
    known = {"--gpus", "--shm-size", "--build-arg"}  # docker's
    for parser, _ in reference.commands().values():
        known |= set(re.findall(r"--[a-z][\w-]*", parser.format_help()))
    found = 0
    for name in ("index", "serve", "tuning", "troubleshooting", "operations"):
        for option in re.findall(
            r"(?<![\w-])--[a-z][\w-]*", (reference.DOCS / f"{name}.md").read_text()
        ):
            found += 1
            assert option in known, f"{name}.md: {option}"
    assert found > 20


def test_each_option_of_vllm_is_one_here_or_refused_with_its_reason():
    page = (reference.DOCS / "from-vllm.md").read_text()
    theirs = {
        option
        for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
        for option in re.findall(r"`(--[\w-]+)", row)
    }
    ours = {
        word.rstrip(",")
        for row in reference.command_rows(reference.commands()["serve"][0])
        for word in row[0].strip("`").split()
        if word.startswith("--")
    }
    assert len(theirs) > 20
    assert theirs <= ours | _ELSEWHERE.keys()
    assert not ours & _ELSEWHERE.keys()


def test_variables_of_the_documents_exist():
    known = {row[0] for cls in reference.SETTINGS.values() for row in reference.settings_rows(cls)}
    former = {reference.DOCS / "before-0.2.md"}
    pages = set(reference.DOCS.glob("*.md")) - former
    for page in (ROOT / "README.md", *pages):
        for name in re.findall(
            r"\b(?:GATEWAY|ENCODER|DECODER)_[A-Z][A-Z_]*[A-Z]\b", page.read_text()
        ):
            assert name in known, f"{page.name}: {name}"
