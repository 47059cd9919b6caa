"""Proves, in an environment that has no torch, that the gateway and the scheduling code need none.

Import rules are checked statically elsewhere; that check cannot see what a parent package imports.
"""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_ABSENT = ("torch", "transformers")
# Contracts of pyproject.toml whose modules need none of these.
_CONTRACTS = ("the gateway and the shared code know no torch", "scheduling is pure")
_TESTS = (
    "tests/unit/gateway",
    "tests/unit/common/test_channel.py",
    "tests/unit/common/test_image_key.py",
    "tests/unit/decoder/test_block_manager*.py",
    "tests/unit/decoder/test_scheduler*.py",
    "tests/unit/encoder/test_batcher*.py",
)
# Long ones of plain algorithms and of retries, which load nothing that the others do not.
_LEFT_OUT = ("test_answers.py", "test_attempts.py", "test_byte_pairs.py")
_SKIPS = "importorskip"  # in a file some of whose tests need what is absent here


def modules() -> list[str]:
    """The modules that the contracts name, with those inside packages."""
    config = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    found: list[str] = []
    for contract in config["tool"]["importlinter"]["contracts"]:
        if contract["name"] in _CONTRACTS:
            for name in contract["source_modules"]:
                found += [name, *_inside(name)]
    return [name for name in found if not name.endswith("__main__")]


def _inside(name: str) -> list[str]:
    """Modules of a package; none of a module."""
    path = getattr(importlib.import_module(name), "__path__", ())
    return [module.name for module in pkgutil.walk_packages(path, f"{name}.")]


def paths_of_tests() -> list[Path]:
    """The files and folders.

    Raises:
        LookupError: a pattern matches nothing.
    """
    paths: list[Path] = []
    for pattern in _TESTS:
        found = sorted(_ROOT.glob(pattern))
        if not found:
            raise LookupError(f"no test matches {pattern}")
        paths += found
    return paths


def whole_files() -> list[str]:
    """Files of which all tests run here, from the root."""
    files = [file for path in paths_of_tests() for file in (path, *path.rglob("test_*.py"))]
    return [
        str(file.relative_to(_ROOT)) for file in files
        if file.is_file() and file.name not in _LEFT_OUT and _SKIPS not in file.read_text()
    ]  # fmt: skip


def main() -> int:
    """Imports, then tests; returns the exit status. With `--ran` it only says, as options of
    pytest, which files need not run again where all packages are.
    """
    if sys.argv[1:] == ["--ran"]:
        print(*(f"--ignore={name}" for name in whole_files()))
        return 0
    for name in _ABSENT:
        if importlib.util.find_spec(name):
            print(f"{name} is installed here, so nothing would be proven", file=sys.stderr)
            return 1
    names = modules()
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules imported without {', '.join(_ABSENT)}", flush=True)
    left_out = [f"--ignore-glob=*/{name}" for name in _LEFT_OUT]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *left_out,
        *map(str, paths_of_tests()),
    ]  # fmt: skip
    return subprocess.call(command, cwd=_ROOT)


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT))
    sys.exit(main())
