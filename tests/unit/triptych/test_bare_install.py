"""The command after `pip install triptych` without extras: clients work, the rest names its extra.

The packages that extras bring are hidden from the command, as if they were not installed.
"""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.closure import closure, own_requirements
from triptych.cli import build_parser

ROOT = Path(__file__).resolve().parents[3]
# Commands that need no extra, with arguments that end them; status and a part of their output.
CLIENTS = {
    "ask": (["--url", "http://127.0.0.1:9", "hello"], 1, "is `triptych serve` running?"),
    "chat": (["--url", "http://127.0.0.1:9"], 1, "is `triptych serve` running?"),
    "key": (["me"], 0, "key, shown once: sk-"),
}
HIDE = """
import sys
sys.modules.update(dict.fromkeys({names!r}))
from triptych.cli import main
sys.exit(main(sys.argv[1:]))
"""


@cache
def hidden(extra: str = "") -> tuple[str, ...]:
    """Importable names of the packages that an installation with at most one extra lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [Requirement(text) for text in project["dependencies"]]
    bare = {name.lower() for name in closure(own_requirements(extra) if extra else roots)}
    bare |= {"triptych", "pip", "setuptools"}
    found = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & bare
    }
    return tuple(sorted(found - {"__editable___triptych_finder"}))


def run(*words: str, extra: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE.format(names=hidden(extra)), *words],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def commands() -> list[str]:
    found = re.findall(r"^    (\w+) ", build_parser().format_help(), re.MULTILINE)
    assert {"serve", "ask", "demo"} <= set(found)
    return sorted(found)


def test_the_packages_of_extras_are_hidden_and_no_others() -> None:
    assert {"torch", "fastapi", "PIL", "rich", "redis", "tokenizers"} <= set(hidden())
    assert not {"numpy", "grpc", "pydantic", "msgspec", "prometheus_client"} & set(hidden())


# The options of `bench` are the load generator's, which the extra brings.
@pytest.mark.parametrize("command", ["", *sorted(set(commands()) - {"bench"})])
def test_help_needs_no_extra(command: str) -> None:
    done = run(*filter(None, [command]), "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: triptych"), done.stderr


@pytest.mark.parametrize("command", sorted(CLIENTS))
def test_clients_need_no_extra(command: str) -> None:
    words, status, part = CLIENTS[command]
    done = run(command, *words)
    assert done.returncode == status, done.stderr
    assert part in done.stdout + done.stderr


@pytest.mark.parametrize("command", sorted(set(commands()) - set(CLIENTS)))
def test_other_commands_name_the_extra_that_they_need(command: str) -> None:
    done = run(command)
    assert done.returncode == 2
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert "Traceback" not in lines
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"pip install 'triptych\[(\w+)\]'", lines[-1])
    assert named and set(named) <= extras.keys(), lines


def test_the_extra_that_a_command_names_is_enough() -> None:
    """`compile` is not tried, because no machine of the tests has its extra."""
    done = run("bench", "--help", extra="bench")
    assert done.returncode == 0 and "text_c256" in done.stdout, done.stderr
    done = run("serve", "/nowhere", extra="all")
    assert done.returncode == 2 and "/nowhere" in done.stderr, done.stderr
