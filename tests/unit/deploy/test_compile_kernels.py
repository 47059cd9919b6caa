"""For which cards kernels are compiled ahead."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))
from compile_kernels import architectures  # pyright: ignore


def no_card() -> str:
    raise AssertionError("the machine is not asked")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("9.0a", ["9.0a"]), ("9.0", ["9.0a"]), ("8.9", ["8.9"]), ("10.0", ["10.0a"]),
        ("8.9,9.0a, 8.0", ["8.0", "8.9", "9.0a"]), ("12.0 9.0", ["9.0a", "12.0a"]),
    ],
)  # fmt: skip
def test_a_list_is_sorted_and_completed(text: str, names: list[str]) -> None:
    assert architectures(text, no_card) == names


def test_native_is_what_the_cards_are() -> None:
    assert architectures("native", lambda: "9.0\n8.9\n9.0\n") == ["8.9", "9.0a"]
    with pytest.raises(SystemExit, match="nvidia-smi finds no card here"):
        architectures("native", lambda: "")


@pytest.mark.parametrize("text", ["sm_90", "hopper", "9", "90a"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=f"{text} is no architecture"):
        architectures(text, no_card)
