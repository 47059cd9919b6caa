"""For which cards kernels are compiled ahead."""

import subprocess
import sys
from pathlib import Path

import pytest

from triptych import cli, compile_kernels
from triptych.compile_kernels import architectures


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
    with pytest.raises(SystemExit, match="nvidia-smi finds no GPU here"):
        architectures("native", lambda: "")


@pytest.mark.parametrize("text", ["sm_90", "hopper", "9", "90a"])
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=f"{text} is not an architecture"):
        architectures(text, no_card)


def test_the_command_compiles_for_the_machines_cards_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arch = cli.build_parser().parse_args(["compile"]).arch
    monkeypatch.setenv("PATH", "")  # where nvidia-smi would be
    with pytest.raises(SystemExit, match="triptych compile: --arch native: nvidia-smi finds no"):
        compile_kernels.compile_for(arch)


def test_it_runs_alone_as_images_run_it(tmp_path: Path) -> None:
    alone = tmp_path / "compile_kernels.py"
    alone.write_text(Path(compile_kernels.__file__).read_text())
    done = subprocess.run(
        [sys.executable, alone, "--arch", "sm_90"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("triptych compile: --arch: sm_90 is not an architecture")
