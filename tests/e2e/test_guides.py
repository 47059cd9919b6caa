"""The programs of the guides and of the README run as they stand there, by the official client."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serve_command import ServeCommand
from triptych.demo import SAMPLES

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "http://127.0.0.1:8000"
# Page -> words that the output has. The demonstration model knows coloured shapes, and nothing of
# weather or the sky: there the output shows the form.
PAGES = {
    "README.md": r"red",
    "docs/images.md": r"(?s)circle.*\n.*move",
    "docs/structured-output.md": r"(?s)colour='.*\n(yes|no)\n\d\d:\d\d\n\d+\+\d+\n",
    "docs/tools.md": r'\{"city": "(Paris|Rome)", "degrees": 21\}',
}


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_a_page_run(demo: ServeCommand, page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks)
    assert ADDRESS in program
    shutil.copytree(SAMPLES, tmp_path / "demo" / "samples")
    shutil.copy(SAMPLES / "shapes.png", tmp_path / "photo.jpg")  # The bytes decide.
    shutil.copy(SAMPLES / "move.mp4", tmp_path / "clip.mp4")
    done = subprocess.run(
        [sys.executable, "-c", program.replace(ADDRESS, demo.url)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert re.search(PAGES[page], done.stdout), done.stdout
