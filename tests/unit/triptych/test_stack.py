"""The supervisor, with stub children in the place of services."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.noise import PATIENCE_S, async_least, least
from triptych.stack import ChildSpec, Quiet, Stack, StackError, exit_status, run_until_signal

_READY_THEN_SLEEP = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
_STUBBORN = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
)


def child(name: str, code: str, directory: Path) -> ChildSpec:
    """A Python one-liner that is ready when it has made its file."""
    flag = directory / f"{name}.ready"

    async def is_ready() -> bool:
        return flag.exists()

    command = [sys.executable, "-c", code, str(flag)]
    return ChildSpec(name, command, {}, is_ready, is_front=name.startswith("gateway"))


def silent() -> Stack:
    return Stack(Quiet(lambda _: None), grace_s=PATIENCE_S)


def found_by_argument(directory: Path, name: str) -> psutil.Process:
    """The child of this process that `child` described."""
    flag = str(directory / f"{name}.ready")
    (found,) = (p for p in psutil.Process().children() if flag in p.cmdline())
    return found


async def test_the_front_door_is_closed_before_what_is_behind_it(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.3)\n"
        f"    print(sys.argv[1].split('/')[-1], file=open({str(order)!r}, 'a'))\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(60)"
    )
    async with silent() as stack:
        names = ("gateway-0", "encoder-0", "gateway-1")
        await stack.start([child(name, code, tmp_path) for name in names], PATIENCE_S)
    *fronts, behind = order.read_text().split()
    assert (sorted(fronts), behind) == (["gateway-0.ready", "gateway-1.ready"], "encoder-0.ready")


async def test_start_returns_when_all_are_ready_and_stop_ends_them(tmp_path: Path) -> None:
    lines: list[str] = []
    async with Stack(Quiet(lines.append)) as stack:
        names = ("encoder-0", "decoder-0")
        await stack.start([child(n, _READY_THEN_SLEEP, tmp_path) for n in names], PATIENCE_S)
        own = [found_by_argument(tmp_path, name) for name in names]
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in own)
    assert sorted(line.split(" ready")[0] for line in lines) == ["decoder-0", "encoder-0"]


async def test_children_share_the_session_and_no_process_group(tmp_path: Path) -> None:
    code = "import signal; assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN; "
    async with silent() as stack:
        await stack.start([child("encoder-0", code + _READY_THEN_SLEEP, tmp_path)], PATIENCE_S)
        pid = found_by_argument(tmp_path, "encoder-0").pid
        assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)


async def test_a_child_that_dies_before_ready_is_named_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('no such checkpoint'); sys.exit(7)"
    async with silent() as stack:
        with pytest.raises(StackError, match=r"decoder-0 ended before .* exit status 7") as caught:
            await stack.start([child("decoder-0", code, tmp_path)], PATIENCE_S)
    assert caught.value.status == 7
    assert "no such checkpoint" in str(caught.value)


async def test_a_clean_exit_before_ready_is_still_a_failure(tmp_path: Path) -> None:
    async with silent() as stack:
        with pytest.raises(StackError) as caught:
            await stack.start([child("gateway", "pass", tmp_path)], PATIENCE_S)
    assert caught.value.status == 1


async def test_a_child_that_dies_while_serving_ends_the_stack_with_its_status(
    tmp_path: Path,
) -> None:
    async with silent() as stack:
        code = f"print('started', flush=True); {_READY_THEN_SLEEP}"
        await stack.start([child(n, code, tmp_path) for n in ("encoder-0", "gateway")], PATIENCE_S)
        found_by_argument(tmp_path, "encoder-0").kill()
        # Without its last words, which do not say who killed it.
        with pytest.raises(StackError, match=r"encoder-0 ended while serving: .* SIGKILL$"):
            async with asyncio.timeout(PATIENCE_S):
                await stack.watch()


async def test_a_command_that_cannot_run_is_an_error(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    async with silent() as stack:
        with pytest.raises(StackError, match="redis cannot be started"):
            await stack.start([ChildSpec("redis", ["/no/such/program"], {}, never)], PATIENCE_S)


async def test_not_ready_in_time_is_an_error(tmp_path: Path) -> None:
    async with silent() as stack:
        with pytest.raises(StackError, match="encoder-0 was not ready in time"):
            await stack.start([child("encoder-0", "import time; time.sleep(60)", tmp_path)], 0.2)


async def test_before_all_are_ready_nothing_is_waited_for(tmp_path: Path) -> None:
    """A wrong turn is not followed by seconds of silence, nor by words about those that waited."""

    async def seconds() -> float:
        lines: list[str] = []
        failed_at = 0.0
        specs = [
            child("decoder-0", _STUBBORN, tmp_path), child("encoder-0", "exit(2)", tmp_path)
        ]  # fmt: skip
        with pytest.raises(StackError, match="encoder-0 ended before it was ready: exit status 2"):
            async with Stack(Quiet(lines.append)) as stack:
                try:
                    await stack.start(specs, PATIENCE_S)
                finally:
                    failed_at = time.monotonic()
        assert not any("did not stop" in line for line in lines)
        return time.monotonic() - failed_at

    assert await async_least(seconds, 3) < 3


async def test_lines_of_children_reach_the_observer(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []

    class Kept(Quiet):
        def output(self, child: str, line: str) -> None:
            lines.append((child, line))

    code = "print('one', flush=True); import os; os.write(2, b'two \\xff\\n'); "
    async with Stack(Kept(lambda _: None)) as stack:
        await stack.start([child("encoder-0", code + _READY_THEN_SLEEP, tmp_path)], PATIENCE_S)
    assert lines == [("encoder-0", "one"), ("encoder-0", "two \ufffd")]


async def test_a_child_that_ignores_the_signal_is_killed_in_time(tmp_path: Path) -> None:
    async def seconds() -> float:
        lines: list[str] = []
        async with Stack(Quiet(lines.append)) as stack:
            await stack.start([child("decoder-0", _STUBBORN, tmp_path)], PATIENCE_S)
            start = time.monotonic()
        assert lines[-1] == "decoder-0 did not stop within 4.5 s: killed"
        return time.monotonic() - start

    assert await async_least(seconds, 9) < 9


@pytest.mark.parametrize(("returncode", "status"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_status_is_that_of_a_shell(returncode: int, status: int) -> None:
    assert exit_status(returncode) == status


_SUPERVISOR = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from tests.unit.triptych.test_stack import _READY_THEN_SLEEP, _STUBBORN, child
    from triptych.stack import Quiet, Stack, run_until_signal

    code = _STUBBORN if sys.argv[3:] else _READY_THEN_SLEEP
    specs = [child(n, code, Path(sys.argv[1])) for n in ("encoder-0", "gateway")]
    stack = Stack(Quiet(lambda _: None), grace_s=float(sys.argv[2]))
    ready = lambda: print("ready", flush=True)
    async def nothing():
        await asyncio.sleep(1000)
    async def stopping():
        print("stopping", flush=True)
    sys.exit(asyncio.run(run_until_signal(stack, specs, 60, ready, nothing, stopping)))
    """
)


