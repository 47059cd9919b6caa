"""A service's pod, as far as memory goes: a cgroup with the limit of its manifest.

Where no cgroup can be made, the limit is only watched: the most memory that the service's processes
had at once, shared pages counted once.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.cluster import Service
from tests.unit.deploy.kustomize import Resource, render

_ROOT = Path("/sys/fs/cgroup")
_OVERLAY = Path(__file__).resolve().parents[2] / "deploy/k8s/overlays/local"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_PERIOD_S = 0.01


class Pod:
    """One service's processes and their memory. `service` has not been started yet."""

    def __init__(self, service: Service, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._service = service
        self._folder = _make_cgroup(f"triptych-{os.getpid()}-{service.kind}", limit_bytes)
        if self._folder is not None:
            script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
            service.wrapper = ["/bin/sh", "-c", script, str(self._folder), *service.wrapper]
        self.peak_bytes = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def enforced(self) -> bool:
        """Whether the kernel ends what goes over the limit."""
        return self._folder is not None

    def watch(self) -> None:
        """Starts to measure; the service runs."""
        self._thread.start()

    def close(self) -> None:
        """The service has ended."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._folder is not None:
            with suppress(OSError):
                self._folder.rmdir()

    def used_bytes(self) -> int:
        """What cannot be reclaimed: anonymous and shared memory."""
        if self._folder is None:
            return self._resident_bytes()
        found = dict(
            line.split() for line in (self._folder / "memory.stat").read_text().split("\n")[:-1]
        )
        names = ("anon", "shmem") if "anon" in found else ("total_rss", "total_shmem")
        return sum(int(found.get(name, 0)) for name in names)

    def num_kills(self) -> int:
        """Processes that the kernel ended for memory."""
        if self._folder is None:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                lines = (self._folder / name).read_text().splitlines()
                return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def processes(self) -> list[psutil.Process]:
        """The service's, without its helpers that come and go."""
        root = psutil.Process(self._service.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time of all processes so far, ended children included."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _resident_bytes(self) -> int:
        private, shared = 0, 0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                memory = process.memory_info()
                private += memory.rss - memory.shared
                shared = max(shared, memory.shared)
        return private + shared

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            with suppress(OSError, psutil.Error):
                self.peak_bytes = max(self.peak_bytes, self.used_bytes())


def _make_cgroup(name: str, limit_bytes: int) -> Path | None:
    """A cgroup below this process's own, or None."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        parent = _ROOT / ("memory" if controllers else "") / path.lstrip("/")
        folder = parent / name
        try:
            if not controllers:
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            limit = "memory.limit_in_bytes" if controllers else "memory.max"
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        return folder
    return None


def manifest_limits() -> dict[str, int]:
    """Bytes of memory of each service's pod on a small machine."""
    found = {}
    for resource in _deployments():
        (container,) = resource["spec"]["template"]["spec"]["containers"]
        text: str = container["resources"]["limits"]["memory"]
        found[container["name"]] = int(text[:-2]) * _UNITS[text[-2:]]
    return found


def manifest_settings(kind: str) -> dict[str, object]:
    """The service's own settings there that decide its memory."""
    configs = [r for r in render(_OVERLAY) if r["kind"] == "ConfigMap"]
    (config,) = [r for r in configs if r["metadata"]["name"].rpartition("-")[0] == kind]
    name = f"{kind.upper()}_CACHE_BYTES"
    return {"cache_bytes": config["data"][name]} if name in config["data"] else {}


def _deployments() -> list[Resource]:
    return [r for r in render(_OVERLAY) if r["kind"] == "Deployment"]
