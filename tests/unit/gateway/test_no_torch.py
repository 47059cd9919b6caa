"""The gateway starts and serves without torch or transformers."""

import subprocess
import sys

PROBE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "torchvision"):
            raise AssertionError("imported " + name)
sys.meta_path.insert(0, Refuse())
import services.gateway.__main__, services.gateway.app, services.gateway.server
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_nothing_imports_torch_or_transformers():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bad_environment_ends_with_a_message_and_status_2():
    done = subprocess.run(
        [sys.executable, "-m", "services.gateway"],
        env={"GATEWAY_MODEL": "/nowhere", "GATEWAY_PROT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "GATEWAY_PROT" in done.stderr
    assert "Traceback" not in done.stderr
