"""The command line: options reach the stack as they were given."""

from pathlib import Path

import pytest

from tests.tiny_tokenizer import write_model_directory, write_text_model_directory
from triptych import cli, serve
from triptych.plan import DEMONSTRATION_MODEL, ServeOptions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    calls: list[ServeOptions] = []

    def fake(options: ServeOptions) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(serve, "serve", fake)
    return calls


def test_serve_without_options_serves_the_demonstration_model(served: list[ServeOptions]) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [ServeOptions()]
    assert served[0].model == DEMONSTRATION_MODEL
    assert (served[0].host, served[0].port) == ("127.0.0.1", 8000)


def test_every_option_arrives(served: list[ServeOptions]) -> None:
    words = (
        "serve --model /m --host 0.0.0.0 --port 9 --device cuda:1 --encoder-device cpu "
        "--decoder-device cuda:0 --dtype float16 --load-format dummy --gateways 4 --encoders 2 "
        "--decoders 3 --redis-url redis://r:1/2 --grpc tcp"
    )
    assert cli.main(words.split()) == 0
    assert served == [
        ServeOptions(
            Path("/m"), "0.0.0.0", 9, "cuda:1", "cpu", "cuda:0", "float16", "dummy", 4, 2, 3,
            "redis://r:1/2", "tcp",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [["serve", "--dtype", "int8"], ["serve", "--encoders", "0"], ["serve", "--what"], [], ["x"]],
)
def test_what_is_not_understood_is_refused(
    words: list[str], served: list[ServeOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: triptych" in capsys.readouterr().err
    assert served == []


def test_a_model_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"triptych: no model at {tmp_path}: it has no config.json"
    )


def test_bench_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--help"])
    assert caught.value.code == 0
    assert "text_c256" in capsys.readouterr().out


def test_without_redis_the_stack_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model_directory(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    options = ServeOptions(model=model, port=0)
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert lines == ["no redis-server found: embeddings are cached in memory only"]
    assert [spec.name for spec in specs] == ["encoder-0", "decoder-0", "gateway"]
    options = ServeOptions(model=model, port=0, redis_url="redis://r")
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert len(lines) == 1
    assert specs[0].environment["ENCODER_REDIS_URL"] == "redis://r"


def test_a_redis_with_passwords_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_directory(tmp_path / "model")
    for url in ("redis://u:secret@r", "redis://r?password=secret", "unix://u:secret@/r"):
        assert cli.main(["serve", "--model", str(model), "--redis-url", url]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "export ENCODER_REDIS_URL" in said and "secret" not in said
    monkeypatch.setenv("ENCODER_REDIS_URL", "redis://e:secret@r")
    monkeypatch.setenv("DECODER_REDIS_URL", "redis://d:secret@r")
    _, specs = serve.prepare(ServeOptions(model=model, port=0), tmp_path, print)
    assert [spec.name for spec in specs] == ["encoder-0", "decoder-0", "gateway"]
    assert specs[0].environment["ENCODER_REDIS_URL"] == "redis://e:secret@r"
    assert specs[1].environment["DECODER_REDIS_URL"] == "redis://d:secret@r"


def test_a_text_model_needs_neither_encoder_nor_redis_and_serve_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    options = ServeOptions(model=write_text_model_directory(tmp_path / "text"), port=0)
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert lines == ["the model takes text alone: no encoder and no Redis are started"]
    assert [spec.name for spec in specs] == ["decoder-0", "gateway"]
    assert specs[0].environment["DECODER_REDIS_URL"] == ""
