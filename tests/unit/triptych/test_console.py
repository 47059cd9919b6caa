"""What people see: bars or lines of a start, logs as text, each cause once."""

import errno
import io
import json
import os
import pty
import re
from contextlib import redirect_stderr, suppress
from importlib.metadata import PackageNotFoundError
from threading import Thread

import pytest

from triptych import serve
from triptych.console import Console, make_view
from triptych.options import ServeOptions

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def record(message: str = "hello", level: str = "info", **fields: object) -> str:
    common = {
        "time": "2026-11-29T06:00:00.123Z",
        "level": level,
        "service": "s",
        "logger": "services.x",
    }
    return json.dumps(common | {"message": message} | fields)


def seen(
    console_levels: dict[str, str],
    *lines: tuple[str, str],
    access: bool = False,
    log_format: str = "text",
) -> list[str]:
    stream = io.StringIO()
    console = Console(console_levels, access_log=access, view=make_view(log_format, stream))
    for child, line in lines:
        console.output(child, line)
    return (
        without_times(stream.getvalue()) if log_format == "text" else stream.getvalue().splitlines()
    )


def without_times(text: str) -> list[str]:
    """The lines without the time that each must begin with."""
    parts = [line.split(" ", 1) for line in text.splitlines()]
    assert all(re.fullmatch(TIME, time) for time, _ in parts)
    return [line for _, line in parts]


def test_records_below_the_level_are_not_shown() -> None:
    levels = {"decoder-0": "WARNING", "gateway": "INFO"}
    shown = seen(
        levels,
        ("decoder-0", record()),
        ("decoder-0", record("beware", "warning", tokens=3)),
        ("gateway", record("hello")),
        ("gateway", "plain words"),
    )
    assert shown == [
        "decoder-0 WARNING beware  tokens=3",
        "gateway INFO hello",
        "gateway | plain words",
    ]


def test_the_access_log_is_the_gateways_line_for_each_request() -> None:
    line = record(
        "POST /v1/chat/completions 200", logger="services.gateway.http.middleware", ms=3.5
    )
    assert seen({"gateway": "WARNING"}, ("gateway", line)) == []
    assert seen({"gateway": "WARNING"}, ("gateway", line), access=True) == [
        "gateway INFO POST /v1/chat/completions 200  ms=3.5"
    ]


def test_a_start_is_a_line_for_each_stage() -> None:
    stages = [("weights", 0, 4), ("weights", 1, 4), ("weights", 4, 4), ("graphs", 1, 9)]
    lines = [("decoder-0", record(s, stage=s, done=d, total=t)) for s, d, t in stages]
    assert seen({"decoder-0": "WARNING"}, *lines) == [
        "triptych: decoder-0: weights, 0 of 4",
        "triptych: decoder-0: graphs, 1 of 9",
    ]


def test_a_terminal_has_a_bar_for_each_process() -> None:
    leader, follower = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        """To the end: a terminal gives what it has, and bars are drawn for as long as they last."""
        with suppress(OSError):
            while part := os.read(leader, 1 << 16):
                parts.append(part)

    reader = Thread(target=read)
    reader.start()
    with os.fdopen(follower, "w") as terminal:
        console = Console(
            {"decoder-0": "WARNING", "encoder-0": "WARNING"}, view=make_view(stream=terminal)
        )
        console.output("decoder-0", record(stage="weights", done=3, total=8))
        console.output("encoder-0", record(stage="kernels", done=0, total=0))
        console.report("one line")
        console.ready()
        console.report("another [line]")
    reader.join()
    os.close(leader)
    shown = b"".join(parts).decode()
    assert "decoder-0 weights" in shown and "3/8" in shown and "encoder-0 kernels" in shown
    assert "triptych: one line" in shown and "triptych: another [line]" in shown


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a one shows no bars, so that nothing would be seen of a start."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")
    with os.fdopen(follower, "w") as terminal:
        console = Console({"decoder-0": "WARNING"}, view=make_view(stream=terminal))
        console.output("decoder-0", record(stage="weights", done=3, total=8))
        shown = os.read(leader, 1 << 16).decode()
        assert re.fullmatch(f"{TIME} triptych: decoder-0: weights, 3 of 8\r\n", shown)
    os.close(leader)


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_terminal_that_is_gone_ends_nothing(is_ready: bool) -> None:
    """As after `setsid` or `disown`, when no signal says so."""
    leader, follower = pty.openpty()
    terminal = os.fdopen(follower, "w")
    console = Console({"decoder-0": "WARNING"}, view=make_view(stream=terminal))
    console.output("decoder-0", record(stage="weights", done=3, total=8))
    if is_ready:
        console.ready()
    os.close(leader)
    with pytest.raises(OSError, match="Input/output error"):  # so what follows cannot be shown
        os.write(follower, b"lost")
    console.output("decoder-0", record(stage="graphs", done=1, total=8))
    console.report("lost")
    console.ready()
    console.report("lost")
    console.close()
    with suppress(OSError):
        terminal.close()


