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

import services.gateway

_ROOT = Path(__file__).resolve().parents[1]
_ABSENT = ("torch", "transformers", "redis")
# Shared code that the gateway uses.
_COMMON = (
    "channel", "embedding", "errors", "families", "families.qwen3", "image_geometry", "image_key",
    "model_spec", "rpc", "settings", "telemetry",
)  # fmt: skip
_TESTS = (
    "tests/unit/gateway",
    "tests/unit/common/test_channel.py",
    "tests/unit/common/test_image_key.py",
    "tests/unit/decoder/test_block_manager*.py",
    "tests/unit/decoder/test_scheduler*.py",
    "tests/unit/encoder/test_batcher*.py",
)


def modules() -> list[str]:
    """All of the gateway, what it shares, and the modules that a contract calls pure."""
    gateway = pkgutil.walk_packages(services.gateway.__path__, "services.gateway.")
    config = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    pure = [
        name
        for contract in config["tool"]["importlinter"]["contracts"]
        if contract["name"] == "scheduling is pure"
        for name in contract["source_modules"]
    ]
    return [
        *(module.name for module in gateway if not module.name.endswith("__main__")),
        *(f"services.common.{name}" for name in _COMMON),
        *pure,
    ]


def main() -> int:
    """Imports, then tests; returns the exit status."""
    for name in _ABSENT:
        if importlib.util.find_spec(name):
            print(f"{name} is installed here, so nothing would be proven", file=sys.stderr)
            return 1
    names = modules()
    for name in names:
        importlib.import_module(name)
    print(f"{len(names)} modules imported without {', '.join(_ABSENT)}", flush=True)
    paths: list[Path] = []
    for pattern in _TESTS:
        found = sorted(_ROOT.glob(pattern))
        if not found:
            print(f"no test matches {pattern}", file=sys.stderr)
            return 1
        paths += found
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    return subprocess.call(command, cwd=_ROOT)


if __name__ == "__main__":
    sys.path.insert(0, str(_ROOT))
    sys.exit(main())
