"""Pages of a document model, against a server whose answers are known."""

import asyncio
import re

import pytest

from benchmarks import pages
from benchmarks.client import Sample, Target
from benchmarks.workloads import chat_body
from tests.unit.triptych.stub_server import StubServer

_TINY = ["--size", "120x160", "--tokens", "5", "--at-once", "3"]


def answer(end: float, error: str = "") -> Sample:
    """An answer of four seconds with five tokens."""
    return Sample(end - 4, end - 3, end - 1, end, 100, 5, error, gap_s=0.7)


def test_a_window_counts_the_pages_that_end_in_it() -> None:
    answers = [answer(9.0), answer(10.0), answer(12.0), answer(13.0, "HTTP 503"), answer(21.0)]
    line = pages.window("window", answers, 10.0, 20.0)
    assert line == (
        "window: 2 pages in 10 s, 0.200 pages/s, mean 4.00 s, TTFT p50 1000 p99 1000 ms, "
        "TPOT p50 500.00 ms, longest gap p50 700 p99 700 ms, 100 tokens in, 5 out"
    )
    assert pages.window("first half", answers, 14.0, 15.0) == "first half: no page ended in 1 s"


def test_first_requests_begin_one_by_one(stub: StubServer) -> None:
    """Three of them begin within 0.6 s, and those in flight at the end are cancelled."""
    target = Target.from_url(stub.url)
    bodies = [chat_body("stub", f"page {number}", 1000) for number in range(4)]
    bodies[1:1] = [chat_body("stub", "short", 1)]
    answers = asyncio.run(pages.staggered_loop(target, bodies, 3, 0.6, 1.5))
    assert [each.completion_tokens for each in answers] == [1]
    starts = [body["messages"][0]["content"][-1]["text"] for body in stub.bodies]
    assert starts == ["page 0", "short", "page 1", "page 2"]
    assert stub.most_in_flight == 3


def test_a_steady_state_is_measured(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    steady = ["--steady", "0.4", "--round", "0.2", "--pages", "600"]
    assert pages.main(["--url", stub.url, *_TINY, *steady]) == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["window", "first half", "second half"]
    assert 0 < stub.most_in_flight <= 3
    assert len(stub.images()) == len(stub.bodies)


def test_too_few_pages_are_an_error(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    steady = ["--steady", "0.1", "--round", "0.1", "--pages", "3"]
    assert pages.main(["--url", stub.url, *_TINY, *steady]) == 1
    assert "raise --pages" in capsys.readouterr().err


def test_failed_pages_are_an_error(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    stub.behaviour = "refuse"
    steady = ["--steady", "0.1", "--round", "0.1", "--pages", "900"]
    assert pages.main(["--url", stub.url, *_TINY, *steady]) == 1
    assert "x HTTP 503: full" in capsys.readouterr().err


def test_a_whole_run_prints_a_line(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["--url", stub.url, *_TINY, "--pages", "6"]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(r"6 pages of 120x160, 3 at once: .* 9 tokens in, 5 out\n", out)
