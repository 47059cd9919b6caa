"""The load generator, against a server whose timing and tokens are known."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import serve
from benchmarks.client import Connection, Sample, Target
from benchmarks.peers import FLOORS, TARGETS, VLLM
from benchmarks.report import RowResult, times_better
from benchmarks.workloads import ROWS, WORDS, random_image, request_bodies, row_named, scaled
from tests.noise import PATIENCE_S, wait_until
from tests.unit.triptych.stub_server import StubServer

_ROW = {row.name: row for row in ROWS}


def test_the_rows_are_those_of_the_peer() -> None:
    assert {row.name for row in ROWS} - {"text24_c1"} == set(VLLM) == set(TARGETS)
    assert set(FLOORS) <= set(VLLM)
    lengths = {row.name: row.prompt_tokens for row in ROWS}
    assert lengths["text_c64"] == 1008
    assert lengths["img1024_c1"] == lengths["text1058_c1"] == 1058
    assert lengths["img512_c64"] == 290
    assert lengths["img4x640_c16"] == 1916


def test_words_are_distinct_and_plain() -> None:
    assert len(WORDS) == len(set(WORDS)) > 500
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_bodies_are_new_save_where_a_row_repeats_images() -> None:
    def images(name: str) -> list[str]:
        row = scaled(_ROW[name], 0.25)
        bodies = [json.loads(b) for b in request_bodies(row, "m", seed=1)][row.num_warmup :]
        texts = [body["messages"][0]["content"][-1]["text"] for body in bodies]
        assert len(set(texts)) == len(texts) == row.num_requests
        assert all(len(text.split()) == row.num_words for text in texts)
        return [p["image_url"]["url"] for b in bodies for p in b["messages"][0]["content"][:-1]]

    assert len(set(images("img512_c64"))) == 96
    assert len(set(images("img512_reuse80_c64"))) == 19
    assert len(set(images("img1024_repeat_c1"))) == 1
    assert len(set(images("img4x640_c16"))) == 64


def test_equal_seeds_make_equal_bodies_and_others_differ() -> None:
    row = scaled(_ROW["img512_c64"], 0.02)
    first, again, other = (list(request_bodies(row, "m", seed)) for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)


def test_images_are_jpeg_of_the_requested_size() -> None:
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(random_image(np.random.default_rng(0), 96)))
    assert (image.format, image.size) == ("JPEG", (96, 96))


def test_a_run_measures_writes_and_succeeds(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", stub.url, "--rows", "text_c64,img512_c64", "--scale", "0.1"]
    assert serve.main([*arguments, "--out", str(tmp_path), "--seed", "5"]) == 0
    document = json.loads((tmp_path / "serve.json").read_text())
    row = document["rows"]["text_c64"]
    assert document["model"] == "stub"
    assert row["num_errors"] == 0
    assert row["completion_tokens"] == row["row"]["output_tokens"]
    assert 2.0 <= row["tpot_ms"]["p50"] < row["e2e_ms"]["p99"] / 10
    assert row["tpot_ms"]["p50"] <= row["gap_ms"]["p50"] <= row["e2e_ms"]["p50"]
    assert row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]
    assert stub.most_in_flight == row["row"]["concurrency"] == 6
    assert (tmp_path / "serve.png").stat().st_size > 10_000
    assert "text_c64" in capsys.readouterr().out
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in stub.bodies)


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("refuse", "HTTP 503: full"),
        ("die", "connection lost"),
        ("truncate", "ended before the answer did"),
    ],
)
async def test_a_broken_answer_is_an_error_and_not_a_figure(
    stub: StubServer, behaviour: str, error: str
) -> None:
    stub.behaviour = behaviour
    connection = Connection(Target.from_url(stub.url))
    samples = [await connection.post(b'{"max_tokens": 2}', PATIENCE_S) for _ in range(2)]
    connection.close()
    for sample in samples:
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(sample.error)
    result = RowResult.from_samples(scaled(_ROW["text_c1"], 0.1), samples, 1.0)
    assert (result.num_errors, result.requests_per_s) == (2, 0)


def test_a_server_of_openais_fields_alone_can_be_measured(stub: StubServer) -> None:
    stub.behaviour = "no_done"  # transformers serve ends its streams so
    arguments = ["--url", stub.url, "--rows", "text_c1", "--scale", "0.1", "--may-end-early"]
    assert serve.main(arguments) == 0
    assert stub.bodies
    assert not any("ignore_eos" in body for body in stub.bodies)


def test_the_longest_gap_lies_between_two_events_with_content() -> None:
    """The time to the first content is no gap, and neither is one that an event without any cuts.

    The first token of four comes after 2 s, and the others after 0.5, 3 and 1 s.
    """
    connection = Connection(Target.from_url("http://127.0.0.1:9"))
    sample = connection._sample = Sample(start=100.0)
    for now, text in (
        (101.0, ""),
        (102.0, "a"),
        (102.5, "b"),
        (104.0, ""),
        (105.5, "c"),
        (106.5, "d"),
    ):
        connection._read_event({"choices": [{"delta": {"content": text}}]}, now)
    connection._read_event(
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}, 107
    )
    assert (sample.ttft_s, sample.tpot_s, sample.gap_s) == (2.0, 1.5, 3.0)


async def test_a_request_that_takes_too_long_is_an_error(stub: StubServer) -> None:
    connection = Connection(Target.from_url(stub.url))
    sample = await connection.post(b'{"max_tokens": 1000}', 0.1)
    assert sample.error.startswith("TimeoutError")
    sample = await connection.post(b'{"max_tokens": 2}', PATIENCE_S)
    assert not sample.error
    connection.close()


def test_nobody_there_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--url", "127.0.0.1:9", "--rows", "text_c1"]) == 2
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert serve.main(["--url", "http://127.0.0.1:9", "--model", "m", "--rows", "x"]) == 2
    assert "unknown row x" in capsys.readouterr().err


def test_a_key_that_the_server_asks_for_is_named_and_may_be_exported(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.key = "sk-1"
    arguments = ["--url", stub.url, "--rows", "text_c1", "--scale", "0.1"]
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert serve.main(arguments) == 2
    assert "HTTP 401: no key; give --api-key" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert serve.main(arguments) == 0


def test_ctrl_c_is_a_line(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_send", interrupted)
    assert serve.main(["--url", stub.url, "--rows", "text_c1"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "bench: stopped"


def test_who_is_killed_leaves_no_load_behind(stub: StubServer) -> None:
    """Nor does `timeout`, whose signal ends as suddenly."""
    words = [sys.executable, "-m", "triptych", "bench", "--url", stub.url, "--rows", "text_c256"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as bench:
        # More than the warm-up's.
        wait_until(lambda: len(stub.bodies) > 20, "the measured requests")
        workers = psutil.Process(bench.pid).children(recursive=True)
        bench.terminate()
    assert workers
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []


def test_times_better_points_the_same_way_for_times_and_rates() -> None:
    assert times_better(10, 20, more_is_better=False) == 2
    assert times_better(20, 10, more_is_better=True) == 2
    assert times_better(float("nan"), 10, more_is_better=True) is None


def test_a_row_may_have_any_shape() -> None:
    row = row_named("8x12000+64:48")
    assert (row.concurrency, row.num_requests, row.output_tokens) == (8, 48, 64)
    assert row.prompt_tokens == 12_000
    assert row_named("text_c64").concurrency == 64
    for wrong in ("8x8+64:48", "0x100+64:48", "8x100+0:48", "8x100+64:0", "8x100+64", "text"):
        with pytest.raises(ValueError, match=f"unknown row {re.escape(wrong)}; known: text_c1"):
            row_named(wrong)
