"""The commands of examples/README.md, run as they stand there, in order.

kubectl is the real one, against `ApiServer`; so are secrets.sh, `triptych key` and sed. Images are
not built (`docker` is checked and recorded), and nothing is forwarded or asked.
"""

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.deploy.api_server import ApiServer
from tests.unit.deploy.combinations import K8S, VERSION
from tests.unit.deploy.kustomize import Resource, by_kubectl
from tests.unit.deploy.test_examples import NAMES, SINGLE, commands_of

ROOT = K8S.parents[1]
KUBECTL = shutil.which("kubectl")
pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl runs the commands")
MARK = "=== "


@dataclass
class Run:
    """What the commands have done.

    Attributes:
        example: name of the example.
        said: the output of each command, by number.
        seconds: what each took, likewise.
        docker: the arguments of each call.
        asked: the arguments of `triptych ask`.
    """

    example: str
    server: ApiServer
    directory: Path
    environment: dict[str, str]
    said: dict[int, str]
    seconds: dict[int, float]
    docker: list[list[str]]
    asked: list[str]

    @property
    def rendered(self) -> list[Resource]:
        """What kubectl renders of the example, the registry replaced."""
        return by_kubectl(self.directory / "deploy" / "k8s" / "examples" / self.example)


def commands(example: str) -> list[tuple[int, str]]:
    """Number and text of each."""
    text = re.sub(r"examples/qwen3-vl-2b-(gpu|single)", f"examples/{example}", commands_of(example))
    if example == "qwen3-8b-gpu":  # as the README says of it
        text = text.replace("secrets.sh redis token", "secrets.sh token")
        text = "\n".join(
            line for line in text.split("\n") if f"encoder:{VERSION}-gpu --" not in line
        )
        text = text.replace(f" encoder:{VERSION}-gpu", "").replace(
            " decoder encoder gateway", " decoder gateway"
        )
    parts = re.split(r"^# (\d+)\. .*$", text, flags=re.MULTILINE)[1:]
    return [(int(number), body) for number, body in zip(parts[::2], parts[1::2], strict=True)]


def programs(directory: Path) -> None:
    """Stand-ins that run the real program for what can be run here."""
    log = shlex.quote(str(directory / "log"))
    python = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)}"
    # A line is one write: `port-forward` runs beside what follows it.
    record = f"""line=$(printf '%s\\037' "$0" "$@"); printf '%s\\n' "$line" >> {log}"""
    texts = {
        "docker": record,
        "kubectl": f"""case " $* " in *" port-forward "*) {record}; exit;; esac
exec {KUBECTL} "$@\"""",
        "triptych": f"""[ "$1" = key ] && exec env {python} -m triptych "$@"; {record}""",
    }
    for name, text in texts.items():
        path = directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@pytest.fixture(scope="module", params=NAMES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("commands")
    work = directory / "work"
    shutil.copytree(K8S, work / "deploy" / "k8s")
    programs(directory)
    environment = os.environ | {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "KUBECONFIG": str(directory / "kubeconfig"),
        "HOME": str(directory),
    }
    script = "set -eu\n" + "".join(
        f"printf '{MARK}{number} %s\\n' $(date +%s.%N)\n{body}\n"
        for number, body in [*commands(request.param), (0, "")]
    )
    server = ApiServer()
    with server.running(directory / "kubeconfig"):
        done = subprocess.run(
            ["bash", "-c", script], cwd=work, env=environment, text=True, check=False, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert not done.returncode, done.stdout
        parts = re.split(rf"^{MARK}(\d+) ([\d.]+)\n", done.stdout, flags=re.MULTILINE)[1:]
        starts = list(map(float, parts[1::3]))
        calls = [line.split("\037")[:-1] for line in (directory / "log").read_text().splitlines()]
        yield Run(
            request.param, server, work, environment,
            said={int(number): text for number, text in zip(parts[::3], parts[2::3], strict=True)},
            seconds={n: b - a for n, (a, b) in enumerate(pairwise(starts), 1)},
            docker=[call[1:] for call in calls if call[0].endswith("docker")],
            asked=next(call[1:] for call in calls if call[0].endswith("triptych")),
        )  # fmt: skip


def test_each_command_says_what_it_did(run: Run) -> None:
    print({number: round(seconds, 2) for number, seconds in run.seconds.items()})
    single = run.example in SINGLE
    assert list(run.said) == [*range(1, 7 if single else 11), 0]
    # Numbers of the commands: namespace, key, everything.
    namespace, key, everything = (3, 4, 5) if single else (4, 6, 7)
    assert run.said[namespace] == "namespace/triptych serverside-applied\n"
    assert "secret/triptych-gateway created" in run.said[key]
    applied = [line for line in run.said[everything].splitlines() if "serverside" in line]
    assert len(applied) == len({(r["kind"], r["metadata"]["name"]) for r in run.rendered})
    assert len(applied) > (7 if single else 15)
    if not single:
        assert "secret/triptych-token created" in run.said[5]
        assert run.said[8] == "job.batch/model-download condition met\n"
    rolled_out = re.findall(
        r'deployment "(\w+)" successfully rolled out', run.said[5 if single else 9]
    )
    deployments = {name for kind, name in run.server.objects if kind == "Deployment"}
    assert set(rolled_out) == deployments - {"redis"}


def test_images_are_those_that_pods_name(run: Run) -> None:
    built = {call[call.index("-t") + 1] for call in run.docker if call[0] == "build"}
    pushed = {call[1] for call in run.docker if call[0] == "push"}
    text = json.dumps(list(run.server.objects.values()))
    named = set(re.findall(r'"image": "([^"]*triptych/[^"]+)"', text))
    assert built == pushed == named
    for call in run.docker:
        if call[0] == "build":
            dockerfile = ROOT / call[call.index("-f") + 1]
            known = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
            given = {a.partition("=")[0] for b, a in pairwise(call)
                     if b == "--build-arg"}  # fmt: skip
            assert given <= known


def test_the_key_that_asks_is_the_one_that_gateways_know(run: Run) -> None:
    data = run.server.objects["Secret", "triptych-gateway"]["data"]["keys.json"]
    (entry,) = json.loads(base64.b64decode(data))["keys"]
    key = run.asked[run.asked.index("--api-key") + 1]
    assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert key not in base64.b64decode(data).decode()


def test_secrets_are_not_made_twice(run: Run) -> None:
    name = "triptych-gateway" if run.example in SINGLE else "triptych-token"
    body = dict(commands(run.example))[4 if run.example in SINGLE else 5] + "\n"
    before = run.server.objects["Secret", name]
    again = subprocess.run(
        ["bash", "-c", body], cwd=run.directory, env=run.environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert again.returncode and "already exists" in again.stderr
    assert run.server.objects["Secret", name] is before
