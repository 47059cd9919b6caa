"""Headless Chromium, driven through its DevTools protocol: just what the chat page's test needs."""

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.noise import PATIENCE_S

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage",
    "--remote-allow-origins=*", "--remote-debugging-port=0", "--window-size=1280,900",
)  # fmt: skip
_START_TIMEOUT_S = 60.0
_KEYS: dict[str, tuple[int, dict[str, str]]] = {
    "Enter": (13, {"text": "\r"}), "Escape": (27, {}), "Tab": (9, {}),
}  # fmt: skip


class BrowserError(Exception):
    """The browser, or a script in the page, failed."""


class Page:
    """One tab."""

    def __init__(self, socket_url: str) -> None:
        self._socket_url = socket_url
        self._socket = websocket.create_connection(socket_url, timeout=PATIENCE_S)
        self._ids = itertools.count(1)
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "DOM", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the connection; the browser ends with its process."""
        self._socket.close()

    @contextmanager
    def new_tab(self) -> Iterator["Page"]:
        """Another one of the browser, in front of this one."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(f"{self._socket_url.rpartition('/')[0]}/{target}")
        try:
            page.call("Page.bringToFront")
            yield page
        finally:
            page.close()
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if error := message.get("error"):
                    raise BrowserError(f"{method}: {error['message']}")
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Loads a page and waits until it is complete."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if failure := answer.get("exceptionDetails"):
            raise BrowserError(f"{script}: {failure.get('exception', failure)}")
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = PATIENCE_S) -> Any:
        """Evaluates until the value is truthy, and returns it."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise BrowserError(f"never became true: {script}\npage: {text}\n{self.console}")
            time.sleep(0.05)
        return value

    def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Puts files into a file input, as its dialog would."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def drop_file(self, selector: str, path: Path, kind: str = "image/png") -> None:
        """Drops a file onto an element, as a person with a mouse would."""
        data = base64.b64encode(path.read_bytes()).decode()
        self.evaluate(
            f"""(() => {{
              const bytes = Uint8Array.from(atob({json.dumps(data)}), c => c.charCodeAt(0));
              const file = new File([bytes], {json.dumps(path.name)}, {{type: {json.dumps(kind)}}});
              const carried = new DataTransfer();
              carried.items.add(file);
              const target = document.querySelector({json.dumps(selector)});
              for (const name of ["dragenter", "dragover", "drop"])
                target.dispatchEvent(new DragEvent(
                  name, {{dataTransfer: carried, bubbles: true, cancelable: true}}));
            }})()"""
        )

    def send_with(self, **fields: object) -> None:
        """From now on the page's questions have these fields, too."""
        self.evaluate(
            f"""(() => {{
              const real = window.fetch, fields = {json.dumps(fields)};
              window.fetch = (path, options) => real(path, options.body ? {{
                ...options, body: JSON.stringify({{...JSON.parse(options.body), ...fields}})
              }} : options);
            }})()"""
        )

    def draw_each_event(self) -> None:
        """From now on the page gets the events of a stream one by one, and time to draw each: on a
        busy machine a whole answer may come between two frames.
        """
        self.evaluate(
            """(() => {
              const real = window.fetch, frame = () => new Promise(requestAnimationFrame);
              window.fetch = async (...asked) => {
                const response = await real(...asked);
                let rest = "";
                const events = new TransformStream({async transform(text, out) {
                  const parts = (rest + text).split("\\n\\n");
                  rest = parts.pop();
                  for (const part of parts) {
                    out.enqueue(part + "\\n\\n");
                    await frame();
                    await frame();
                  }
                }, flush(out) { if (rest) out.enqueue(rest); }});
                const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(events);
                return new Response(body.pipeThrough(new TextEncoderStream()), response);
              };
            })()"""
        )

    def type(self, selector: str, text: str) -> None:
        """Focuses an element and types into it."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key of `_KEYS`, in the focused element."""
        code, text = _KEYS[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def press_enter(self) -> None:
        self.press("Enter")

    def click(self, selector: str) -> None:
        """Clicks the middle of an element, where a person would, once it is drawn."""
        self.wait_for(f"document.querySelector({json.dumps(selector)})?.offsetParent !== undefined")
        x, y = self.evaluate(
            f"""(() => {{
              const target = document.querySelector({json.dumps(selector)});
              target.scrollIntoView({{block: "nearest"}});
              const box = target.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """The window's inside, in CSS pixels; a phone has fingers instead of a mouse."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=is_phone,
            deviceScaleFactor=2 if is_phone else 1,
        )  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG or WebP by the file's name."""
        options = {"format": "webp", "quality": 80} if path.suffix == ".webp" else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"])[:500])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.console.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] == "error":
                self.console.append(json.dumps(parameters["args"])[:500])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])


@contextmanager
def open_browser(directory: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `directory`.

    Raises:
        BrowserError: none is installed, or it does not start.
    """
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        raise BrowserError("chromium is needed: apt-get install chromium")
    profile = directory / "profile"
    profile.mkdir()
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, *_FLAGS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
    try:
        page = Page(_page_socket(profile / "DevToolsActivePort", process))
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _page_socket(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists() and (lines := port_file.read_text().splitlines()):
            with urllib.request.urlopen(
                f"http://127.0.0.1:{lines[0]}/json", timeout=PATIENCE_S
            ) as answer:
                pages = [t for t in json.loads(answer.read()) if t["type"] == "page"]
            if pages:
                return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.05)
    raise BrowserError(f"chromium did not start (exit status {process.poll()})")
