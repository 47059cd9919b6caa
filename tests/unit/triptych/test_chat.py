"""`triptych chat`: a conversation over a pipe, as over a terminal."""

import io
from pathlib import Path

import pytest

from tests.unit.triptych.stub_server import StubServer
from triptych import cli
from triptych.chat import split_images
from triptych.client import AskError


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "cat.png", tmp_path / "two words.jpg"]
    for path in found:
        path.write_bytes(path.name.encode())
    return found


def talk(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, lines: list[str], *options: str
) -> list[list[dict]]:
    """What the server was sent, turn by turn."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["chat", "--url", stub.url, "--max-tokens", "2", *options]) == 0
    return [body["messages"] for body in stub.bodies]


def test_turns_are_streamed_and_remembered(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = talk(stub, monkeypatch, ["hello", "", "and now?"], "--system", "Be brief.")
    assert [m["role"] for m in first] == ["system", "user"]
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == "xx"
    assert second[3]["content"] == [{"type": "text", "text": "and now?"}]
    assert capsys.readouterr().out.splitlines()[1:] == ["xx", "xx"]


def test_images_go_by_their_paths(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, images: list[Path]
) -> None:
    lines = [f"what is in {images[0]} ?", f"/image '{images[1]}'", "and there?", "/clear", "bye"]
    first, second, third = talk(stub, monkeypatch, lines)
    kinds = [[part["type"] for part in m["content"]] for m in (first[-1], second[-1])]
    assert kinds == [["image_url", "text"], ["image_url", "text"]]
    assert first[-1]["content"][1]["text"] == "what is in?"
    assert second[-1]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert len(third) == 1


def test_a_home_is_expanded(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, images: list[Path]
) -> None:
    monkeypatch.setenv("HOME", str(images[0].parent))
    first, second = talk(stub, monkeypatch, ["what is ~/cat.png ?", "/image ~/cat.png", "and?"])
    for messages, said in ((first, "what is?"), (second, "and?")):
        image, text = messages[-1]["content"]
        assert image["type"] == "image_url" and text["text"] == said


def test_image_without_a_path_shows_none(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (messages,) = talk(stub, monkeypatch, ["/image", "hello"])
    assert messages[-1]["content"] == [{"type": "text", "text": "hello"}]
    said = capsys.readouterr()
    assert "be sent with" not in said.out and said.err == "the path is missing: /image PATH\n"


def test_a_clip_goes_by_its_path(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clip = tmp_path / "moves.mp4"
    clip.write_bytes(b"clip")
    (messages,) = talk(stub, monkeypatch, [f"{clip} what happens?"])
    part, text = messages[-1]["content"]
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert text["text"] == "what happens?"


def test_a_turn_that_fails_is_said_and_forgotten(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.behaviour = "refuse"
    first, second = talk(stub, monkeypatch, ["hello", "/image none.png", "again", "/bye", "no"])
    assert len(first) == len(second) == 1
    said = capsys.readouterr().err
    assert said.count("HTTP 503: full") == 2 and "cannot read none.png" in said


def test_nobody_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "is `triptych serve` running?" in line


def test_what_is_no_url_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "ftp://x"]) == 1
    assert capsys.readouterr().err == "triptych chat: not an http URL: ftp://x\n"


@pytest.mark.parametrize(
    ("sentence", "rest"),
    [
        ("What is in {}?", "What is in?"), ("Look at {}, please", "Look at, please"),
        ("This is {}.", "This is."), ("Here ({}): what?", "Here (): what?"),
        ("What's in {}?", "What's in?"), ("Is it '{}'?", "Is it?"),
    ],
)  # fmt: skip
def test_punctuation_belongs_to_no_path(sentence: str, rest: str, images: list[Path]) -> None:
    assert split_images(sentence.format(images[0])) == ([str(images[0])], rest)


def test_a_file_that_is_not_there_is_a_line_and_sends_nothing(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["What is in none.png?", "what's ~/none.mp4 about", "/text Rename none.png", "/text"]
    (messages,) = talk(stub, monkeypatch, lines)
    assert messages[-1]["content"] == [{"type": "text", "text": "Rename none.png"}]
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("there is no file none.png, so nothing was sent")
    assert second.startswith("there is no file ~/none.mp4,")
    assert third == "the message is missing: /text MESSAGE"
    with pytest.raises(AskError, match=r"there is no file x{300}"):
        split_images(f"{'x' * 300}.png")


def test_an_unknown_command_is_a_line_and_sends_nothing(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (messages,) = talk(stub, monkeypatch, ["/foo bar", "/tmp is a folder", "/img x.png"])
    assert messages[-1]["content"][0]["text"] == "/tmp is a folder"
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "no such command: /foo; /help lists the commands",
        "no such command: /img; /help lists the commands",
    ]


def test_images_are_found_by_words_quotes_and_urls(images: list[Path]) -> None:
    for text in ("what about it? A. no.", "explain index.ts, main.py"):
        assert split_images(text) == ([], text)
    assert split_images(f"compare '{images[1]}' and {images[0]} now") == (
        [str(images[1]), str(images[0])], "compare and now",
    )  # fmt: skip
    url = "https://example.org/a.png"
    assert split_images(f"{url} what?") == ([url], "what?")
