"""`make clients`: clients that nobody here wrote, against `triptych serve` with its own model.

Each runs in an environment of its own under .clients/, made on the first run from
requirements/*.txt and package.json. Prints a table; exit status 1 if a cell does not work.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACE = ROOT / ".clients"
IMAGE = ROOT / "demo" / "samples" / "shapes.png"
COLUMNS = (
    "text", "image", "streaming", "tools", "tools_streaming", "structured", "responses",
    "completions",
)  # fmt: skip
# script -> its requirements
SCRIPTS = {
    "with_openai.py": "openai", "with_anthropic.py": "openai", "with_langchain.py": "langchain",
    "with_llama_index.py": "llama_index", "with_litellm.py": "litellm",
    "with_pydantic_ai.py": "pydantic_ai", "with_instructor.py": "instructor",
    "with_lm_eval.py": "lm_eval", "with_vllm_bench.py": "vllm_bench",
    "with_agents.py": "openai", "with_litellm_proxy.py": "litellm_proxy",
    "with_openai.mjs": "node", "with_ai_sdk.mjs": "node",
    "with_haystack.py": "haystack", "with_dify.py": "dify", "with_retrieval.py": "retrieval",
}  # fmt: skip
# Scripts that need models for search, and these models in tests/tiny_search_models.py.
SEARCH = ("with_haystack.py", "with_dify.py", "with_retrieval.py")
SEARCH_MODELS = ("text_embedder", "vision_embedder", "text_reranker")
TIMEOUT_S = 300


def python_of(name: str) -> Path:
    """The environment of a requirements file, made or renewed if need be."""
    requirements = HERE / "requirements" / f"{name}.txt"
    directory, made = PLACE / name, PLACE / name / "made.txt"
    python = directory / "bin" / "python"
    if not made.is_file() or made.read_text() != requirements.read_text():
        venv.create(directory, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        made.write_text(requirements.read_text())
    return python


def node_of() -> tuple[Path, Path]:
    """Node and the directory beside its packages, whither the scripts are copied."""
    directory = PLACE / "node"
    directory.mkdir(parents=True, exist_ok=True)
    wanted, made = HERE / "package.json", directory / "package.json"
    if not made.is_file() or made.read_text() != wanted.read_text():
        shutil.rmtree(directory / "node_modules", ignore_errors=True)
        shutil.copy(wanted, made)
        options = ["--no-audit", "--no-fund", "--no-package-lock", "--silent"]
        subprocess.run(["npm", "install", *options], cwd=directory, check=True)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, directory)
    return directory / "node_modules" / ".bin" / "node", directory


def outcomes(script: str, environment: dict[str, str]) -> dict[str, str]:
    """Cell -> "works" or what went wrong."""
    if script.endswith(".mjs"):
        node, directory = node_of()
        command: list[object] = [node, directory / script]
    else:
        command = [python_of(SCRIPTS[script]), HERE / script]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    if result.returncode:
        return {"all": (result.stderr or "ended").strip().splitlines()[-1]}
    return json.loads(result.stdout.splitlines()[-1])


@contextmanager
def server(*arguments: object) -> Iterator[str]:
    """`triptych serve`, and its URL."""
    command = [sys.executable, "-m", "triptych", "serve", "--port", "0", "--gateways", "1"]
    command += map(str, arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"Triptych is ready: (\S+)", line)
        assert match, line
        yield match[1]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def search_servers() -> Iterator[dict[str, str]]:
    """A server for each tiny model for search, as variables of the scripts' environment: the URL,
    and the directory of the checkpoint.
    """
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found: dict[str, str] = {}
        for kind in SEARCH_MODELS:
            command = [sys.executable, "-m", "tests.tiny_search_models", kind, place / kind]
            subprocess.run(command, cwd=ROOT, check=True)
            directory, name = place / kind / "model", f"TRIPTYCH_{kind.upper()}"
            started = server(directory, "--served-model-name", "tiny")
            found |= {name: stack.enter_context(started), f"{name}_FILES": str(directory)}
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server, instead of one started here")
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), help="these scripts")
    options = parser.parse_args()
    scripts = [s for s in options.only if s != "with_vllm_bench.py" or "VLLM_SOURCE" in os.environ]
    for script in set(options.only) - set(scripts):
        print(f"{script}: left out, VLLM_SOURCE is not set", file=sys.stderr)
    table: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        url = options.url
        if url is None and set(scripts) - set(SEARCH):
            url = stack.enter_context(server())
        of_search = stack.enter_context(search_servers()) if set(scripts) & set(SEARCH) else {}
        environment = {
            **os.environ, **of_search, "TRIPTYCH_URL": url or "", "TRIPTYCH_IMAGE": str(IMAGE),
            "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }  # fmt: skip
        for script in scripts:
            table[script] = outcomes(script, environment)
            print(script, json.dumps(table[script]), file=sys.stderr)
    others = sorted({cell for row in table.values() for cell in row} - set(COLUMNS))
    columns = [*COLUMNS, *others]
    print("| client |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for script, row in table.items():
        cells = [{"works": "yes", None: ""}.get(row.get(c), "**no**") for c in columns]
        print(f"| {script} |", " | ".join(cells), "|")
    return int(any(value != "works" for row in table.values() for value in row.values()))


if __name__ == "__main__":
    sys.exit(main())
