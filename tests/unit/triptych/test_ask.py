"""`triptych ask` and its client."""

import base64
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.triptych.stub_server import StubServer
from triptych import cli, client
from triptych.client import AskError, Server, ask, media_part, question_message, split_words


def test_ask_streams_the_answer(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.png").write_bytes(b"cat")
    (tmp_path / "dog.jpg").write_bytes(b"dog")
    images = [str(tmp_path / "cat.png"), str(tmp_path / "dog.jpg")]
    assert cli.main(["ask", *images, "Which one?", "--url", stub.url, "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "xxxx\n"
    (body,) = stub.bodies
    assert body["model"] == "stub"
    first, second, text = body["messages"][0]["content"]
    assert first["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(b"cat").decode()
    assert second["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert text == {"type": "text", "text": "Which one?"}


def test_ask_without_an_image(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", "Who are you?", "--url", stub.url]) == 0
    assert capsys.readouterr().out == "xxx\n"


def test_a_reader_that_leaves_ends_it_without_a_word(stub: StubServer) -> None:
    """As `| head` does."""
    words = [sys.executable, "-m", "triptych", "ask", "Who?", "--url", stub.url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asking:
        assert asking.stdout is not None and asking.stderr is not None
        asking.stdout.close()
        assert asking.stderr.read() == b""
    assert asking.returncode == 128 + signal.SIGPIPE


def test_a_key_is_sent_with_each_request(stub: StubServer) -> None:
    assert cli.main(["ask", "Who?", "--url", stub.url, "--api-key", "sk-Me"]) == 0
    assert stub.authorizations == ["Bearer sk-Me"] * 2


@pytest.mark.parametrize("key", ["sk-Me\r", "sk-Mé"])
def test_a_key_that_cannot_be_sent_is_a_line(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the first one is, if a file of another system's lines has it."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert cli.main(["ask", "Who?", "--url", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("triptych ask: the API key has invalid characters")


def test_a_url_is_passed_on_as_it_is() -> None:
    url = "https://example.org/a.png"
    assert media_part(url) == {"type": "image_url", "image_url": {"url": url}}


def test_kinds_are_known_without_the_systems_table() -> None:
    code = (
        "import mimetypes; mimetypes.knownfiles.clear()\n"
        "from triptych.client import media_part\n"
        "urls = [f'https://example.org/a{each}' for each in ('.webp', '.m4v', '.mov', '.tiff')]\n"
        "print(*(media_part(url)['type'] for url in urls))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["image_url", "video_url", "video_url", "image_url"]


@pytest.mark.parametrize("url", ["https://example.org/a.mp4", "data:video/mp4;base64,AAAA"])
def test_a_clip_is_known_by_its_name_or_type(url: str, tmp_path: Path) -> None:
    assert media_part(url) == {"type": "video_url", "video_url": {"url": url}}
    clip = tmp_path / "a.webm"
    clip.write_bytes(b"clip")
    url = "data:video/webm;base64,Y2xpcA=="
    assert media_part(str(clip)) == {"type": "video_url", "video_url": {"url": url}}
    assert split_words([str(clip), "b.mp4", "What happens?"])[0] == [str(clip), "b.mp4"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report.pdf", "is a PDF file, and models read text, images and clips: give a picture"),
        ("notes.txt", "is a text file, and models read text, images and clips: paste its text"),
        ("talk.mp3", "is a file of type audio/mpeg"),
    ],
)
def test_a_file_that_no_model_reads_is_named(
    name: str, words: str, stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"%PDF")
    assert cli.main(["ask", str(tmp_path / name), "What is this?", "--url", stub.url]) == 1
    assert f"{name} {words}" in capsys.readouterr().err
    assert not stub.bodies


def test_a_missing_image_is_named(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AskError, match=r"cannot read none\.png: No such file"):
        question_message(["none.png"], "?")
    assert cli.main(["ask", "none.png", "?", "--url", stub.url]) == 1
    assert "cannot read none.png" in capsys.readouterr().err
    assert stub.bodies == []


def test_an_answer_carries_times_and_usage(stub: StubServer) -> None:
    answer = ask(Server(stub.url), {"messages": [question_message([], "hello")]})
    assert answer.text == "xxx"
    assert answer.usage == {"prompt_tokens": 9, "completion_tokens": 3}
    assert answer.stage_times_ms == {"encode": 4.5, "total": 9.0}
    assert answer.ttft_s is not None
    assert 0 < answer.ttft_s <= answer.total_s


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("refuse", "HTTP 503: full"),
        ("error", "interrupted by an error: the decoder died"),
        ("error as text", "interrupted by an error: the decoder died"),
        ("words", "not a chunk of an answer: upstream went away"),
        ("truncate", "ended before the answer was complete"),
        ("die", "ended before the answer was complete"),
    ],
)
def test_a_broken_answer_is_never_taken_for_a_whole_one(
    stub: StubServer, behaviour: str, message: str
) -> None:
    stub.behaviour = behaviour
    with pytest.raises(AskError, match=message):
        ask(Server(stub.url), {"messages": [question_message([], "hello")]})


def test_a_server_that_starts_is_waited_for(
    stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.behaviour = "starts"
    assert cli.main(["ask", "Who are you?", "--url", stub.url]) == 0
    told = capsys.readouterr()
    assert told.out == "xxx\n"
    assert told.err == "waiting for the server (HTTP 503: no decoder is available)\n"


def test_a_server_that_stays_full_is_left(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MOST_WAITING_S", 0.5)
    stub.behaviour = "starts"
    with pytest.raises(AskError, match="HTTP 503: no decoder is available"):
        ask(Server(stub.url), {"messages": [question_message([], "hello")]})
    assert len(stub.bodies) == 1


def test_nobody_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ask", "hello", "--url", "http://127.0.0.1:9"]) == 1
    assert "is `triptych serve` running?" in capsys.readouterr().err
    for url in ("ftp://x", "http://[::1", "http://h:port"):
        with pytest.raises(AskError, match="not an http URL"):
            Server(url)
    with pytest.raises(AskError, match="no answer from http://a b"):
        Server("http://a b").first_model()
    assert Server("http://[::1]")._port == 80


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_a_url_is_understood_as_people_write_it(stub: StubServer, end: str) -> None:
    assert Server(stub.url + end).first_model() == "stub"
    assert Server(stub.url.removeprefix("http://") + end).url == stub.url
    assert Server("https://h/api/v1").url == "https://h/api"


def test_images_and_question_come_in_any_order(tmp_path: Path) -> None:
    image = tmp_path / "cat.png"
    image.write_bytes(b"cat")
    plain = tmp_path / "no-suffix"
    plain.write_bytes(b"dog")
    url = "https://example.org/a.png"
    for words in ([str(image), "What is it?", url], ["What is it?", str(image), url]):
        assert split_words(words) == ([str(image), url], "What is it?")
    assert split_words([str(plain), "why"]) == ([str(plain)], "why")
    assert split_words(["who", "are", "you?"]) == ([], "who are you?")
    assert split_words(["HTTPS://h/a", "why"]) == (["HTTPS://h/a"], "why")
    assert split_words(["//[ is what?"]) == ([], "//[ is what?")
    long = "a question of more characters than a file's name may have " * 8
    assert split_words([url, long]) == ([url], long)
    with pytest.raises(AskError, match=r"no question about .*cat\.png: triptych ask"):
        split_words([str(image)])
    with pytest.raises(AskError, match="'cat' is not a file; if it belongs to the question"):
        split_words(["cat", "What is it?"])


def test_a_key_is_sent_where_it_is_given(
    stub: StubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.key = "sk-1"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert cli.main(["ask", "hello", "--url", stub.url]) == 1
    assert "HTTP 401: no key; give --api-key, or export OPENAI_API_KEY" in capsys.readouterr().err
    assert cli.main(["ask", "hello", "--url", stub.url, "--api-key", "sk-1"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert cli.main(["ask", "hello", "--url", stub.url]) == 0
