"""The `triptych` command: serve, ask, chat, key, bench, demo.

Parses arguments and imports the command that runs, so that `ask` needs no services and `--version`
takes no time. Bad arguments are one line and exit status 2.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from triptych.options import (
    CARD_SHARE,
    DEFAULT_PORT,
    DEMONSTRATION_MODEL,
    DEVICE,
    LOOPBACK,
    ServeOptions,
)

_LOG_LEVELS = ("debug", "info", "warning", "error")
# Options of vLLM that are none here, and why.
_ELSEWHERE = {
    "--pipeline-parallel-size": "--tensor-parallel N divides a model among N cards",
    "--data-parallel-size": "--decoders N is that here: one decoder a card",
    "--enable-lora": "LoRA is not served",
    "--limit-mm-per-prompt": "export GATEWAY_MAX_IMAGES and GATEWAY_MAX_VIDEOS",
    "--allowed-local-media-path": "export GATEWAY_ALLOWED_MEDIA",
    "--allowed-origins": "export GATEWAY_ALLOWED_SITES",
    "--uvicorn-log-level": "--log-level is that here",
    "--disable-log-requests": "requests are logged with --access-log alone",
    "--media-io-kwargs": "a request says it: media_io_kwargs, or fps and num_frames of a video",
    "--trust-remote-code": "no code of a checkpoint is run, and none is needed",
    "--max-num-batched-tokens": "a step is bounded by its time: export DECODER_STEP_MS",
    "--enable-prefix-caching": "the prefix cache is always on",
    "--enable-chunked-prefill": "prompts are always cut to the bound on a step",
    "--enable-auto-tool-choice": "tools need no option",
    "--tool-call-parser": "the parser follows from the model",
    "--reasoning-parser": "the parser follows from the model",
    "--enable-per-request-metrics": "a request asks for them: include_stage_times",
    "--return-tokens-as-token-ids": "a request asks for it, by that name",
    "--enable-force-include-usage": "a request asks for it: stream_options.include_usage",
    "--tokenizer": "the tokenizer is the model's",
    "--chat-template": "the chat template is the model's",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. At Ctrl-C, and if nobody reads what it writes,
    as after `| head`, it ends as programs of the shell do.
    """
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python writes what is left when it ends, and would report the same error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\ntriptych: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:  # the load generator parses its own options
        from benchmarks.serve import main as bench_main

        return bench_main(argv[1:])
    options = build_parser().parse_args(argv)
    return options.run(options)


class _Parser(argparse.ArgumentParser):
    # Else the parser above would refuse them, and name its own help.
    def parse_known_args(self, *given: Any) -> Any:  # pyright: ignore  # noqa: ANN401
        found, unknown = super().parse_known_args(*given)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        words = set(re.findall(r"(?<!\S)-{1,2}[a-z][\w-]*", message))
        hints = [f"{name}: {_ELSEWHERE[name]}" for name in sorted(words & _ELSEWHERE.keys())]
        text = "; ".join([message, *hints])
        self.exit(2, f"{self.prog}: {text} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = _Parser(prog="triptych", description="Serves vision-language and text models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_ask(commands)
    _add_chat(commands)
    _add_key(commands)
    commands.add_parser("bench", help="measure a server under load (see: triptych bench --help)")
    demo = commands.add_parser("demo", help="start the stack and ask about sample images and clips")
    demo.set_defaults(run=_demo)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"triptych {version('triptych')}")
        except PackageNotFoundError:
            print("triptych (its sources, not installed)")
        parser.exit()


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    serve = commands.add_parser("serve", help="serve a model on this machine", allow_abbrev=False)
    group = serve.add_argument_group("model")
    model = group.add_argument
    once = group.add_mutually_exclusive_group().add_argument
    kind = "ORG/NAME|DIR"
    what = "of the hub, or a checkpoint directory; default: the demonstration model"
    once("model", nargs="?", type=Path, metavar=kind, help=what)
    once("--model", dest="model_option", type=Path, metavar=kind, help="the same")
    model("--revision", help="branch, tag or commit of a model of the hub; pin a commit")
    model("--served-model-name", dest="served_name", metavar="NAME", help="`model` of requests")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    model("--dtype", choices=dtypes, help="of weights and caches; auto: bfloat16 on a GPU")
    model("--load-format", choices=("auto", "dummy"), help="dummy: random weights")
    model("--quantization", choices=("fp8",), help="quantizes weights while they are read")
    bits = "fp8: 8 bits, which doubles the context; auto: as --dtype, or as the checkpoint asks"
    model("--kv-cache-dtype", choices=("auto", "fp8", "fp8_e4m3"), help=bits)

    api = serve.add_argument_group("API").add_argument
    api("--host", help=f"address; default: {LOOPBACK}")
    api("--port", type=_port, help=f"default: {DEFAULT_PORT}; 0: any free one")
    api("--api-key", metavar="KEY", help="that requests must show; seen by users of this machine")
    prometheus = f"of Prometheus; default: {LOOPBACK}"
    api("--metrics-host", default=LOOPBACK, metavar="ADDRESS", help=prometheus)
    api(
        "--metrics-port", type=_port, default=0, metavar="PORT",
        help="of Prometheus, all processes together; default: any free one, which is printed",
    )  # fmt: skip

    cards = serve.add_argument_group("cards and memory").add_argument
    cards(
        "--device", type=_device, default="auto",
        help="cuda: all visible cards; cuda:N; cpu; auto: all cards if there are any",
    )  # fmt: skip
    cards("--encoder-device", type=_device, metavar="DEVICE", help="instead of --device")
    cards("--decoder-device", type=_device, metavar="DEVICE", help="instead of --device")
    cards(
        "--tensor-parallel", "--tensor-parallel-size", "-tp", type=_count, metavar="N",
        help="cards that share a model: each decoder has N; default: one",
    )  # fmt: skip
    cards(
        "--layout", default="auto", metavar="both|split:E+D|auto",
        help="both stages on each card, or E cards of encoders and D of decoders; auto: by the "
        "share of encoding, which is printed",
    )  # fmt: skip
    share = f"of each card's memory; default: {CARD_SHARE:g}"
    cards(
        "--gpu-memory-utilization", dest="memory_share", type=_share, default=CARD_SHARE,
        metavar="SHARE", help=share,
    )  # fmt: skip
    length = "most tokens of prompt and answer; default: what fits, or the model's"
    cards("--max-model-len", type=_length, metavar="N", help=length)
    running = "sequences that run at once; default: 256 on a GPU, 64 on a CPU"
    cards("--max-num-seqs", type=_running, metavar="N", help=running)

    processes = serve.add_argument_group("processes").add_argument
    number = "instead of --layout; default: what it says"
    processes("--decoders", type=_count, metavar="N", help=number)
    processes("--encoders", type=_count, metavar="N", help="the same; a text model has none")
    processes("--gateways", type=_count, metavar="N", help="default: one for four cores, at most 4")
    redis = "instead of starting a Redis; no password"
    processes("--redis-url", metavar="URL", help=redis)
    links = "between the services: sockets in a private directory (default), or loopback"
    processes("--grpc", choices=("unix", "tcp"), default="unix", help=links)

    said = serve.add_argument_group("what it says").add_argument
    said("--log-level", choices=_LOG_LEVELS, default="warning", help="least; default: warning")
    said("--access-log", action="store_true", help="a line for each request")
    serve.set_defaults(run=_serve)


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=f"http://{LOOPBACK}:{DEFAULT_PORT}", help="of the server, with /v1 or not"
    )
    command.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if exported")
    command.add_argument("--model", metavar="NAME", help="default: the first that is served")
    command.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer")


