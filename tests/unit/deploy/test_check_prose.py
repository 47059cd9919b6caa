"""The check of prose finds each form of fragment, and nothing in whole sentences."""

from pathlib import Path

import pytest

from scripts import check_prose

WHOLE = '''"""Reads the scales of a layer.

Args:
    dtype: data type of the scales. None if the layer has no scales.
    rows: number of rows.
"""
'''


def counts(tmp_path: Path, text: str) -> dict[str, int]:
    """Returns the number of fragments by kind in a file with `text`."""
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    found = check_prose.count(tmp_path, ["module.py"])
    return {kind: len(of_kind.fragments) for kind, of_kind in found.items()}


def test_whole_sentences_pass(tmp_path: Path) -> None:
    assert counts(tmp_path, WHOLE) == {"docstrings": 0, "entries": 0, "sentences": 0}


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("Reads the scales", "What the scales", "docstrings"),
        ("Reads the scales", "Of the scales", "docstrings"),
        ("data type of", "of the", "entries"),
        ("None if the layer has no scales", "None: there is none", "entries"),
        (
            "Reads the scales of a layer.",
            "Reads one that others have unless it is none of them.",
            "sentences",
        ),
    ],
)
def test_each_form_of_fragment_is_found(tmp_path: Path, old: str, new: str, kind: str) -> None:
    assert old in WHOLE
    found = counts(tmp_path, WHOLE.replace(old, new))
    assert found[kind] == 1
    assert sum(found.values()) == 1


def test_functions_and_classes_are_examined(tmp_path: Path) -> None:
    text = 'class A:\n    """Of b."""\n\n    def c(self):\n        """How d."""\n'
    assert counts(tmp_path, text)["docstrings"] == 2
