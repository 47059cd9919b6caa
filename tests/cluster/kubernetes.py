"""A fleet on a cluster, through kubectl: implements `tests.e2e.trials.Fleet`.

Clients reach gateways through a port-forward to each pod that a Service would choose, because a
forward to the Service stays with one pod.
"""

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMESPACE = "triptych"
_LABEL = "app.kubernetes.io/name"
_ROLL_OUT_S = 900
_LIST_S = 1.0  # a list of pods is used for so long
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
_FORWARD_S = 20.0


def is_possible() -> bool:
    """Whether there is kubectl and a cluster to use it with."""
    return bool(os.environ.get("KUBECONFIG")) and shutil.which("kubectl") is not None


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Runs kubectl in the namespace; its output."""
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass
class _Forward:
    process: "subprocess.Popen[str]"
    url: str


class KubernetesFleet:
    """What `overlays/local` has deployed. Use as a context manager."""

    model = "triptych-demo"

    def __init__(self) -> None:
        self._forwards: dict[str, _Forward] = {}
        self._lock = threading.Lock()
        self._urls: list[str] = []
        self._listed_at = float("-inf")

    def __enter__(self) -> "KubernetesFleet":
        return self

    def __exit__(self, *_: object) -> None:
        for forward in self._forwards.values():
            forward.process.terminate()
            forward.process.wait()

    def gateways(self) -> list[str]:
        with self._lock:
            if time.monotonic() - self._listed_at > _LIST_S:
                names = [_name(pod) for pod in _pods("gateway") if _is_chosen(pod)]
                self._urls = [self._forward(name).url for name in names]
                self._listed_at = time.monotonic()
            return self._urls

    def scale(self, kind: str, count: int) -> list[str]:
        kubectl("scale", f"deployment/{kind}", f"--replicas={count}")
        return self._settled(kind, count)

    def roll_out(self, kind: str) -> list[str]:
        count = len(_pods(kind))
        kubectl("rollout", "restart", f"deployment/{kind}")
        return self._settled(kind, count)

    def restart_cache(self) -> list[str]:
        kubectl("delete", "pod", "--selector", f"{_LABEL}=redis")
        return self._settled("redis", 1)

    def _settled(self, kind: str, count: int) -> list[str]:
        """Waits until these pods serve and no other is left."""
        kubectl("rollout", "status", f"deployment/{kind}", f"--timeout={_ROLL_OUT_S}s")

        def is_settled() -> bool:
            pods = _pods(kind)
            return len(pods) == count and all(_is_chosen(pod) for pod in pods)

        return [] if _until(is_settled, _ROLL_OUT_S) else [f"not {count} {kind}s after the action"]

    def _forward(self, name: str) -> _Forward:
        """The port-forward to a pod; it ends with the pod."""
        known = self._forwards.get(name)
        if known is not None and known.process.poll() is None:
            return known
        command = ["kubectl", "-n", NAMESPACE, "port-forward", f"pod/{name}", ":8000"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        timer = threading.Timer(_FORWARD_S, process.kill)  # ends the wait for its line
        timer.start()
        found = _FORWARDING.search(process.stdout.readline())
        timer.cancel()
        assert found is not None, f"no port-forward to {name}"
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a line a connection
        self._forwards[name] = _Forward(process, f"http://127.0.0.1:{found[1]}")
        return self._forwards[name]


def _pods(kind: str) -> list[dict[str, Any]]:
    return json.loads(kubectl("get", "pods", "--selector", f"{_LABEL}={kind}", "-o", "json"))[
        "items"
    ]


def _name(pod: dict[str, Any]) -> str:
    return pod["metadata"]["name"]


def _is_chosen(pod: dict[str, Any]) -> bool:
    """Whether it is an endpoint of a Service: ready, and not about to go."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(1)
    return False
