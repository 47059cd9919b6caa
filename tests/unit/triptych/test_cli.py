"""The command line: options reach the stack as they were given."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_tokenizer import write_model_directory, write_text_model_directory
from triptych import cli, serve
from triptych.options import DEMONSTRATION_MODEL, ServeOptions


def served(*words: str) -> ServeOptions:
    """The options that `triptych serve` runs with."""
    return cli.serve_options(cli.build_parser().parse_args(["serve", *words]))


def test_serve_without_options_serves_the_demonstration_model() -> None:
    assert served() == ServeOptions()
    assert served().model == DEMONSTRATION_MODEL


def test_every_option_arrives() -> None:
    words = (
        "/m --host 0.0.0.0 --port 9 --device cuda:1 --encoder-device cpu "
        "--decoder-device cuda:0 --dtype float16 --load-format dummy --gateways 4 --encoders 2 "
        "--decoders 3 --redis-url redis://r:1/2 --grpc tcp --served-model-name m m2 --api-key k "
        "--max-model-len 99 --gpu-memory-utilization 0.5 --max-num-seqs 8 "
        "--metrics-host ::1 --metrics-port 7 --log-level debug --access-log --quantization fp8 "
        "--chat-template /t --default-chat-template-kwargs {} --override-generation-config {} "
        '--limit-mm-per-prompt {"image":4,"video":{"count":1}}'
    )
    assert served(*words.split()) == ServeOptions(
        model=Path("/m"), host="0.0.0.0", port=9, device="cuda:1", encoder_device="cpu",
        decoder_device="cuda:0", dtype="float16", load_format="dummy", gateways=4, encoders=2,
        decoders=3, redis_url="redis://r:1/2", grpc="tcp", served_names=["m", "m2"], api_key="k",
        max_model_len=99, memory_share=0.5, max_num_seqs=8, metrics_host="::1", metrics_port=7,
        log_level="DEBUG", access_log=True, quantization="fp8",
        chat_template=Path("/t"), template_defaults="{}", generation="{}",
        max_media={"image": 4, "video": 1},
    )  # fmt: skip


def test_a_model_is_named_by_its_place_or_by_an_option() -> None:
    assert served("org/name").model == Path("org/name")
    assert served("--model", "org/name", "--port", "1").model == Path("org/name")


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--dtype", "int8"],
        ["serve", "--encoders", "0"],
        ["serve", "--what"],
        ["serve", "/m", "--model", "/n"],
        [],
        ["x"],
        ["serve", "--port", "99999"],
        ["serve", "--device", "gpu"],
        ["serve", "--port", "x"],
        ["serve", "--gpu-memory-utilization", "90"],
        ["serve", "--limit-mm-per-prompt", "image=4"],
        ["serve", "--limit-mm-per-prompt", '["image"]'],
        ["serve", "--limit-mm-per-prompt", '{"audio": 1}'],
        ["serve", "--limit-mm-per-prompt", '{"image": -1}'],
        ["serve", "--limit-mm-per-prompt", '{"image": true}'],
        ["serve", "--limit-mm-per-prompt", '{"video": 257}'],
    ],
)
def test_what_is_not_understood_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.build_parser().parse_args(words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    command = "triptych serve" if words[:1] == ["serve"] else "triptych"
    assert line.startswith(f"{command}: ") and line.endswith(f" (see {command} --help)")


def test_a_model_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].split(" ", 1)[1] == (
        f"triptych: no model at {tmp_path}: it has no config.json"
    )


@pytest.mark.parametrize(
    ("words", "meanwhile"),
    [
        ("serve org/name", "triptych.serve.resolve_model"),
        ("demo", "triptych.demo.load_samples"),
        ("ask Who?", "triptych.client.Server.first_model"),
        ("chat", "triptych.client.Server.first_model"),
    ],
)
def test_ctrl_c_is_a_line(
    words: str,
    meanwhile: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(meanwhile, interrupted)
    assert cli.main(words.split()) == 130
    assert capsys.readouterr().err == "\ntriptych: stopped\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("words", "meanwhile", "failed"),
    [
        ("serve org/name", "triptych.serve.resolve_model", False),
        ("demo", "triptych.demo.load_samples", True),
    ],
)
def test_what_ends_a_command_before_it_has_a_stack_leaves_nothing(
    number: signal.Signals, words: str, meanwhile: str, failed: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Who ends a server gets what was asked for; questions that are not answered are a failure."""
    both = (signal.SIGTERM, signal.SIGHUP)
    former = {each: signal.signal(each, lambda *_: None) for each in both}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(meanwhile, lambda *_: signal.raise_signal(number))
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(words.split())
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)
    assert ended.value.code == (128 + number if failed else 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_disk_that_takes_nothing_is_a_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        assert cli.main([command]) == 1
    out, err = capsys.readouterr()
    assert "no temporary directory can be made" in out + err
    assert len((out + err).splitlines()) == 1


def test_bench_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--help"])
    assert caught.value.code == 0
    assert "text_c256" in capsys.readouterr().out


def test_where_no_socket_fits_there_is_no_redis(tmp_path: Path) -> None:
    model = write_model_directory(tmp_path / "model")
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    lines: list[str] = []
    options = ServeOptions(model=model, port=0, load_format="dummy")
    _, specs = serve.prepare(options, directory, lines.append)
    assert lines[0].startswith(f"the path {directory} (TMPDIR) is too long")
    assert [spec.name for spec in specs] == ["encoder-0", "decoder-0", "gateway"]


def test_without_redis_the_stack_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model_directory(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    options = ServeOptions(model=model, port=0, load_format="dummy")
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert lines[:-1] == ["no redis-server found: embeddings are cached in memory only"]
    assert [spec.name for spec in specs] == ["encoder-0", "decoder-0", "gateway"]
    options = replace(options, redis_url="redis://localhost")
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert len(lines) == 3
    assert specs[0].environment["ENCODER_REDIS_URL"] == "redis://localhost"


def test_a_redis_with_passwords_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_directory(tmp_path / "model")
    for url in ("redis://u:secret@r", "redis://r?password=secret", "unix://u:secret@/r"):
        assert cli.main(["serve", str(model), "--load-format", "dummy", "--redis-url", url]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "export ENCODER_REDIS_URL" in said and "secret" not in said
    for url in ("redis://u:secret@[", "http://u:secret@r", "localhost:6379"):
        assert cli.main(["serve", str(model), "--load-format", "dummy", "--redis-url", url]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "--redis-url is not a URL of Redis" in said and "secret" not in said
    monkeypatch.setenv("ENCODER_REDIS_URL", "redis://e:secret@localhost")
    monkeypatch.setenv("DECODER_REDIS_URL", "redis://d:secret@localhost")
    _, specs = serve.prepare(
        ServeOptions(model=model, port=0, load_format="dummy"), tmp_path, print
    )
    assert [spec.name for spec in specs] == ["encoder-0", "decoder-0", "gateway"]
    assert specs[0].environment["ENCODER_REDIS_URL"] == "redis://e:secret@localhost"
    assert specs[1].environment["DECODER_REDIS_URL"] == "redis://d:secret@localhost"


def test_a_text_model_needs_neither_encoder_nor_redis_and_serve_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    model = write_text_model_directory(tmp_path / "text")
    options = ServeOptions(model=model, port=0, load_format="dummy")
    _, specs = serve.prepare(options, tmp_path, lines.append)
    assert lines[:-1] == ["the model is a text model: no encoder and no Redis are started"]
    assert [spec.name for spec in specs] == ["decoder-0", "gateway"]
    assert specs[0].environment["DECODER_REDIS_URL"] == ""
