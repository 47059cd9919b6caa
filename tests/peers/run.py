"""`make peers`: vLLM's own server tests against the gateway with a scripted model.

VLLM_SOURCE names an unpacked vLLM; without it, its repository is cloned at the tag below. The tests
run in an environment of their own under .clients/. Prints a table; the exit status is 1 if fewer
cases pass than --least, or if a field of vLLM's requests is one that no probe sends.
"""

import argparse
import os
import re
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.peers.fields import unprobed  # noqa: E402

PLACE = ROOT / ".clients"
REPOSITORY, TAG = "https://github.com/vllm-project/vllm", "v0.33.0"
_OPENAI = "entrypoints/openai"
# Without video, audio, LoRA adapters, prompt embeddings, pooling, and a fuzzer.
FILES = (
    *(f"{_OPENAI}/chat_completion/test_{name}.py" for name in (
        "chat", "chat_completion", "chat_echo", "chat_logit_bias_validation",
        "completion_with_function_calling", "enable_force_include_usage", "extra_content_fields",
        "include_reasoning", "logprob_token_ids", "root_path", "thinking_token_budget",
    )),
    *(f"{_OPENAI}/completion/test_{name}.py" for name in (
        "completion", "prompt_validation", "token_in_token_out",
    )),
    f"{_OPENAI}/models/test_models.py",
    *(f"{_OPENAI}/responses/test_{name}.py" for name in (
        "basic", "errors", "function_call", "parsable_context", "simple", "stateful",
        "structured_output",
    )),
    *(f"{_OPENAI}/test_{name}.py" for name in (
        "chunked_prompt", "return_token_ids", "return_tokens_as_ids",
    )),
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/multimodal/openai/chat_completion/test_vision.py",
    "entrypoints/multimodal/openai/responses/test_image.py",
    *(f"entrypoints/serve/tokenize/test_{name}.py" for name in (
        "tokenization", "tokenization_vlm", "tokenize_then_chat_vlm",
    )),
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/tool_parsers/test_hermes_tool_parser.py",
)  # fmt: skip
TOOL_FILES = tuple(
    f"tool_use/test_{name}.py" for name in ("chat_completions", "parallel_tool_calls", "tool_calls")
)
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) tests/(\S+?)::(.*)$", re.MULTILINE)


def source_of() -> Path:
    """Where vLLM's tests are."""
    if given := os.environ.get("VLLM_SOURCE"):
        return Path(given)
    directory = PLACE / f"vllm-{TAG}"
    if not (directory / "tests" / FILES[0]).is_file():
        options = ["--depth", "1", "--filter=blob:none", "--sparse", "--branch", TAG]
        subprocess.run(["git", "clone", "-q", *options, REPOSITORY, directory], check=True)
        subprocess.run(
            ["git", "-C", directory, "sparse-checkout", "set", "tests", "vllm/entrypoints"],
            check=True,
        )
    return directory


def python_of() -> Path:
    """The environment of the tests, made or renewed if need be."""
    directory, wanted = PLACE / "peers", (HERE / "requirements.txt").read_text()
    python, made = directory / "bin" / "python", directory / "made.txt"
    if not made.is_file() or made.read_text() != wanted:
        venv.create(directory, with_pip=True, clear=True)
        requirements = HERE / "requirements.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        made.write_text(wanted)
    return python


def run(python: Path, source: Path, confcutdir: str, *arguments: str) -> str:
    """What pytest says of some files."""
    command = [
        python, "-m", "pytest", "-c", os.devnull, "--rootdir=.", f"--confcutdir=tests/{confcutdir}",
        "-p", "vllm_plugin", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto",
        "--timeout", "90", "--continue-on-collection-errors", "-q", "-rpfE", "-W", "ignore",
        "--tb=line", *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ, "TRIPTYCH_PYTHON": sys.executable, "TRIPTYCH_ROOT": str(ROOT),
        "PYTHONPATH": f"{HERE}{os.pathsep}{source}",
    }  # fmt: skip
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    return result.stdout + result.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--least", type=int, default=0, help="cases that have to pass")
    parser.add_argument("--log", type=Path, help="gets what pytest says")
    parser.add_argument("--only", default="", help="files whose names have this")
    options = parser.parse_args()
    source, python = source_of(), python_of()
    said = ""
    if files := [f"tests/{name}" for name in FILES if options.only in name]:
        said += run(python, source, "entrypoints", *files)
    if files := [f"tests/{name}" for name in TOOL_FILES if options.only in name]:
        said += run(python, source, "tool_use", "--models", "hermes", "-k", "hermes", *files)
    if options.log:
        options.log.write_text(said)
    outcomes: dict[str, str] = {}
    for outcome, file, case in _OUTCOME.findall(said):
        outcomes.setdefault(f"{file}::{case.partition(' - ')[0]}", outcome)
    passed, total = Counter[str](), Counter[str]()
    for case, outcome in outcomes.items():
        file = case.partition("::")[0]
        total[file] += 1
        passed[file] += outcome == "PASSED"
    print("| file | pass | of |\n|---|---:|---:|")
    for file in total:
        print(f"| {file} | {passed[file]} | {total[file]} |")
    print(f"| all | {passed.total()} | {total.total()} |")
    missing = unprobed(source)
    for path, names in missing.items():
        print(f"{path}: no probe of tests/contract/field_rows.py sends {', '.join(names)}")
    return int(passed.total() < options.least or "ERROR collecting" in said or bool(missing))


if __name__ == "__main__":
    sys.exit(main())
