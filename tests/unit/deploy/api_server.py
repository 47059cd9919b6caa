"""An API server as far as kubectl's commands of our documents need one.

It keeps what is applied and created, checks it with the strict schemas of `schemas`, and says that
every Deployment is rolled out and every Job complete. It knows nothing of admission, defaults or
controllers: `tests/cluster` asks a real one.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.unit.deploy.kustomize import Resource
from tests.unit.deploy.schemas import validate

KUBERNETES_VERSION = "1.37"
# Group and version, kind, the name in paths; namespaces hold all but the first.
_KINDS = [
    ("v1", "Namespace", "namespaces"),
    ("v1", "Secret", "secrets"),
    ("v1", "ConfigMap", "configmaps"),
    ("v1", "Service", "services"),
    ("v1", "ServiceAccount", "serviceaccounts"),
    ("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ("apps/v1", "Deployment", "deployments"),
    ("batch/v1", "Job", "jobs"),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
]
_BY_PLURAL = {plural: (version, kind) for version, kind, plural in _KINDS}


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _discovery(path: str) -> dict[str, Any] | None:
    """What the server can do; None: another path."""
    versions = list(dict.fromkeys(version for version, _, _ in _KINDS))
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [
            {
                "name": version.partition("/")[0],
                "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
            }
            for version in versions
            if "/" in version
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
    if path == "/openapi/v3":
        roots = [_root(version).lstrip("/") for version in versions]
        return {"paths": {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots}}
    for version in versions:
        kinds = [(kind, plural) for v, kind, plural in _KINDS if v == version]
        if path == _root(version):
            verbs = ["create", "get", "list", "patch", "watch"]
            resources = [
                {
                    "name": plural, "singularName": kind.lower(), "kind": kind, "verbs": verbs,
                    "namespaced": kind != "Namespace",
                }
                for kind, plural in kinds
            ]  # fmt: skip
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if path == f"/openapi/v3{_root(version)}":
            return _openapi(version, kinds)
    return None


def _openapi(version: str, kinds: list[tuple[str, str]]) -> dict[str, Any]:
    """Says that the server checks fields itself, so that kubectl does not."""
    group, _, short = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query"}]
    paths = {
        f"{_root(version)}/{plural}/{{name}}": {
            "patch": {
                "parameters": parameters,
                "x-kubernetes-group-version-kind": {"group": group, "version": short, "kind": kind},
            },
        }
        for kind, plural in kinds
    }
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}


class ApiServer:
    """What kubectl is told to use.

    Attributes:
        objects: by kind and name.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Resource] = {}
        self._ends = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                if (found := _discovery(url.path)) is not None:
                    self._say(200, found)
                elif query.get("watch"):  # nothing changes any more
                    self.send_response(200)
                    self.send_header("Connection", "close")
                    self.end_headers()
                    self.wfile.flush()
                    self.close_connection = True
                    server._ends.wait()
                else:
                    self._say(*server.get(url.path, query))

            def do_PATCH(self) -> None:
                url = urlsplit(self.path)
                is_apply = self.headers["Content-Type"] == "application/apply-patch+yaml"
                self._say(*server.put(url.path, self._body(), creates=not is_apply))

            def do_POST(self) -> None:
                self._say(*server.put(urlsplit(self.path).path, self._body(), creates=True))

            def _body(self) -> Resource:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                return _secret(body) if body.startswith(_PROTOBUF) else yaml.safe_load(body)

            def _say(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self, kubeconfig: Path) -> Iterator[None]:
        """Serves, and writes the file that leads kubectl here."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        kubeconfig.write_text(yaml.safe_dump(content))
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def put(self, path: str, resource: Resource, *, creates: bool) -> tuple[int, dict[str, Any]]:
        """Creates an object or applies it."""
        kind, name = resource["kind"], resource["metadata"]["name"]
        namespace = resource["metadata"].get("namespace")
        try:
            validate(resource, KUBERNETES_VERSION)
        except Exception as error:
            return _status(422, "Invalid", str(error))
        if namespace and ("Namespace", namespace) not in self.objects:
            return _status(404, "NotFound", f'namespaces "{namespace}" not found')
        if creates and (kind, name) in self.objects:
            plural = path.rpartition("/")[2]
            return _status(409, "AlreadyExists", f'{plural} "{name}" already exists')
        self.objects[kind, name] = resource
        return 201 if creates else 200, _shown(resource)

    def get(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """One object, or a list of one kind."""
        *_, plural, name = ("", *path.split("/"))
        if plural in _BY_PLURAL and (_BY_PLURAL[plural][1], name) in self.objects:
            return 200, _shown(self.objects[_BY_PLURAL[plural][1], name])
        if name not in _BY_PLURAL:
            return _status(404, "NotFound", f'{plural} "{name}" not found')
        version, kind = _BY_PLURAL[name]
        wanted = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
        items = [
            _shown(resource)
            for (its, its_name), resource in self.objects.items()
            if its == kind and wanted in ("", its_name)
        ]
        metadata = {"resourceVersion": "1"}
        return 200, {
            "apiVersion": version, "kind": f"{kind}List", "metadata": metadata, "items": items,
        }  # fmt: skip


_PROTOBUF = b"k8s\0"


def _secret(body: bytes) -> Resource:
    """A Secret as `kubectl create secret` sends it. Numbers are those of Kubernetes' messages."""
    outer = _fields(body.removeprefix(_PROTOBUF))
    kind, secret = _fields(outer[1][0]), _fields(outer[2][0])
    assert kind[2] == [b"Secret"]
    metadata = _fields(secret[1][0])
    data = [_fields(item) for item in secret.get(2, ())]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": metadata[1][0].decode(), "namespace": metadata[3][0].decode()},
        "data": {item[1][0].decode(): base64.b64encode(item[2][0]).decode() for item in data},
    }


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Of a protobuf message: texts and messages, by number."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag, value = varint(), varint()
        if tag & 7 == 2:
            found.setdefault(tag >> 3, []).append(message[at : at + value])
            at += value
        else:
            assert not tag & 7, "neither a number nor a text"
    return found


def _shown(resource: Resource) -> Resource:
    """An object as controllers would leave it: done."""
    metadata = resource["metadata"] | {"uid": "u", "resourceVersion": "1", "generation": 1}
    shown = resource | {"metadata": metadata}
    if resource["kind"] == "Deployment":
        count = resource["spec"].get("replicas", 1)
        names = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        shown["status"] = {"observedGeneration": 1} | dict.fromkeys(names, count)
    if resource["kind"] == "Job":
        shown["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    return shown


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    return code, {
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason,
        "message": message,
    }  # fmt: skip
