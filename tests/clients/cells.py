"""What every client is asked, and how its answers are printed: shared by the scripts `with_*.py`.

A script runs in an environment of its own, without Triptych: it reads TRIPTYCH_URL and prints one
JSON object, cell -> "works", or the error's first line.
"""

import base64
import contextlib
import io
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path

URL = os.environ["TRIPTYCH_URL"]
MODEL = "triptych-demo"
KEY = "no-key"
QUESTION = "What can you do?"
IMAGE = Path(__file__).parents[2] / "demo" / "samples" / "shapes.png"
IMAGE_URL = "data:image/png;base64," + base64.b64encode(IMAGE.read_bytes()).decode()
IMAGE_QUESTION = "What colour is the circle?"
IMAGE_ANSWER = "red"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CITIES = ("Paris", "Rome")
# The demonstration model repeats a call until it may not.
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


def report(**cells: Callable[[], object]) -> None:
    """Runs each cell, which asserts what it expects, and prints the outcomes."""
    outcomes: dict[str, str] = {}
    for name, cell in cells.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                cell()
            outcomes[name] = "works"
        except Exception as error:
            if os.environ.get("TRIPTYCH_TRACE"):
                traceback.print_exc()
            text = " ".join(str(error).split()) or repr(error)
            outcomes[name] = f"{type(error).__name__}: {text}"[:300]
    print(json.dumps(outcomes))
