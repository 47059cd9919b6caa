"""What a change is checked with in less than a minute: `make quick`.

Style of the changed files, the rules of who imports whom, the gateway's and the scheduler's tests,
and the unit tests of the changed folders without the slow ones. Changed is what differs from
`main`, committed or not; on `main` itself, from the last commit.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
CORES = 2
# CPU time of all checks, so that what else the machine does fails nothing.
BOUND_CPU_S = 60 * CORES
# Always run: they need no torch and hold most of what a request meets.
LIGHT = (
    "tests/unit/gateway/test_admission.py",
    "tests/unit/gateway/test_chat.py",
    "tests/unit/gateway/test_openai.py",
    "tests/unit/decoder/test_block_manager.py",
    "tests/unit/decoder/test_scheduler.py",
    "tests/unit/encoder/test_batcher.py",
)
_NO_STACK = ("contract", "unit")  # a changed test file of these runs itself


def changed_files() -> list[str]:
    """Paths from the root, of files that are there."""
    base = _git("merge-base", "HEAD", "main") or ["HEAD"]
    if base == _git("rev-parse", "HEAD") and not _git("status", "--porcelain"):
        base = ["HEAD~1"]
    found = _git("diff", "--name-only", *base) + _git("ls-files", "--others", "--exclude-standard")
    return sorted({name for name in found if (ROOT / name).is_file()})


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1]


def tests_of(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """The tests of `files`: the deepest folder of tests/unit that is named as a file's folder.

    `services/decoder/engine/engine.py` has tests/unit/decoder/engine, or else tests/unit/decoder.
    A changed test of a unit or a contract is itself; no test is named twice.
    """
    found: set[str] = set(LIGHT)
    for name in files:
        path = PurePosixPath(name)
        parts = path.parts
        if parts[0] == "tests":
            if len(parts) > 2 and parts[1] in _NO_STACK and path.name.startswith("test_"):
                found.add(name)
            elif parts[1:2] == ("unit",):  # what a folder's tests share
                found.add(str(path.parent))
            continue
        inner = parts[1:-1] if parts[0] in ("services", "benchmarks") else parts[:-1]
        for depth in range(len(inner), 0, -1):
            folder = "/".join(("tests", "unit", *inner[:depth]))
            if (root / folder).is_dir():
                found.add(folder)
                break
    return sorted(
        test for test in found if not any(str(p) in found for p in PurePosixPath(test).parents)
    )


def commands(files: list[str]) -> dict[str, list[str]]:
    """What is run, by its name."""
    python = [name for name in files if name.endswith((".py", ".pyi"))]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not nightly and not gpu and not e2e",
        "-n",
        str(CORES),
        "--dist",
        "worksteal",
        *tests_of(files),
    ]
    tools = Path(sys.executable).parent
    found = {
        "imports": [str(tools / "lint-imports")],
        "sizes": [sys.executable, "scripts/check_sizes.py"],
        "prose": [sys.executable, "scripts/check_prose.py"],
        "tests": tests,
    }
    if python:
        ruff = str(tools / "ruff")
        found = {
            "style": [ruff, "check", "--force-exclude", *python],
            "format": [ruff, "format", "--check", "--force-exclude", *python],
            **found,
        }
    return found


def main() -> int:
    """Runs all, says what each took; returns the exit status."""
    files = changed_files()
    print(f"{len(files)} changed files", flush=True)
    failed = []
    started = time.monotonic()
    for name, command in commands(files).items():
        begun = time.monotonic()
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"==> {name}: {time.monotonic() - begun:.1f} s", flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    wall_s = time.monotonic() - started
    print(f"{wall_s:.0f} s, {cpu_s:.0f} s of CPU time (at most {BOUND_CPU_S})")
    if cpu_s > BOUND_CPU_S:
        failed.append("the bound on time: mark what takes over five seconds `slow`")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
