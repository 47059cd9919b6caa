"""One address for several servers on this machine: each request goes to the server of its model.

    triptych serve Qwen/Qwen3-VL-2B-Instruct --port 8001
    triptych serve Qwen/Qwen3-8B --port 8002
    python examples/router.py 8000 http://127.0.0.1:8001 http://127.0.0.1:8002

It needs only the standard library, has no encryption and trusts its callers: it is made for trying.
On a cluster the Gateway API does the same (deploy/k8s/examples/several-models).
"""

import contextlib
import http.client
import http.server
import json
import sys
from urllib.parse import urlsplit

PASSED_ON = ("Content-Type", "Authorization", "X-Gateway-Model-Name")


class Router(http.server.BaseHTTPRequestHandler):
    """A connection of a client.

    Attributes:
        servers: URLs of the servers.
    """

    servers: tuple[str, ...] = ()

    def do_GET(self) -> None:
        """Answers /v1/models with the models of all servers."""
        models = [model for models in self._models().values() for model in models]
        body = json.dumps({"object": "list", "data": models}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body if self.path == "/v1/models" else b'{"error": "Not Found"}')

    def do_POST(self) -> None:
        """Passes a request to the server of its model, and the answer back as it comes."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.headers.get("X-Gateway-Model-Name") or json.loads(body).get("model")
        # The first server refuses a model that nobody serves.
        server = self.servers[0]
        for url, models in self._models().items():
            if any(model["id"] == name for model in models):
                server = url
        answer = self._ask(server, "POST", self.path, body)
        self.send_response(answer.status)
        for header, value in answer.getheaders():
            if header.lower() not in ("connection", "transfer-encoding"):
                self.send_header(header, value)
        self.end_headers()
        while part := answer.read1():
            self.wfile.write(part)

    def _models(self) -> dict[str, list[dict[str, object]]]:
        """Returns the models of each server that answers, by its URL."""
        found: dict[str, list[dict[str, object]]] = {}
        for url in self.servers:
            with contextlib.suppress(OSError):
                found[url] = json.load(self._ask(url, "GET", "/v1/models")).get("data", [])
        return found

    def _ask(
        self, url: str, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        connection.request(method, path, body, headers)
        return connection.getresponse()


def main() -> None:
    port, Router.servers = int(sys.argv[1]), tuple(sys.argv[2:])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Router)
    print(f"router: http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