def test_why_a_service_could_not_start_is_said_once() -> None:
    stream = io.StringIO()
    console = Console({"decoder-0": "WARNING"}, view=make_view(stream=stream))
    console.output("decoder-0", record("the shapes are wrong", "critical"))
    console.output(
        "decoder-0", record("the engine process ended; its own log says why", "critical")
    )
    assert console.cause("decoder-0") == "the shapes are wrong"
    assert stream.getvalue() == ""
    console.ready()
    console.output("decoder-0", record("the engine failed", "critical", exception="Traceback\n  x"))
    at, text = stream.getvalue().split(" ", 1)
    assert at == "2026-11-29T06:00:00.123Z"
    assert text == "decoder-0 CRITICAL the engine failed\nTraceback\n  x\n"


def test_another_program_is_quoted_only_if_it_fails() -> None:
    stream = io.StringIO()
    console = Console({"gateway": "WARNING"}, view=make_view(stream=stream))
    console.output("redis", "Redis is starting")
    console.output("redis", "cannot bind")
    assert (console.cause("redis"), stream.getvalue()) == ("cannot bind", "")


def test_what_is_no_record_of_ours_is_shown_as_it_is() -> None:
    lines = ['{"half', '{"level": "info"}', "[1]", "{}"]
    shown = seen({"gateway": "ERROR"}, *[("gateway", line) for line in lines])
    assert shown == [f"gateway | {line}" for line in lines]


class Disk(io.StringIO):
    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_what_comes_after_a_full_disk_is_shown() -> None:
    disk = Disk()
    console = Console({"gateway": "INFO"}, view=make_view(stream=disk))
    console.output("gateway", record("lost"))
    console.report("lost")
    disk.is_full = False
    console.output("gateway", record("shown"))
    assert disk.getvalue() == "2026-11-29T06:00:00.123Z gateway INFO shown\n"


def test_what_serve_says_itself_ends_nothing_on_a_full_disk() -> None:
    disk = Disk()
    with redirect_stderr(disk):
        make_view().report("loading")
    assert disk.getvalue() == ""


def test_collectors_of_logs_get_an_object_a_line() -> None:
    lines = [
        ("gateway-1", record("hello", tokens=3)),
        ("gateway-1", "plain words"),
        ("gateway-1", record("hidden", "debug")),
        ("decoder-0", record("weights", stage="weights", done=0, total=4)),
        ("decoder-0", record("weights", stage="weights", done=1, total=4)),
    ]
    levels = {"gateway-1": "INFO", "decoder-0": "WARNING"}
    shown = [json.loads(line) for line in seen(levels, *lines, log_format="json")]
    assert [each["message"] for each in shown] == ["hello", "plain words", "weights"]
    assert all(re.fullmatch(TIME, each["time"]) for each in shown)
    assert [each["process"] for each in shown] == ["gateway-1", "gateway-1", "decoder-0"]
    assert shown[0]["tokens"] == 3 and shown[0]["service"] == "s"
    assert shown[1]["service"] == "gateway"
    assert (shown[2]["done"], shown[2]["total"]) == (0, 4)


def test_the_command_writes_objects_too() -> None:
    stream = io.StringIO()
    Console({}, view=make_view("json", stream)).report("ready")
    entry = json.loads(stream.getvalue())
    assert (entry["service"], entry["level"], entry["message"]) == ("triptych", "info", "ready")


def test_the_first_line_has_what_differs_from_the_defaults_but_no_secret() -> None:
    options = ServeOptions(
        port=9, api_key="sk-1", redis_url="redis://me:secret@h:6379/0", served_names=["a", "b"]
    )
    variables = {
        "DECODER_STEP_MS": "20", "GATEWAY_API_KEYS": "sk-2,file:/keys.json", "HOME": "/root",
        "GATEWAY_REDIS_URL": "redis://u:hidden@r/1", "ENCODER_PEER_TOKEN_FILE": "/token",
    }  # fmt: skip
    line = serve.configuration(options, variables)
    for shown in ("version ", "port=9", "served_names=['a', 'b']", "DECODER_STEP_MS=20",
                  "redis_url=redis://h:6379/0", "GATEWAY_REDIS_URL=redis://r/1",
                  "ENCODER_PEER_TOKEN_FILE=/token", "api_key=(not shown)"):  # fmt: skip
        assert shown in line
    for hidden in ("sk-1", "sk-2", "secret", "hidden", "HOME"):
        assert hidden not in line
    assert serve.configuration(ServeOptions(), {}).endswith("all options are the defaults")


def test_a_process_is_shown_before_it_says_anything() -> None:
    stream = io.StringIO()
    console = Console({"decoder-0": "WARNING"}, view=make_view("text", stream))
    console.started("redis")  # is ready at once
    console.started("decoder-0")
    console.child_ready("decoder-0", 3.21)
    assert without_times(stream.getvalue()) == [
        "triptych: decoder-0: importing Python packages",
        "triptych: decoder-0 ready after 3.2 s",
    ]
    stream = io.StringIO()
    console = Console({"decoder-0": "WARNING"}, view=make_view("json", stream))
    console.started("decoder-0")
    entry = json.loads(stream.getvalue())
    assert (entry["process"], entry["stage"]) == ("decoder-0", "importing Python packages")
    assert {"time", "level", "service", "message"} <= entry.keys()


def test_a_source_tree_without_a_package_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(serve, "version", missing)
    assert serve.configuration(ServeOptions(), {}).startswith("version unknown, Python ")