def _supervisor(
    directory: Path, grace_s: str = "2.5", *stubborn: str, nohup: bool = False
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    # Inherited; the tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(directory), grace_s, *stubborn],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    signal.signal(signal.SIGHUP, before)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    return process, children


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_within_five_seconds(tmp_path: Path, number: signal.Signals) -> None:
    def seconds() -> float:
        process, children = _supervisor(tmp_path)
        with process:
            start = time.monotonic()
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
        assert psutil.wait_procs(children, timeout=0)[1] == []
        return time.monotonic() - start

    assert least(seconds, 5) <= 5


def test_a_closed_terminal_ends_nothing_under_nohup(tmp_path: Path) -> None:
    process, _ = _supervisor(tmp_path, nohup=True)
    with process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    process, children = _supervisor(tmp_path, "100", "stubborn")
    with process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert psutil.wait_procs(children, timeout=0)[1] == []


async def test_a_signal_before_all_are_ready_is_said(tmp_path: Path) -> None:
    lines: list[str] = []

    async def nothing() -> None: ...

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    asyncio.get_running_loop().call_later(0.1, interrupt)
    specs = [child("encoder-0", "import time; time.sleep(60)", tmp_path)]
    stack = Stack(Quiet(lines.append))
    assert await run_until_signal(stack, specs, PATIENCE_S, lambda: None, nothing, nothing) == 0
    assert lines == ["stopped before all were ready"]


def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    process, children = _supervisor(tmp_path)
    with process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
