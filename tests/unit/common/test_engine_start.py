"""What the engines need not do before their first request."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.cluster import DEMO_MODEL

# Both engines' models are made, loaded and used once.
_START = """
import sys
import torch
from pathlib import Path
from services.common.families import read_spec
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.encoder.engine_main import load_model
from services.encoder.settings import EncoderSettings

directory = Path(sys.argv[1])
create_runner(RunnerOptions(model_directory=directory, device="cpu"))
settings = EncoderSettings(model=directory, device="cpu")
load_model(read_spec(directory), settings, torch.device("cpu"), torch.float32)
compiler = {"torch._dynamo", "sympy", "transformers", "triton"}
print(sorted(compiler & set(sys.modules)))
"""


def test_engines_on_a_cpu_import_no_compiler() -> None:
    """torch's takes a second to import."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", _START, str(DEMO_MODEL)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
