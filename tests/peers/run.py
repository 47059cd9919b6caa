"""`make peers`: other systems' own server tests against the gateway with a scripted model.

The tests are those of vLLM, SGLang and llama.cpp (`suites.py`). VLLM_SOURCE, SGLANG_SOURCE and
LLAMA_CPP_SOURCE name checkouts; without them the repositories are fetched at pinned revisions. The
tests run in an environment of their own under .clients/. Prints a table for each suite. The exit
status is 1 if a case fails that `failures.toml` does not name with its reason, or if a field of
vLLM's requests is one that no probe sends.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.peers.fields import unprobed  # noqa: E402
from tests.peers.suites import SUITES, VLLM, Group, Suite  # noqa: E402

PLACE = ROOT / ".clients"
_OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR) (\S+?)(::.*)$", re.MULTILINE)


def source_of(suite: Suite) -> Path:
    """Returns the folder with the suite's repository, which is fetched if need be."""
    if given := os.environ.get(suite.variable):
        return Path(given).resolve()
    directory = PLACE / f"{suite.name}-{suite.revision[:12]}"
    if not (directory / suite.tests).is_dir():
        directory.mkdir(parents=True, exist_ok=True)

        def git(*words: str) -> None:
            subprocess.run(["git", "-C", str(directory), *words], check=True)

        git("init", "-q")
        git("remote", "add", "origin", suite.repository)
        git("sparse-checkout", "set", *suite.sparse)
        git("fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", suite.revision)
        git("checkout", "-q", "FETCH_HEAD")
    return directory


def python_of() -> Path:
    """Returns the Python of the tests' environment, which is made or renewed if need be."""
    directory, wanted = PLACE / "peers", (HERE / "requirements.txt").read_text()
    python, made = directory / "bin" / "python", directory / "made.txt"
    if not made.is_file() or made.read_text() != wanted:
        venv.create(directory, with_pip=True, clear=True)
        requirements = HERE / "requirements.txt"
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True)
        made.write_text(wanted)
    return python


def run(python: Path, source: Path, suite: Suite, group: Group, files: list[str]) -> str:
    """Runs some files of a group and returns what pytest says."""
    tests = source / suite.tests
    command = [
        python, "-m", "pytest", "-c", os.devnull, "--rootdir=.",
        f"--confcutdir={tests / group.confcutdir}", "-p", f"{suite.name}_plugin",
        "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--timeout", "90",
        "--continue-on-collection-errors", "-q", "-rpfE", "-W", "ignore", "--tb=line",
        *group.options, *(tests / name for name in files),
    ]  # fmt: skip
    folders = (HERE, *(source / folder for folder in suite.path))
    environment = {
        **os.environ, "TRIPTYCH_PYTHON": sys.executable, "TRIPTYCH_ROOT": str(ROOT),
        "PEER_SOURCE": str(source), "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }  # fmt: skip
    # vLLM's tests import each other as `tests`, the others' name files from their own folder.
    folder = source if suite is VLLM else tests
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.stdout + result.stderr


def outcomes_of(said: str, suite: Suite) -> dict[str, str]:
    """Returns the outcome of each case, by its file below the suite's tests and its name."""
    found: dict[str, str] = {}
    for outcome, file, case in _OUTCOME.findall(said):
        name = file.removeprefix(f"{suite.tests}/") + case.partition(" - ")[0]
        found.setdefault(name, outcome)
    return found


def reasons_of(suite: Suite) -> dict[str, str]:
    """Returns why cases fail, by case."""
    table = tomllib.loads((HERE / "failures.toml").read_text(encoding="utf-8"))
    return {case: reason for reason, cases in table.get(suite.name, {}).items() for case in cases}


def report(suite: Suite, outcomes: dict[str, str]) -> bool:
    """Prints a suite's tables. Returns whether each case that fails has a reason."""
    passed, total = Counter[str](), Counter[str]()
    for case, outcome in outcomes.items():
        file = case.partition("::")[0]
        total[file] += 1
        passed[file] += outcome == "PASSED"
    print(f"\n{suite.name} ({suite.version})\n\n| file | pass | of |\n|---|---:|---:|")
    for file in total:
        print(f"| {file} | {passed[file]} | {total[file]} |")
    print(f"| all | {passed.total()} | {total.total()} |")
    reasons = reasons_of(suite)
    failed = [case for case, outcome in outcomes.items() if outcome != "PASSED"]
    print("\n| n | reason |\n|---:|---|")
    for reason, count in Counter(reasons[c] for c in failed if c in reasons).most_common():
        print(f"| {count} | {reason} |")
    unnamed = [case for case in failed if case not in reasons]
    for case in unnamed:
        print(f"fails without a reason in failures.toml: {case}")
    for case in sorted(reasons.keys() & {c for c, o in outcomes.items() if o == "PASSED"}):
        print(f"passes, although failures.toml has a reason: {case}")
    return not unnamed


def main() -> int:
    """Runs the suites; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [suite.name for suite in SUITES]
    parser.add_argument("--suite", choices=names, action="append", help="suite to run; all if none")
    parser.add_argument("--log", type=Path, help="gets what pytest says")
    parser.add_argument("--only", default="", help="files whose names have this")
    options = parser.parse_args()
    python, everything, good = python_of(), "", True
    for suite in SUITES:
        if options.suite and suite.name not in options.suite:
            continue
        source, said = source_of(suite), ""
        for group in suite.groups:
            if files := [name for name in group.files if options.only in name]:
                said += run(python, source, suite, group, files)
        everything += said
        good &= report(suite, outcomes_of(said, suite)) and "ERROR collecting" not in said
        if suite is VLLM:
            for path, fields in unprobed(source).items():
                print(f"{path}: no probe of tests/contract/field_rows.py sends {', '.join(fields)}")
                good = False
    if options.log:
        options.log.write_text(everything)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
