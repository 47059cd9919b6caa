"""One clip over one encoder and over two: copies of a clip, the order of questions, the report."""

import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from benchmarks import two_encoders
from benchmarks.two_encoders import Answer
from tests.unit.triptych.stub_server import StubServer


def frames(clip: bytes) -> np.ndarray:
    with av.open(io.BytesIO(clip), "r") as container:
        return np.stack([frame.to_ndarray() for frame in container.decode(video=0)])


def keys(clip: bytes) -> list[bytes]:
    """The packets of key frames."""
    with av.open(io.BytesIO(clip), "r") as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.is_keyframe]


def test_copies_of_a_clip_differ_in_each_key_frame_and_have_its_pixels() -> None:
    clip = two_encoders.base_clip("g10", 1, 64, None)
    first, second = (two_encoders.noted(clip, number) for number in (1, 2))
    assert len(keys(clip)) == 3
    for a, b, original in zip(keys(first), keys(second), keys(clip), strict=True):
        assert a != b
        assert a.endswith(original)
    assert np.array_equal(frames(first), frames(clip))
    assert np.array_equal(frames(second), frames(clip))


def test_only_defaults_have_b_frames() -> None:
    def has_b_frames(clip: bytes) -> bool:
        with av.open(io.BytesIO(clip), "r") as container:
            return any(frame.pict_type == av.video.frame.PictureType.B  # pyright: ignore
                       for frame in container.decode(video=0))  # fmt: skip

    assert has_b_frames(two_encoders.base_clip("g60", 1, 64, None))
    assert not has_b_frames(two_encoders.base_clip("u60", 1, 64, None))


def test_a_kept_clip_is_made_once(tmp_path: Path) -> None:
    made = two_encoders.base_clip("u60", 1, 64, tmp_path / "clips")
    (path,) = (tmp_path / "clips").iterdir()
    path.write_bytes(b"kept")
    assert made != two_encoders.base_clip("u60", 1, 64, tmp_path / "clips") == b"kept"


def test_gateways_are_asked_in_turn_about_new_files(stub: StubServer) -> None:
    """The stub stands for both gateways, and this process for an encoder."""
    rounds = 2
    count = 2 * (rounds + 2)
    clip = two_encoders.base_clip("u60", 1, 64, None)
    clips, images = two_encoders.clip_questions(clip, 0), two_encoders.image_questions(3, 32)
    questions = {
        "u60": [next(clips) for _ in range(count)],
        "images": [next(images) for _ in range(count)],
    }
    asked: list[str] = []

    def ask(url: str, model: str, *parts: dict) -> tuple[float, dict[str, float], int]:
        asked.extend(part[part["type"]]["url"] for part in parts)
        assert model == "stub"
        return 30.0, {"encode": 20.0}, 9

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_encoders, "ask", ask)
        urls = {1: stub.url, 2: stub.url}
        answers = list(two_encoders.measure(urls, [psutil.Process()], questions))
    assert [(answer.kind, answer.encoders) for answer in answers] == [
        ("u60", 1), ("u60", 2), ("images", 1), ("images", 2),
        ("u60", 2), ("u60", 1), ("images", 2), ("images", 1),
    ]  # fmt: skip
    assert len(asked) == count * (1 + 3)
    assert set(Counter(asked).values()) == {1}
    assert all(answer.cpu_s[0] >= 0 for answer in answers)


def test_medians_and_their_ratio_are_reported() -> None:
    times = {1: (400.0, 500.0, 900.0), 2: (300.0, 310.0, 250.0)}
    answers = [
        Answer("g250", count, ms + 100, ms, 9, [0.1, 0.2])
        for count in (1, 2)
        for ms in times[count]
    ]
    assert two_encoders.report(answers, "g250").splitlines() == [
        "g250 encode, ms: one encoder 500 (400, 500, 900), two 300 (300, 310, 250), ratio 0.60",
        "g250 TTFT, ms: one encoder 600 (500, 600, 1000), two 400 (400, 410, 350), ratio 0.67",
    ]


def test_a_process_and_its_children_are_pinned() -> None:
    core = min(os.sched_getaffinity(0))
    child = "import sys; print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        started = psutil.Process(process.pid)
        two_encoders.pin(started, [core])
        members = two_encoders.family(started)
        assert len(members) == 2
        assert all(member.cpu_affinity() == [core] for member in members)
        assert two_encoders.cpu_s(started) > 0
        process.communicate()


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100, 116)))
    first, second, rest = two_encoders.cores_of(2, None)
    assert (len(first), len(second), len(rest)) == (6, 6, 4)
    assert sorted(first + second + rest) == list(range(100, 116))
    assert list(map(len, two_encoders.cores_of(2, 7))) == [7, 7, 2]
    with pytest.raises(ValueError, match="--cores"):
        two_encoders.cores_of(2, 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100, 120)))
    assert list(map(len, two_encoders.cores_of(2, None))) == [6, 6, 8]


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        two_encoders.main(["--model", "x", "--kinds", "x60"])
    assert "x60 is not a kind" in capsys.readouterr().err
