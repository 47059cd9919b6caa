"""The demonstration: what it asks, and that it tells the truth about encodes."""

import io
import json
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.triptych.stub_server import StubServer
from triptych import demo
from triptych.demo import Sample, load_samples
from triptych.plan import Plan
from triptych.ports import Ports


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    for name in ("a.png", "b.png", "c.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    listed = [
        {"files": ["a.png"], "questions": ["What is it?", "What colour?"]},
        {"files": ["b.png", "a.png"], "questions": ["Which one?", "And now?"]},
        {"files": ["c.mp4"], "questions": ["What happens?", "When?"]},
        {"files": [], "questions": ["Who are you?"]},
    ]
    (tmp_path / "samples.json").write_text(json.dumps(listed))
    return load_samples(tmp_path)


def ask_all(stub: StubServer, samples: list[Sample]) -> tuple[demo.Totals, str]:
    console = Console(record=True, file=io.StringIO(), width=200)
    urls = {"encoder-0": f"{stub.url}/metrics"}
    plan = Plan(stub.url, "stub", [], urls, "127.0.0.1", 0, {}, [], [], 0.0, [], Ports())
    totals = demo._ask_all(console, samples, plan)
    return totals, console.export_text()


def test_what_is_known_is_not_encoded_again(stub: StubServer, samples: list[Sample]) -> None:
    totals, _ = ask_all(stub, samples)
    assert totals == demo.Totals(files=3, questions=7, encodes=3, repeats=3, repeat_encodes=0)
    assert all(body["include_stage_times"] for body in stub.bodies)


def test_a_clip_is_told_as_it_is_sampled_once(stub: StubServer, samples: list[Sample]) -> None:
    _, text = ask_all(stub, samples)
    told = "4 frames of 160x128 as sampled, 2.0 a second, in pairs at 0.2, 1.2 s: 40 tokens"
    assert text.count(told) == text.count("as sampled") == 1, text
    assert text.index("What happens?") < text.index(told) < text.index("When?")


def test_an_encode_too_many_is_seen(stub: StubServer, samples: list[Sample]) -> None:
    stub.caches = False
    totals, _ = ask_all(stub, samples)
    assert totals.repeat_encodes == 4


def test_questions_need_no_key_and_pass_no_proxy(
    stub: StubServer, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", "sk-of-a-server")
    monkeypatch.setenv("GATEWAY_HOST", "0.0.0.0")
    plan, specs = demo.prepare(demo._OPTIONS, tmp_path, lambda _: None)
    (gateway,) = (spec for spec in specs if spec.is_front)
    assert gateway.environment["GATEWAY_API_KEYS"] == ""
    assert plan.url.startswith("http://127.0.0.1:")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    urllib.request.install_opener(None)  # the next one is made of the environment
    assert ask_all(stub, samples)[0].questions == 7


def test_the_shipped_samples_can_be_asked_about() -> None:
    found = load_samples()
    assert found
    assert any(len(sample.questions) > 1 for sample in found)
    assert any(len(sample.files) > 1 for sample in found)
    assert any(path.suffix == ".mp4" for sample in found for path in sample.files)
    for sample in found:
        assert all(path.is_file() for path in sample.files)
        assert all(question.strip() for question in sample.questions)
