"""The measurement of the encoder's CPU time, against a stub server and threads of known work."""

import os
import subprocess
import sys
import threading

import pytest

from benchmarks import encoder_cpu
from benchmarks.client import Sample, Target
from benchmarks.encoder_cpu import CpuTime, Process, Reading, Usage
from benchmarks.serve import run_row
from benchmarks.workloads import ROWS, request_bodies, scaled
from services.common.threads import NamedThread
from tests.noise import wait_until
from tests.unit.triptych.stub_server import StubServer

_ROW = {row.name: row for row in ROWS}


def test_a_busy_thread_is_reported_by_its_name() -> None:
    """The second thread of the same process does nothing, and has no CPU time."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            sum(range(10_000))

    pid = os.getpid()
    threads = [
        NamedThread(target=work, name="busy-one"),
        NamedThread(target=done.wait, name="idle"),
    ]
    before = encoder_cpu.read_cpu_times([Process("front", pid)])
    for thread in threads:
        thread.start()
    busy, idle = ((pid, thread.native_id or 0) for thread in threads)

    def used() -> dict[tuple[int, int], CpuTime]:
        return encoder_cpu.read_cpu_times([Process("front", pid)]).threads

    try:
        wait_until(lambda: used()[busy].total_s >= 0.1, "CPU time of the busy thread")
        after = encoder_cpu.read_cpu_times([Process("front", pid)])
        names = {key: encoder_cpu.thread_name(*key) for key in (busy, idle)}
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert after.processes[pid].total_s - before.processes[pid].total_s >= 0.1
    assert after.threads[idle].total_s < 0.1
    assert names == {busy: "busy-one", idle: "idle"}


def test_only_the_time_of_full_load_counts() -> None:
    """Two seconds lie between the first answer and the last request; one process takes 0.5 cores
    of user time and 0.25 of system time in them, and one thread of it started later.
    """
    row = scaled(_ROW["img4x640_c16"], 0.5)  # two images a request
    row_images = row.images_per_request

    def reading(at: float, user_s: float, system_s: float, late_s: float | None) -> Reading:
        late = {} if late_s is None else {(7, 8): CpuTime(late_s, 0.0)}
        used = CpuTime(user_s, system_s)
        return Reading(at, {7: used}, {(7, 7): used, **late})

    readings = [reading(0.5, 0.0, 0.0, None), reading(1.0, 1.0, 1.0, None),
                reading(2.0, 1.7, 1.2, 0.1), reading(3.0, 2.0, 1.5, 0.2),
                reading(3.5, 9.0, 9.0, 9.0)]  # fmt: skip
    times = ((0.6, 1.0), (0.6, 2.5), (1.0, 3.0), (3.0, 3.4))
    samples = [Sample(start=start, end=end) for start, end in times]
    samples.append(Sample(start=2.5, end=2.9, error="HTTP 503"))
    usage = Usage.of(readings, samples, row)
    assert usage.seconds == 2.0
    assert usage.images_per_s == 2 * row_images / 2.0
    assert usage.num_errors == 1
    assert usage.of_process(7) == CpuTime(0.5, 0.25)
    assert usage.of_threads(7) == {7: CpuTime(0.5, 0.25), 8: CpuTime(0.1, 0.0)}
    with pytest.raises(ValueError, match="too short to measure"):
        Usage.of(readings[:2], samples, row)


def test_a_row_is_measured_and_printed(
    stub: StubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_cpu, "_MIN_SHARE", 0.0)  # the main thread only waits
    pid = os.getpid()  # whose threads are the stub's server and the observer
    arguments = ["--url", stub.url, "--pids", f"{pid},{pid}", "--scale", "0.2", "--repeat", "10"]
    assert encoder_cpu.main(arguments) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("img512_c64: ")
    assert lines[0].endswith("at 13 requests in flight, 0 errors")
    front = next(line.split() for line in lines if line.startswith("front "))
    assert front[1] == str(pid)
    assert float(front[2]) > 0
    assert float(front[6]) > 10, "resident MiB of this process"
    assert any(line.endswith("(main thread)") for line in lines)


def test_the_load_ends_when_its_time_is_over(stub: StubServer) -> None:
    row = scaled(_ROW["text_c64"], 0.1)
    target = Target.from_url(stub.url)
    samples, _ = run_row(row, target, request_bodies(row, "stub", 1), 30.0, max_s=0.0)
    assert 1 <= len(samples) < row.num_requests
    assert not any(sample.error for sample in samples)


def test_an_encoder_is_found_by_its_command_lines() -> None:
    """The stand-in for the front starts a stand-in for the engine, as the real front does."""
    engine = "import sys; print('ready', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", engine, "services.encoder.engine_main"]
    front = f"import subprocess; subprocess.run({words})"
    command = [sys.executable, "-c", front, "services.encoder"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = encoder_cpu.find_processes()
        process.communicate()
    index = found.index(Process("front", process.pid))
    assert found[index + 1].name == "engine"
    assert found[index + 1].pid != process.pid


@pytest.mark.parametrize("pids", ["1", "1,x", "1,2,3", "1,999999999"])
def test_invalid_process_ids_are_refused(pids: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert encoder_cpu.main(["--pids", pids]) == 2
    assert "--pids" in capsys.readouterr().err


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert encoder_cpu.main(["--rows", "x"]) == 2
    assert "unknown row 'x'" in capsys.readouterr().err
