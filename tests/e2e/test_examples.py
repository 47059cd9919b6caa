"""The programs of `examples/`, as their README runs them, against the demonstration model."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.scenes import COLOURS, SHAPES
from tests.e2e.serve_command import ServeCommand
from tests.gateway_stack import GatewayStack, LoopThread
from tests.noise import PATIENCE_S
from triptych.demo import SAMPLES

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
SECOND = "second/model"


def printed(url: str, program: str, *arguments: str | Path) -> str:
    """Runs a program to its end and returns what it printed."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / program, *arguments],
        env={"OPENAI_BASE_URL": f"{url}/v1", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def router(demo: ServeCommand, loop_thread: LoopThread, tmp_path: Path) -> Iterator[str]:
    """The URL of the router in front of the demonstration model and of a second model."""
    second = GatewayStack(
        loop_thread, tmp_path, text_only=True, num_encoders=0, log_level="ERROR",
        served_model_name=SECOND,
    )  # fmt: skip
    command = [sys.executable, EXAMPLES / "router.py", "0", demo.url, second.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.fullmatch(r"router: (http://\S+)\n", process.stdout.readline())
            assert found
            yield found[1]
        finally:
            process.terminate()
    second.close()


def test_the_programs_print_what_they_are_about(
    demo: ServeCommand, router: str, tmp_path: Path
) -> None:
    picture = SAMPLES / "shapes.png"
    shape, colour = "|".join(SHAPES), "|".join(COLOURS)

    said = printed(demo.url, "agent.py", picture, "How many of the circle are in stock?")
    assert re.fullmatch(rf"((in_stock|price)\(({shape})\) = \d+\n){{1,3}}answer: .+\n", said), said

    said = printed(demo.url, "extract.py", picture)
    assert re.fullmatch(rf"(({colour}) ({shape})\n){{1,4}}has text: (True|False)\n", said), said

    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("shapes.png", "count.png", "night.png"):
        shutil.copy(SAMPLES / name, folder)
    (folder / "broken.png").write_bytes(b"no picture")
    said = printed(demo.url, "folder.py", folder, "What colour is the circle?")
    rows = dict(line.split("\t") for line in said.splitlines())
    assert rows.keys() == {"broken.png", "count.png", "night.png", "shapes.png"}
    assert "ERROR" in rows.pop("broken.png") and all(rows.values())
    assert not any("ERROR" in answer for answer in rows.values())

    said = printed(demo.url, "clip.py", SAMPLES / "move.mp4", "What happens?")
    assert re.fullmatch(r".+\n\d+ tokens of prompt, \d+ of answer\n", said), said

    said = printed(router, "several_models.py", "Who are you?")
    assert re.fullmatch(rf"triptych-demo: .+\n{SECOND}: A red circle\.\n", said), said


def test_the_readme_has_a_command_for_each_program() -> None:
    commands = re.findall(r"`python examples/(\w+\.py)", (EXAMPLES / "README.md").read_text())
    programs = {path.name for path in EXAMPLES.glob("*.py")} - {"router.py"}
    assert set(commands) == programs and len(commands) == 5