def _add_ask(commands: "argparse._SubParsersAction[_Parser]") -> None:
    ask = commands.add_parser("ask", help="ask a running server, about images, clips or without")
    ask.add_argument(
        "words", nargs="+", metavar="IMAGE|QUESTION",
        help="images and clips (files or http(s) URLs) and one question, in any order",
    )  # fmt: skip
    _add_server(ask)
    ask.set_defaults(run=_ask)


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    chat = commands.add_parser("chat", help="talk to a running server; images and clips by path")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_server(chat)
    chat.set_defaults(run=_chat)


def _add_key(commands: "argparse._SubParsersAction[_Parser]") -> None:
    key = commands.add_parser("key", help="make an API key and its entry in the key file")
    key.add_argument("tenant", help="whose key it is")
    key.add_argument("--id", default=None, help="default: the tenant's name and the date")
    key.add_argument("--file", type=Path, metavar="KEYS.JSON", help="add the entry to this file")
    key.set_defaults(run=_key)


def _within(convert: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """A type of arguments: numbers of a range, ends included."""

    def parse(text: str) -> float:
        try:
            number = convert(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            whole = "whole number" if convert is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is no {whole} from {low:,} to {high:,}")
        return number

    return parse


_port = _within(int, 0, 65535)
_count = _within(int, 1, 64)
_positive = _within(int, 1, 1 << 30)
_length = _within(int, 2, 1 << 30)
_running = _within(int, 1, 4096)
_share = _within(float, 0.05, 1.0)


def _device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is none of auto, cpu, cuda and cuda:N")
    return text


def _serve(options: argparse.Namespace) -> int:
    from triptych.serve import serve

    chosen = vars(options) | {
        "model": options.model or options.model_option or DEMONSTRATION_MODEL,
        "log_level": options.log_level.upper(),
    }
    names = chosen.keys() & ServeOptions.__dataclass_fields__.keys()
    return serve(ServeOptions(**{name: chosen[name] for name in names}), options.revision)


def _ask(options: argparse.Namespace) -> int:
    from triptych.client import ask_once

    return ask_once(options)


def _chat(options: argparse.Namespace) -> int:
    from triptych.chat import chat

    return chat(options)


def _key(options: argparse.Namespace) -> int:
    import json

    from triptych.key import KeyFileError, add_entry, make_key

    try:
        key, entry = make_key(options.tenant, options.id)
        if options.file is None:
            print(f'key, shown once: {key}\nentry for "keys" in the key file: {json.dumps(entry)}')
            return 0
        add_entry(options.file, entry)
    except KeyFileError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return 2
    print(key)  # alone, so that KEY=$(...) takes it
    return 0


def _demo(_: argparse.Namespace) -> int:
    from triptych.demo import demo

    return demo()
